"""Time a linear map in block FP8 against the same in bf16, quantisation included.

Of each shape two rows: the part that is in 8 bits (output and gradient of the input), and the whole
map with the gradient of its weight in bf16. The peer is three bf16 products of torch. Where the
ratio is above 1, 8 bits pay; the map over widths is what a recipe's ``least_width`` comes from.

Run ``python packages/precision/benchmarks/bench_quantized_linear.py`` in the repository's root.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import check_budget
from gem_precision.costs import quantized_linear_backward_cost, quantized_linear_cost
from gem_precision.kernels.quantized_linear.cases import CASES, LinearCase
from gem_precision.ops import block_dequantize, block_quantize, fp8_block_linear

_FORMATS = ("fp8_block", "bf16")


def tensors_of(case: LinearCase, device: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    shapes = ((case.rows, case.width), (case.columns, case.width), (case.rows, case.columns))
    x_TD, weight_FD, grad_TF = (torch.randn(s, device=device, dtype=dtype) for s in shapes)
    return x_TD, weight_FD * case.width**-0.5, grad_TF


def ours(given: tuple[Tensor, Tensor, Tensor], whole: bool) -> tuple[Any, ...]:  # noqa: FBT001
    x_TD, weight_FD, grad_TF = given
    ops = torch.ops.gem_precision
    y_TF = ops.quantized_linear(x_TD, weight_FD, "fp8_block", *_FORMATS, "auto")
    needs = (True, whole)
    grads = ops.quantized_linear_backward(grad_TF, x_TD, weight_FD, *_FORMATS, *needs, "auto")
    return y_TF, *grads[: 1 + whole]


def theirs(given: tuple[Tensor, Tensor, Tensor], whole: bool) -> tuple[Any, ...]:  # noqa: FBT001
    x_TD, weight_FD, grad_TF = given
    made = (x_TD @ weight_FD.T, grad_TF @ weight_FD)
    return (*made, grad_TF.T @ x_TD) if whole else made


def check(case: LinearCase, device: str) -> None:
    """Hold some rows to the fp64 product of the numbers that the factors have in 8 bits."""
    x_TD, weight_FD, _ = tensors_of(replace(case, rows=min(case.rows, 301)), device)
    y_TF = fp8_block_linear(x_TD, weight_FD)
    x = block_dequantize(block_quantize(x_TD))
    weight = block_dequantize(block_quantize(weight_FD, block="128x128"))
    low = (x @ weight.T).to(y_TF.dtype)
    exact = x.double() @ weight.double().T
    check_budget(y_TF, low, exact, what=case.name, noise_scale=float(case.width))


def rows_of(case: LinearCase, device: str) -> list[BenchCase]:
    given = tensors_of(case, device)
    size = {"rows": case.rows, "width": case.width, "columns": case.columns}
    size["element_bytes"] = given[0].element_size()
    forward = quantized_linear_cost(**size)
    # Output and gradient of the input; the weight's gradient is in bf16.
    low = forward + quantized_linear_backward_cost(**size, products=1)
    return [
        BenchCase(
            name=f"{case.name} {name}",
            run=partial(ours, given, whole),
            check=partial(check, case, device),
            cost=forward + quantized_linear_backward_cost(**size, products=1 + whole),
            shapes={"rows": case.rows, "width": case.width, "columns": case.columns},
            dtype="fp8_block",
            peers={"bf16": partial(theirs, given, whole)},
            fp8_flops=low.flops,
        )
        for name, whole in (("in 8 bits", False), ("whole", True))
    ]


def groups_of(device: str) -> Iterable[Group]:
    for case in (case for case in CASES if device.startswith(case.device)):
        yield case.name, partial(rows_of, case, device)


if __name__ == "__main__":
    run_script("quantized_linear", groups_of)

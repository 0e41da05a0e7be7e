"""Time ``mx_quantize`` against a copy of its input, and against plain torch, compiled.

What bounds it is memory: its row tells which share of the bandwidth of a copy it reaches.

Run ``python packages/precision/benchmarks/bench_mx_quantize.py`` in the repository's root.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import CheckFailure
from gem_precision.costs import mx_quantize_cost
from gem_precision.elements import BLOCK, ELEMENTS
from gem_precision.kernels.mx_quantize.cases import CASES, MxCase
from gem_precision.ops import MxMatrix, mx_quantize, mx_quantize_both

Call = Callable[..., Any]
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def matrix_of(case: MxCase, device: str, rows: int) -> Tensor:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return torch.randn(rows, case.width, device=device, dtype=dtype)


def ours(case: MxCase, x_TD: Tensor) -> MxMatrix | tuple[MxMatrix, MxMatrix]:
    if case.along == "both":
        return mx_quantize_both(x_TD, element=case.element)
    if case.along == "square":
        return mx_quantize(x_TD, element=case.element, block="32x32")
    return mx_quantize(x_TD, element=case.element, along=case.along)


def theirs(case: MxCase, x_TD: Tensor) -> list[Tensor]:
    """Do the same with torch's own casts, on a matrix of whole blocks.

    The scale is rounded up by the exponent's bits; at the ends of the range it may differ.
    """
    blocks = {
        "rows": [(1, BLOCK)], "columns": [(BLOCK, 1)], "both": [(1, BLOCK), (BLOCK, 1)],
        "square": [(BLOCK, BLOCK)],
    }[case.along]  # fmt: skip
    largest = 1.75 * 2.0 ** ELEMENTS[case.element].largest_exponent
    made = []
    for rows, columns in blocks:
        tiles = x_TD.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        quotient = (tiles.abs().amax(dim=(1, 3), keepdim=True) / largest).view(torch.int32)
        code = (quotient + 0x7F_FFFF) >> 23
        scaled = tiles * ((254 - code) << 23).view(torch.float32)
        made += [scaled.to(DTYPES[case.element]).reshape(x_TD.shape), code.to(torch.uint8)]
    return made


def check(case: MxCase, device: str) -> None:
    """Hold the bytes of some rows to those of the reference on a CPU."""
    x_TD = matrix_of(case, device, 1000)
    for made, expected in zip(
        _matrices(ours(case, x_TD)), _matrices(ours(case, x_TD.cpu())), strict=True
    ):
        for name in ("elements_TD", "scales"):
            if not torch.equal(getattr(made, name).cpu(), getattr(expected, name)):
                raise CheckFailure(f"{case.name}: {name} are not the bytes of the reference")


def _matrices(made: MxMatrix | tuple[MxMatrix, MxMatrix]) -> tuple[MxMatrix, ...]:
    return (made,) if isinstance(made, MxMatrix) else made


def rows_of(case: MxCase, device: str) -> list[BenchCase]:
    x_TD = matrix_of(case, device, case.rows)
    peers: dict[str, Call] = {"copy": x_TD.clone}
    if (
        device.startswith("cuda") and case.name == "activations_2048_both"
    ):  # it takes long to compile
        peers["compiled"] = partial(torch.compile(partial(theirs, case), dynamic=False), x_TD)
    return [
        BenchCase(
            name=case.name,
            run=partial(ours, case, x_TD),
            check=partial(check, case, device),
            cost=mx_quantize_cost(
                rows=case.rows,
                width=case.width,
                element_bytes=x_TD.element_size(),
                along=case.along,
            ),
            shapes={
                "rows": case.rows,
                "width": case.width,
                "along": case.along,
                "element": case.element,
            },
            dtype="bf16" if device.startswith("cuda") else "fp32",
            peers=peers,
        )
    ]


def groups_of(device: str) -> Iterable[Group]:
    for case in (case for case in CASES if device.startswith(case.device)):
        yield case.name, partial(rows_of, case, device)


if __name__ == "__main__":
    run_script("mx_quantize", groups_of)

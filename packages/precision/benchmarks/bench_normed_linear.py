"""Time ``normed_linear`` against a norm and a product.

The peers are our norm before the library's product (``separate``), torch's norm before it
(``eager``) and, in two cases, that compiled (``compiled``). The operator runs with
``impl="triton"`` on a GPU, because ``auto`` may take the first peer.

Run ``python packages/precision/benchmarks/bench_normed_linear.py`` in the repository's root.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_opkit.bench import BenchCase, backward_of
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import check_run_budget, fresh, run_with_gradients
from gem_opkit.impl import Impl
from gem_precision.costs import normed_linear_backward_cost, normed_linear_cost
from gem_precision.kernels.normed_linear.cases import CASES, NormedLinearCase
from gem_precision.ops import layer_norm, normed_linear, rms_norm

Call = Callable[..., Any]
EPS = 1e-6
# It takes long to compile.
COMPILED = ("events_512_to_1536", "rows_512_to_512")


def tensors_of(case: NormedLinearCase, device: str, tokens: int) -> tuple[Tensor, ...]:
    """Draw tokens, weights and, if asked for, the gain."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    weight = torch.randn(case.out_width, case.width, device=device, dtype=dtype)
    drawn = [torch.randn(tokens, case.width, device=device, dtype=dtype), weight / case.width**0.5]
    if case.affine:
        drawn.append(torch.randn(case.width, device=device, dtype=dtype))
    return tuple(t.requires_grad_() for t in drawn)


def ours(case: NormedLinearCase, impl: Impl, x: Tensor, weight: Tensor, *gain: Tensor) -> Tensor:
    given = gain[0] if gain else None
    return normed_linear(x, weight, kind=case.kind, gain_D=given, eps=EPS, impl=impl)


def separate(case: NormedLinearCase, x: Tensor, weight: Tensor, *gain: Tensor) -> Tensor:
    norm = rms_norm if case.kind == "rms" else layer_norm
    return F.linear(norm(x, gain_D=gain[0] if gain else None, eps=EPS), weight)


def eager(case: NormedLinearCase, x: Tensor, weight: Tensor, *gain: Tensor) -> Tensor:
    given, shape = gain[0] if gain else None, (case.width,)
    if case.kind == "rms":
        return F.linear(F.rms_norm(x, shape, given, EPS), weight)
    return F.linear(F.layer_norm(x, shape, given, None, EPS), weight)


def check(case: NormedLinearCase, device: str, impl: Impl) -> None:
    """Hold some tokens, forward and backward, to the error budget."""
    inputs = tensors_of(case, device, 1000)
    exact, low = (
        run_with_gradients(partial(eager, case), fresh(inputs, dtype=dtype))
        for dtype in (torch.float64, None)
    )
    check_run_budget(run_with_gradients(partial(ours, case, impl), fresh(inputs)), low, exact)


def rows_of(case: NormedLinearCase, device: str) -> list[BenchCase]:
    inputs = tensors_of(case, device, case.tokens)
    on_gpu = device.startswith("cuda")
    impl: Impl = "triton" if on_gpu else "reference"
    sizes = {
        "tokens": case.tokens,
        "width": case.width,
        "out_width": case.out_width,
        "element_bytes": inputs[0].element_size(),
        "affine": case.affine,
    }
    costs = {
        "forward": normed_linear_cost(**sizes),
        "backward": normed_linear_backward_cost(**sizes),
    }
    everyone: dict[str, Call] = {
        "": partial(ours, case, impl),
        "separate": partial(separate, case),
        "eager": partial(eager, case),
    }
    if case.name in COMPILED:
        # Cases share a function: behind eight of its graphs the compiler would run it as it is.
        torch.compiler.reset()
        everyone["compiled"] = torch.compile(partial(eager, case), dynamic=False)
    rows = []
    for which, cost in costs.items():
        make = backward_of if which == "backward" else forward_of
        timed = {who: make(call, inputs) for who, call in everyone.items()}
        rows.append(
            BenchCase(
                name=f"{case.name}_{which}",
                run=timed.pop(""),
                check=partial(check, case, device, impl),
                cost=cost,
                shapes={
                    "tokens": case.tokens,
                    "width": case.width,
                    "out_width": case.out_width,
                    "kind": case.kind,
                    "affine": case.affine,
                },
                dtype="bf16" if on_gpu else "fp32",
                peers=timed,
            )
        )
    return rows


def forward_of(fn: Call, inputs: tuple[Tensor, ...]) -> Call:
    """Return a call of the forward pass alone."""
    plain = [x.detach() for x in inputs]
    return lambda: fn(*plain)


def groups_of(device: str) -> Iterable[Group]:
    for case in (case for case in CASES if device.startswith(case.device)):
        yield case.name, partial(rows_of, case, device)


if __name__ == "__main__":
    run_script("normed_linear", groups_of)

"""Time ``gated_residual`` against torch: the gate spread over the tokens, then ``addcmul``.

Run ``python packages/precision/benchmarks/bench_gated_residual.py`` in the repository's root.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gem_opkit.bench import BenchCase, backward_of
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import check_run_budget, fresh, run_with_gradients
from gem_opkit.cost import Cost
from gem_precision.costs import gated_residual_backward_cost, gated_residual_cost
from gem_precision.kernels.gated_residual.cases import CASES, GateCase
from gem_precision.ops import gated_residual

Call = Callable[..., Any]


def tensors_of(case: GateCase, device: str, batch: int) -> tuple[Tensor, ...]:
    """Draw tokens, what is added, gates, and where sequences begin."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    lengths = torch.randint(1, case.longest + 1, (batch,), generator=torch.Generator())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
    shapes = [(int(lengths.sum()), case.width)] * 2 + [(batch, case.width)]
    draws = (torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in shapes)
    return *draws, offsets


def theirs(x: Tensor, out: Tensor, gate: Tensor, offsets: Tensor) -> Tensor:
    spread = gate.repeat_interleave(offsets.diff(), dim=0, output_size=x.shape[0])
    return torch.addcmul(x, out, spread)


def check(case: GateCase, device: str) -> None:
    """Hold a few sequences, forward and backward, to the error budget."""
    inputs = tensors_of(case, device, 5)
    exact, low = (
        run_with_gradients(theirs, fresh(inputs, dtype=dtype)) for dtype in (torch.float64, None)
    )
    check_run_budget(run_with_gradients(gated_residual, fresh(inputs)), low, exact)


def rows_of(case: GateCase, device: str) -> list[BenchCase]:
    inputs = tensors_of(case, device, case.batch)
    sizes = {
        "batch": case.batch,
        "total_tokens": inputs[0].shape[0],
        "width": case.width,
        "element_bytes": inputs[0].element_size(),
    }
    costs: dict[str, Cost] = {
        "forward": gated_residual_cost(**sizes),
        "backward": gated_residual_backward_cost(**sizes),
    }
    everyone: dict[str, Call] = {"": gated_residual, "eager": theirs}
    rows = []
    for which, cost in costs.items():
        make = backward_of if which == "backward" else forward_of
        timed = {who: make(call, inputs) for who, call in everyone.items()}
        rows.append(
            BenchCase(
                name=f"{case.name}_{which}",
                run=timed.pop(""),
                check=partial(check, case, device),
                cost=cost,
                shapes={"batch": case.batch, "longest": case.longest, "width": case.width},
                dtype="bf16" if device.startswith("cuda") else "fp32",
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
    run_script("gated_residual", groups_of)

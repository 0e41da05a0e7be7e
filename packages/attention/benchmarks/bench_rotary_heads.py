"""Time ``rotary_heads`` against the norm and the rotation one after the other.

The peers are written in plain torch, as one would without the operator: angles, norm, complex
product; ``torch.compile`` fuses what it can of it.

Run ``python packages/attention/benchmarks/bench_rotary_heads.py`` in the repository's root.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_attention.costs import rotary_heads_backward_cost, rotary_heads_cost
from gem_attention.kernels.rotary_heads.cases import CASES, HeadsCase
from gem_attention.ops import rotary_heads
from gem_attention.rotary import apply_rotary, rotary_angles, rote_angles
from gem_jagged.batch import Layout
from gem_jagged.offsets import positions
from gem_opkit.bench import BenchCase, backward_of
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import check_run_budget, fresh, run_with_gradients

Call = Callable[..., Any]


def draw(case: HeadsCase, device: str, sequences: int) -> tuple[Tensor, Layout, Tensor]:
    """Draw a projection, where its sequences begin, and the age of each token."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    layout = Layout.from_lengths([case.length] * sequences, device=device)
    heads = case.heads + 2 * case.key_heads
    qkv = torch.randn(layout.total_tokens, heads, case.width, device=device, dtype=dtype)
    gaps = torch.rand(layout.total_tokens, device=device) * 1e6
    return qkv.requires_grad_(), layout, gaps


def ours(case: HeadsCase, qkv: Tensor, layout: Layout, gaps: Tensor) -> tuple[Tensor, ...]:
    return rotary_heads(
        qkv,
        layout,
        heads=case.heads,
        key_heads=case.key_heads,
        rotary=case.rotary,
        gap_seconds_T=gaps if case.rotary == "rote" else None,
    )


def plain(case: HeadsCase, qkv: Tensor, layout: Layout, gaps: Tensor) -> tuple[Tensor, ...]:
    both = case.heads + case.key_heads
    qk = F.rms_norm(qkv[:, :both], (case.width,), None, 1e-6)
    place = positions(layout.offsets_O, qkv.shape[0])
    if case.rotary == "rote":
        turn = rote_angles(place, gaps, case.width)
    else:
        turn = rotary_angles(place, case.width)
    qk = apply_rotary(qk, *turn)
    return qk[:, : case.heads], qk[:, case.heads :], qkv[:, both:]


def check(case: HeadsCase, device: str) -> None:
    """Hold two sequences, forward and backward, to the error budget."""
    inputs = draw(case, device, 2)
    exact, low = (
        run_with_gradients(partial(plain, case), fresh(inputs, dtype=dtype))
        for dtype in (torch.float64, None)
    )
    # The plain angles are fp32 in fp64 too, as those of the operator.
    check_run_budget(run_with_gradients(partial(ours, case), fresh(inputs)), low, exact)


def rows_of(case: HeadsCase, device: str) -> list[BenchCase]:
    inputs = draw(case, device, case.sequences)
    sizes = {
        "total_tokens": inputs[1].total_tokens,
        "heads": case.heads,
        "key_heads": case.key_heads,
        "width": case.width,
        "element_bytes": inputs[0].element_size(),
    }
    costs = {
        "forward": rotary_heads_cost(**sizes),
        "backward": rotary_heads_backward_cost(**sizes, normed=True),
    }
    everyone: dict[str, Call] = {"": partial(ours, case), "eager": partial(plain, case)}
    if device.startswith("cuda"):
        # Cases share a function: behind eight of its graphs the compiler would run it as it is.
        torch.compiler.reset()
        everyone["compiled"] = torch.compile(partial(plain, case), dynamic=False)
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
                shapes={**sizes, "rotary": case.rotary},
                dtype="bf16" if device.startswith("cuda") else "fp32",
                peers=timed,
            )
        )
    return rows


def forward_of(fn: Call, inputs: tuple[Any, ...]) -> Call:
    """Return a call of the forward pass alone."""
    qkv, *others = inputs
    return lambda: fn(qkv.detach(), *others)


def groups_of(device: str) -> Iterable[Group]:
    for case in (case for case in CASES if device.startswith(case.device)):
        yield case.name, partial(rows_of, case, device)


if __name__ == "__main__":
    run_script("rotary_heads", groups_of)

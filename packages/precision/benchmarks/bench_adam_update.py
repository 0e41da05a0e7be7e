"""Time ``adam_update`` with clipping inside against torch: scaling of gradients, fused Adam.

Where gradients come in bf16, torch's optimizer reads them in fp32, and casts them and the weights
on the way; both casts are in its time.

Run ``python packages/precision/benchmarks/bench_adam_update.py`` in the repository's root.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import Group, run_script
from gem_precision.costs import adam_update_cost
from gem_precision.kernels.adam_update.cases import CASES, AdamCase
from gem_precision.ops import adam_update

RATE, BETAS, EPS = 1e-3, (0.9, 0.999), 1e-8


@dataclass
class Weights:
    """Weights with all that Adam keeps of them."""

    weights: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]
    copies: list[Tensor]
    factor: Tensor


def draw(case: AdamCase, device: str, *, most: int = 0) -> Weights:
    """Draw all; with ``most`` no dim is longer than that."""
    torch.manual_seed(0)
    shapes = [tuple(min(s, most) if most else s for s in shape) for shape in case.shapes]
    weights, means = ([torch.randn(s, device=device) for s in shapes] for _ in range(2))
    gradients = [torch.randn(s, device=device) for s in shapes]
    if case.half:
        gradients = [g.bfloat16() for g in gradients]
    return Weights(
        weights,
        gradients,
        means,
        [torch.rand(s, device=device) for s in shapes],
        [torch.ones((), device=device) for _ in shapes],
        [w.bfloat16() for w in weights] if case.half else [],
        torch.tensor(0.5, device=device),
    )


def ours(given: Weights) -> None:
    count = len(given.weights)
    adam_update(
        given.weights, given.gradients, given.means, given.squares, given.steps,
        rates=[RATE] * count, decays=[0.0] * count, beta1=BETAS[0], beta2=BETAS[1], eps=EPS,
        factor=given.factor, copies=given.copies,
    )  # fmt: skip


def theirs(given: Weights) -> None:
    """Clip and move by torch's fused kernel, the casts of a step in bf16 beside them."""
    gradients = [g.float() for g in given.gradients]
    torch._foreach_mul_(gradients, given.factor)
    torch._fused_adam_(
        given.weights, gradients, given.means, given.squares, [], given.steps, lr=RATE,
        beta1=BETAS[0], beta2=BETAS[1], weight_decay=0.0, eps=EPS, amsgrad=False, maximize=False,
    )  # fmt: skip
    if given.copies:
        torch._foreach_copy_(given.copies, given.weights)


def check(case: AdamCase, device: str) -> None:
    """Hold weights of small sizes to torch's."""
    own, other = (draw(case, device, most=300) for _ in range(2))
    ours(own)
    theirs(other)
    for got, expected in zip(own.weights, other.weights, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def rows_of(case: AdamCase, device: str) -> list[BenchCase]:
    given = draw(case, device)
    elements = sum(w.numel() for w in given.weights)
    return [
        BenchCase(
            name=case.name,
            run=partial(ours, given),
            check=partial(check, case, device),
            cost=adam_update_cost(
                elements=elements, gradient_bytes=2 if case.half else 4, copied=case.half
            ),
            shapes={"elements": elements, "tensors": len(given.weights), "half": case.half},
            dtype="bf16" if case.half else "fp32",
            peers={"fused and clipped": partial(theirs, given)},
        )
    ]


def groups_of(device: str) -> Iterable[Group]:
    for case in (case for case in CASES if device.startswith(case.device)):
        yield case.name, partial(rows_of, case, device)


if __name__ == "__main__":
    run_script("adam_update", groups_of)

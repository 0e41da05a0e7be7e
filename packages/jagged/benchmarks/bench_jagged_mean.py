"""Time ``jagged_mean`` against ``torch.segment_reduce`` and against a loop over the sequences.

Run ``python packages/jagged/benchmarks/bench_jagged_mean.py`` in the repository's root.
"""

from typing import Any

import torch
from packed import main, tokens
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_mean.cases import CASES
from gem_jagged.kernels.jagged_mean.cost import jagged_mean_backward_cost, jagged_mean_cost
from gem_jagged.ops import jagged_mean
from gem_opkit.bench import BenchCase, backward_of
from gem_opkit.budget import check_budget, run_with_gradients


def loop(values: Tensor, layout: Layout) -> Tensor:
    parts = values.split(layout.lengths.tolist())
    return torch.stack([part.sum(0) / max(part.shape[0], 1) for part in parts])


def segments(values: Tensor, layout: Layout) -> Tensor:
    return torch.segment_reduce(
        values, "mean", offsets=layout.offsets_O, axis=0, unsafe=True, initial=0.0
    )


def within_budget(inputs: tuple[Tensor, Layout]) -> None:
    """Hold outputs and gradients to the error budget, with the loop as the honest reference."""
    values, layout = inputs
    exact = run_with_gradients(loop, (values.detach().double().requires_grad_(), layout))
    kernel, low = (run_with_gradients(fn, inputs) for fn in (jagged_mean, loop))
    for part in ("outputs", "gradients"):
        triples: Any = zip(*(getattr(run, part) for run in (kernel, low, exact)), strict=True)
        for a, b, c in triples:
            check_budget(a, b, c, what=part)


def make_cases(device: str) -> list[BenchCase]:
    rows = []
    for case in CASES:
        if case.device != device.split(":")[0] or case.total_tokens < 1000:
            continue
        inputs = tokens(case.lengths, case.width, device)
        values, layout = inputs
        size = {
            "batch": layout.batch,
            "total_tokens": layout.total_tokens,
            "width": case.width,
            "element_bytes": values.element_size(),
        }
        passes = {
            "forward": (
                lambda i=inputs: jagged_mean(*i),
                {"loop": lambda i=inputs: loop(*i), "segments": lambda i=inputs: segments(*i)},
                jagged_mean_cost(**size),
            ),
            "backward": (
                backward_of(jagged_mean, inputs),
                {"loop": backward_of(loop, inputs), "segments": backward_of(segments, inputs)},
                jagged_mean_backward_cost(**size),
            ),
        }
        for which, (run, peers, cost) in passes.items():
            rows.append(
                BenchCase(
                    name=f"{case.name}_{which}",
                    run=run,
                    check=lambda i=inputs: within_budget(i),
                    cost=cost,
                    shapes={"lengths": case.lengths, "width": case.width},
                    dtype=str(values.dtype).removeprefix("torch."),
                    peers=peers,
                )
            )
    return rows


if __name__ == "__main__":
    main("jagged_mean", make_cases)

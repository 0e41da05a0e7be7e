"""Time ``padded_to_jagged`` against a boolean mask and against a loop over the sequences.

Run ``python packages/jagged/benchmarks/bench_padded_to_jagged.py`` in the repository's root.
"""

import torch
from packed import dtype_for, equals, main
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.padded_to_jagged.cases import CASES
from gem_jagged.kernels.padded_to_jagged.cost import (
    padded_to_jagged_backward_cost,
    padded_to_jagged_cost,
)
from gem_jagged.ops import padded_to_jagged
from gem_opkit.bench import BenchCase, backward_of


def loop(padded: Tensor, layout: Layout) -> Tensor:
    return torch.cat([row[:n] for row, n in zip(padded, layout.lengths.tolist(), strict=True)])


def masked(padded: Tensor, layout: Layout) -> Tensor:
    steps = torch.arange(padded.shape[1], device=padded.device)
    return padded[steps < layout.offsets_O.diff()[:, None]]


def make_cases(device: str) -> list[BenchCase]:
    rows = []
    for case in CASES:
        if case.device != device.split(":")[0] or case.total_tokens < 1000:
            continue
        layout = Layout.from_lengths(case.lengths, device=device)
        shape = (layout.batch, layout.max_length, case.width)
        padded = torch.randn(shape, device=device, dtype=dtype_for(device)).requires_grad_()
        inputs = (padded, layout)
        size = {
            "total_tokens": layout.total_tokens,
            "width": case.width,
            "element_bytes": padded.element_size(),
        }
        backward_size = {**size, "batch": layout.batch, "length": layout.max_length}
        passes = {
            "forward": (
                lambda inputs=inputs: padded_to_jagged(*inputs),
                {
                    "loop": lambda inputs=inputs: loop(*inputs),
                    "mask": lambda inputs=inputs: masked(*inputs),
                },
                padded_to_jagged_cost(**size),
            ),
            "backward": (
                backward_of(padded_to_jagged, inputs),
                {"loop": backward_of(loop, inputs), "mask": backward_of(masked, inputs)},
                padded_to_jagged_backward_cost(**backward_size),
            ),
        }
        for which, (run, peers, cost) in passes.items():
            rows.append(
                BenchCase(
                    name=f"{case.name}_{which}",
                    run=run,
                    check=equals(run, peers["loop"]),
                    cost=cost,
                    shapes={"lengths": case.lengths, "width": case.width},
                    dtype=str(padded.dtype).removeprefix("torch."),
                    peers=peers,
                )
            )
    return rows


if __name__ == "__main__":
    main("padded_to_jagged", make_cases)

"""Time ``jagged_concat`` against a loop over the sequences.

Run ``python packages/jagged/benchmarks/bench_jagged_concat.py`` in the repository's root.
"""

import torch
from packed import equals, main, tokens
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_concat.cases import CASES
from gem_jagged.kernels.jagged_concat.cost import jagged_concat_cost
from gem_jagged.ops import concat_layouts, jagged_concat
from gem_opkit.bench import BenchCase, backward_of

Pair = tuple[Tensor, Layout, Tensor, Layout, Layout]


def ours(left: Tensor, left_layout: Layout, right: Tensor, *layouts: Layout) -> Tensor:
    right_layout, layout = layouts
    return jagged_concat(left, left_layout, right, right_layout, layout=layout)[0]


def loop(left: Tensor, left_layout: Layout, right: Tensor, *layouts: Layout) -> Tensor:
    sides = left.split(left_layout.lengths.tolist()), right.split(layouts[0].lengths.tolist())
    return torch.cat([part for pair in zip(*sides, strict=True) for part in pair])


def make_cases(device: str) -> list[BenchCase]:
    rows = []
    for left_case, right_case in CASES:
        if left_case.device != device.split(":")[0] or left_case.total_tokens < 1000:
            continue
        left, left_layout = tokens(left_case.lengths, left_case.width, device)
        right, right_layout = tokens(right_case.lengths, right_case.width, device)
        layout = concat_layouts(left_layout, right_layout)
        inputs: Pair = (left, left_layout, right, right_layout, layout)
        cost = jagged_concat_cost(
            left_tokens=left_layout.total_tokens,
            right_tokens=right_layout.total_tokens,
            width=left_case.width,
            element_bytes=left.element_size(),
        )
        passes = {
            "forward": (lambda i=inputs: ours(*i), lambda i=inputs: loop(*i)),
            "backward": (backward_of(ours, inputs), backward_of(loop, inputs)),
        }
        for which, (run, peer) in passes.items():
            rows.append(
                BenchCase(
                    name=f"{left_case.name}_and_{right_layout.total_tokens}_{which}",
                    run=run,
                    check=equals(run, peer),
                    cost=cost,
                    shapes={
                        "left_lengths": left_case.lengths,
                        "right_lengths": right_case.lengths,
                        "width": left_case.width,
                    },
                    dtype=str(left.dtype).removeprefix("torch."),
                    peers={"loop": peer},
                )
            )
    return rows


if __name__ == "__main__":
    main("jagged_concat", make_cases)

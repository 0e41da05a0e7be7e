"""Time ``jagged_split`` against a loop over the sequences and torch's index operations.

Run ``python packages/jagged/benchmarks/bench_jagged_split.py`` in the repository's root.
"""

from functools import partial

import torch
from packed import Work, main, movables
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_split.cases import CASES
from gem_jagged.kernels.jagged_split.cost import jagged_split_cost
from gem_jagged.ops import jagged_split
from gem_jagged.workloads import PackedCase


def loop(values: Tensor, left: Layout, right: Layout) -> tuple[Tensor, Tensor]:
    lengths = torch.stack([left.lengths, right.lengths], dim=1).flatten().tolist()
    parts = values.split(lengths)
    return torch.cat(parts[0::2]), torch.cat(parts[1::2])


def gathered(sides: tuple[Tensor, Tensor], values: Tensor, *_: Layout) -> tuple[Tensor, Tensor]:
    return values.index_select(0, sides[0]), values.index_select(0, sides[1])


def work_of(given_case: tuple[PackedCase, PackedCase], device: str) -> Work:
    left_case, right_case = given_case
    left_layout = Layout.from_lengths(left_case.lengths, device=device)
    right_layout = Layout.from_lengths(right_case.lengths, device=device)
    both = (left_layout.lengths + right_layout.lengths).tolist()
    values, _ = movables(both, left_case.width, device)
    size = {
        "left_tokens": left_layout.total_tokens,
        "right_tokens": right_layout.total_tokens,
        "width": left_case.width,
        "element_bytes": values.element_size(),
    }
    cost = jagged_split_cost(**size)
    numbers = torch.arange(values.shape[0], device=device)
    sides = jagged_split(numbers, left_layout, right_layout, impl="reference")
    return Work(
        left_case,
        jagged_split,
        (values, left_layout, right_layout),
        cost,
        cost,
        loop,
        gpu_peers={"gather_given_rows": partial(gathered, sides)},
        sizes={"right_tokens": right_layout.total_tokens},
        suffix=f"_and_{right_layout.total_tokens}",
    )


if __name__ == "__main__":
    main("jagged_split", CASES, work_of)

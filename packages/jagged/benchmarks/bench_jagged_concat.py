"""Time ``jagged_concat`` against a loop over the sequences and torch's index operations.

Run ``python packages/jagged/benchmarks/bench_jagged_concat.py`` in the repository's root.
"""

from functools import partial
from typing import Any

import torch
from packed import Work, main, movables
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_concat.cases import CASES
from gem_jagged.kernels.jagged_concat.cost import jagged_concat_cost
from gem_jagged.ops import concat_layouts, jagged_concat
from gem_jagged.workloads import PackedCase


def ours(left: Tensor, left_layout: Layout, right: Tensor, *layouts: Layout, **more: Any) -> Tensor:
    right_layout, layout = layouts
    return jagged_concat(left, left_layout, right, right_layout, layout=layout, **more)[0]


def loop(left: Tensor, left_layout: Layout, right: Tensor, *layouts: Layout) -> Tensor:
    sides = left.split(left_layout.lengths.tolist()), right.split(layouts[0].lengths.tolist())
    return torch.cat([part for pair in zip(*sides, strict=True) for part in pair])


def gathered(rows_T: Tensor, left: Tensor, _: Layout, right: Tensor, *__: Layout) -> Tensor:
    return torch.cat([left, right]).index_select(0, rows_T)


def work_of(given_case: tuple[PackedCase, PackedCase], device: str) -> Work:
    left_case, right_case = given_case
    left, left_layout = movables(left_case.lengths, left_case.width, device)
    right, right_layout = movables(right_case.lengths, right_case.width, device)
    size = {
        "left_tokens": left_layout.total_tokens,
        "right_tokens": right_layout.total_tokens,
        "width": left_case.width,
        "element_bytes": left.element_size(),
    }
    cost = jagged_concat_cost(**size)
    layouts = (right_layout, concat_layouts(left_layout, right_layout))
    numbers = torch.arange(left.shape[0] + right.shape[0], device=device)
    parts = numbers[: left.shape[0]], numbers[left.shape[0] :]
    rows_T = ours(parts[0], left_layout, parts[1], *layouts, impl="reference")
    return Work(
        left_case,
        ours,
        (left, left_layout, right, *layouts),
        cost,
        cost,
        loop,
        gpu_peers={"cat_and_gather_given_rows": partial(gathered, rows_T)},
        sizes={"right_tokens": right_layout.total_tokens},
        suffix=f"_and_{right_layout.total_tokens}",
    )


if __name__ == "__main__":
    main("jagged_concat", CASES, work_of)

"""Time ``jagged_take_last`` against a loop over the sequences and torch's index operations.

Run ``python packages/jagged/benchmarks/bench_jagged_take_last.py`` in the repository's root.
"""

from functools import partial
from typing import Any

import torch
from packed import Work, gathered, main, movables, rows_from
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_take_last.cases import CASES
from gem_jagged.kernels.jagged_take_last.cost import (
    jagged_take_last_backward_cost,
    jagged_take_last_cost,
)
from gem_jagged.ops import jagged_take_last, last_layout
from gem_jagged.workloads import PackedCase


def ours(values: Tensor, layout: Layout, count: int, kept: Layout, **more: Any) -> Tensor:
    return jagged_take_last(values, layout, count, kept=kept, **more)[0]


def loop(values: Tensor, layout: Layout, count: int, kept: Layout) -> Tensor:
    parts = values.split(layout.lengths.tolist())
    return torch.cat([part[max(0, len(part) - count) :] for part in parts])


def work_of(given_case: tuple[PackedCase, int], device: str) -> Work:
    case, count = given_case
    values, layout = movables(case.lengths, case.width, device)
    kept = last_layout(layout, count)
    size = {
        "kept_tokens": kept.total_tokens,
        "width": case.width,
        "element_bytes": values.element_size(),
    }
    rows_S = rows_from(ours, layout.total_tokens, layout, count, kept)
    return Work(
        case,
        ours,
        (values, layout, count, kept),
        jagged_take_last_cost(**size),
        jagged_take_last_backward_cost(**size, total_tokens=layout.total_tokens),
        loop,
        gpu_peers={"gather_given_rows": partial(gathered, rows_S)},
        sizes={"count": count, "kept_tokens": kept.total_tokens},
    )


if __name__ == "__main__":
    main("jagged_take_last", CASES, work_of)

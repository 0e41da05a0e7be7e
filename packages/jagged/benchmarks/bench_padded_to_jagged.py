"""Time ``padded_to_jagged`` against a boolean mask, a loop and torch's index operations.

Run ``python packages/jagged/benchmarks/bench_padded_to_jagged.py`` in the repository's root.
"""

from functools import partial
from typing import Any

import torch
from packed import Work, dtype_for, main, rows_from
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.padded_to_jagged.cases import CASES
from gem_jagged.kernels.padded_to_jagged.cost import (
    padded_to_jagged_backward_cost,
    padded_to_jagged_cost,
)
from gem_jagged.ops import padded_to_jagged
from gem_jagged.workloads import PackedCase


def loop(padded: Tensor, layout: Layout) -> Tensor:
    return torch.cat([row[:n] for row, n in zip(padded, layout.lengths.tolist(), strict=True)])


def masked(padded: Tensor, layout: Layout) -> Tensor:
    steps = torch.arange(padded.shape[1], device=padded.device)
    return padded[steps < layout.offsets_O.diff()[:, None]]


def padded_rows(numbers: Tensor, layout: Layout, **more: Any) -> Tensor:
    return padded_to_jagged(numbers.view(layout.batch, -1), layout, **more)


def gathered(rows_T: Tensor, padded: Tensor, _: Layout) -> Tensor:
    return padded.flatten(0, 1).index_select(0, rows_T)


def work_of(case: PackedCase, device: str) -> Work:
    layout = Layout.from_lengths(case.lengths, device=device)
    shape = (layout.batch, layout.max_length, case.width)
    if case.width == 1:  # ids
        padded = torch.randint(2**62, shape, device=device)
    else:
        padded = torch.randn(shape, device=device, dtype=dtype_for(device)).requires_grad_()
    rows_T = rows_from(padded_rows, layout.batch * layout.max_length, layout)
    size = {
        "total_tokens": layout.total_tokens,
        "width": case.width,
        "element_bytes": padded.element_size(),
    }
    return Work(
        case,
        padded_to_jagged,
        (padded, layout),
        padded_to_jagged_cost(**size),
        padded_to_jagged_backward_cost(**size, batch=layout.batch, length=layout.max_length),
        loop,
        {"mask": masked},
        {"gather_given_rows": partial(gathered, rows_T)},
    )


if __name__ == "__main__":
    main("padded_to_jagged", CASES, work_of)

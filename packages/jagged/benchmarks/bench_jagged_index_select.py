"""Time ``jagged_index_select`` against a loop over the sequences and torch's index operations.

Run ``python packages/jagged/benchmarks/bench_jagged_index_select.py`` in the repository's root.
"""

from typing import Any

import torch
from packed import Work, main, rows_of, tokens, wanted
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_index_select.cases import CASES
from gem_jagged.kernels.jagged_index_select.cost import (
    jagged_index_select_backward_cost,
    jagged_index_select_cost,
)
from gem_jagged.ops import jagged_index_select, select_layout
from gem_opkit.bench import BenchCase


def loop(
    values: Tensor, layout: Layout, indices: Tensor, selected: Layout, names: list[int]
) -> Tensor:
    parts = values.split(layout.lengths.tolist())
    return torch.cat([parts[name] for name in names])


def ours(
    values: Tensor,
    layout: Layout,
    indices: Tensor,
    selected: Layout,
    names: list[int],
    **more: Any,
) -> Tensor:
    return jagged_index_select(values, layout, indices, selected=selected, **more)[0]


def make_cases(device: str) -> list[BenchCase]:
    rows = []
    for case, names in CASES:
        if not wanted(case, device):
            continue
        values, layout = tokens(case.lengths, case.width, device)
        indices = torch.tensor(names)
        selected = select_layout(layout, indices)
        size = {
            "selected_tokens": selected.total_tokens,
            "width": case.width,
            "element_bytes": values.element_size(),
        }
        work = Work(
            case,
            ours,
            (values, layout, indices.to(device), selected, list(names)),
            jagged_index_select_cost(**size),
            jagged_index_select_backward_cost(**size, total_tokens=layout.total_tokens),
            loop,
            moves=False,
            sizes={"selected_tokens": selected.total_tokens},
        )
        rows += rows_of(work)
    return rows


if __name__ == "__main__":
    main("jagged_index_select", make_cases)

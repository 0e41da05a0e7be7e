"""Time ``jagged_index_select`` against a loop over the sequences and torch's index operations.

Run ``python packages/jagged/benchmarks/bench_jagged_index_select.py`` in the repository's root.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from packed import Work, gathered, main, movables, rows_from
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_index_select.cases import CASES
from gem_jagged.kernels.jagged_index_select.cost import (
    jagged_index_select_backward_cost,
    jagged_index_select_cost,
)
from gem_jagged.ops import jagged_index_select, select_layout
from gem_jagged.workloads import PackedCase

COMPILED = torch.compile(gathered, dynamic=True)


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


def work_of(given_case: tuple[PackedCase, Sequence[int]], device: str) -> Work:
    case, names = given_case
    values, layout = movables(case.lengths, case.width, device)
    indices = torch.tensor(names)
    selected = select_layout(layout, indices)
    size = {
        "selected_tokens": selected.total_tokens,
        "width": case.width,
        "element_bytes": values.element_size(),
    }
    given = (indices.to(device), selected, list(names))
    rows_S = rows_from(ours, layout.total_tokens, layout, *given)
    return Work(
        case,
        ours,
        (values, layout, *given),
        jagged_index_select_cost(**size),
        jagged_index_select_backward_cost(**size, total_tokens=layout.total_tokens),
        loop,
        gpu_peers={
            "gather_given_rows": partial(gathered, rows_S),
            "compiled_given_rows": partial(COMPILED, rows_S),
        },
        moves=not values.requires_grad,  # ids have no gradient that copies would be added up to
        sizes={"selected_tokens": selected.total_tokens},
    )


if __name__ == "__main__":
    main("jagged_index_select", CASES, work_of)

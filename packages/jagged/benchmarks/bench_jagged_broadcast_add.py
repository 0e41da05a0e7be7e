"""Time ``jagged_broadcast_add`` against a loop over the sequences and torch's index operations.

Run ``python packages/jagged/benchmarks/bench_jagged_broadcast_add.py`` in the repository's root.
"""

from functools import partial

import torch
from packed import Work, main, tokens
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_broadcast_add.cases import CASES
from gem_jagged.kernels.jagged_broadcast_add.cost import (
    jagged_broadcast_add_backward_cost,
    jagged_broadcast_add_cost,
)
from gem_jagged.ops import jagged_broadcast_add
from gem_jagged.workloads import PackedCase


def loop(values: Tensor, layout: Layout, dense: Tensor) -> Tensor:
    parts = values.split(layout.lengths.tolist())
    return torch.cat([part + row for part, row in zip(parts, dense, strict=True)])


def repeated(values: Tensor, layout: Layout, dense: Tensor) -> Tensor:
    lengths = layout.offsets_O.diff()
    return values + dense.repeat_interleave(lengths, 0, output_size=layout.total_tokens)


def sequence_of(layout: Layout) -> Tensor:
    numbers = torch.arange(layout.batch, device=layout.offsets_O.device)
    return numbers.repeat_interleave(layout.offsets_O.diff())


def gathered(rows_T: Tensor, values: Tensor, _: Layout, dense: Tensor) -> Tensor:
    return values + dense[rows_T]


COMPILED = torch.compile(gathered, dynamic=True)


def work_of(case: PackedCase, device: str) -> Work:
    values, layout = tokens(case.lengths, case.width, device)
    dense, _ = tokens((layout.batch,), case.width, device)
    size = {
        "batch": layout.batch,
        "total_tokens": layout.total_tokens,
        "width": case.width,
        "element_bytes": values.element_size(),
    }
    return Work(
        case,
        jagged_broadcast_add,
        (values, layout, dense),
        jagged_broadcast_add_cost(**size),
        jagged_broadcast_add_backward_cost(**size),
        loop,
        {"repeat_interleave": repeated},
        {
            "repeat_interleave": repeated,
            "compiled_given_rows": partial(COMPILED, sequence_of(layout)),
        },
        moves=False,
    )


if __name__ == "__main__":
    main("jagged_broadcast_add", CASES, work_of)

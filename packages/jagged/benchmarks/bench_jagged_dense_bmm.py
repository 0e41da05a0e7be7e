"""Time ``jagged_dense_bmm`` against a padded batched product and a loop over the sequences.

Run ``python packages/jagged/benchmarks/bench_jagged_dense_bmm.py`` in the repository's root.
"""

from collections.abc import Iterator

import torch
from packed import Work, dtype_for, main, rows_of, tokens, wanted
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_dense_bmm.cases import CASES
from gem_jagged.kernels.jagged_dense_bmm.cost import (
    jagged_dense_bmm_backward_cost,
    jagged_dense_bmm_cost,
)
from gem_jagged.ops import jagged_dense_bmm, jagged_to_padded, padded_to_jagged
from gem_opkit.bench import BenchCase


def loop(values: Tensor, layout: Layout, dense: Tensor) -> Tensor:
    parts = values.split(layout.lengths.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, dense, strict=True)])


def padded(values: Tensor, layout: Layout, dense: Tensor) -> Tensor:
    return padded_to_jagged(torch.bmm(jagged_to_padded(values, layout), dense), layout)


def make_cases(device: str) -> Iterator[list[BenchCase]]:
    for case, out_width in CASES:
        if not wanted(case, device):
            continue
        values, layout = tokens(case.lengths, case.width, device)
        shape = (layout.batch, case.width, out_width)
        dense = torch.randn(shape, device=device, dtype=dtype_for(device)).requires_grad_()
        size = {
            "batch": layout.batch,
            "total_tokens": layout.total_tokens,
            "width": case.width,
            "out_width": out_width,
            "element_bytes": values.element_size(),
        }
        work = Work(
            case,
            jagged_dense_bmm,
            (values, layout, dense),
            jagged_dense_bmm_cost(**size),
            jagged_dense_bmm_backward_cost(**size),
            loop,
            {"padded_bmm": padded},
            moves=False,
            sizes={"out_width": out_width},
        )
        yield rows_of(work)


if __name__ == "__main__":
    main("jagged_dense_bmm", make_cases)

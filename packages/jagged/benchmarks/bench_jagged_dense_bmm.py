"""Time ``jagged_dense_bmm`` against a padded batched product and a loop over the sequences.

Run ``python packages/jagged/benchmarks/bench_jagged_dense_bmm.py`` in the repository's root.
"""

import torch
from packed import Work, dtype_for, main, tokens
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_dense_bmm.cases import CASES
from gem_jagged.kernels.jagged_dense_bmm.cost import (
    jagged_dense_bmm_backward_cost,
    jagged_dense_bmm_cost,
)
from gem_jagged.ops import jagged_dense_bmm, jagged_to_padded, padded_to_jagged
from gem_jagged.workloads import PackedCase


def loop(values: Tensor, layout: Layout, dense: Tensor) -> Tensor:
    parts = values.split(layout.lengths.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, dense, strict=True)])


def padded(values: Tensor, layout: Layout, dense: Tensor) -> Tensor:
    return padded_to_jagged(torch.bmm(jagged_to_padded(values, layout), dense), layout)


def work_of(given_case: tuple[PackedCase, int], device: str) -> Work:
    case, out_width = given_case
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
    return Work(
        case,
        jagged_dense_bmm,
        (values, layout, dense),
        jagged_dense_bmm_cost(**size),
        jagged_dense_bmm_backward_cost(**size),
        loop,
        {"padded_bmm": padded},
        {"padded_bmm": padded},
        moves=False,
        sizes={"out_width": out_width},
    )


if __name__ == "__main__":
    main("jagged_dense_bmm", CASES, work_of)

"""Time ``jagged_sum`` against ``torch.segment_reduce`` and against a loop over the sequences.

Run ``python packages/jagged/benchmarks/bench_jagged_sum.py`` in the repository's root.
"""

import torch
from packed import Work, main, tokens
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_sum.cases import CASES
from gem_jagged.kernels.jagged_sum.cost import jagged_sum_backward_cost, jagged_sum_cost
from gem_jagged.ops import jagged_sum
from gem_jagged.workloads import PackedCase


def loop(values: Tensor, layout: Layout) -> Tensor:
    parts = values.split(layout.lengths.tolist())
    return torch.stack([part.sum(0) for part in parts])


def segments(values: Tensor, layout: Layout) -> Tensor:
    return torch.segment_reduce(
        values, "sum", offsets=layout.offsets_O, axis=0, unsafe=True, initial=0.0
    )


def work_of(case: PackedCase, device: str) -> Work:
    values, layout = tokens(case.lengths, case.width, device)
    size = {
        "batch": layout.batch,
        "total_tokens": layout.total_tokens,
        "width": case.width,
        "element_bytes": values.element_size(),
    }
    return Work(
        case,
        jagged_sum,
        (values, layout),
        jagged_sum_cost(**size),
        jagged_sum_backward_cost(**size),
        loop,
        {"segments": segments},
        {"segments": segments},
        moves=False,
    )


if __name__ == "__main__":
    main("jagged_sum", CASES, work_of)

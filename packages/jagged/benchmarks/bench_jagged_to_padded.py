"""Time ``jagged_to_padded`` against nested tensors, a loop and torch's index operations.

Run ``python packages/jagged/benchmarks/bench_jagged_to_padded.py`` in the repository's root.
"""

import torch
import torch.nn.functional as F
from packed import Work, main, movables
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_to_padded.cases import CASES
from gem_jagged.kernels.jagged_to_padded.cost import (
    jagged_to_padded_backward_cost,
    jagged_to_padded_cost,
)
from gem_jagged.ops import jagged_to_padded
from gem_jagged.workloads import PackedCase


def loop(values: Tensor, layout: Layout) -> Tensor:
    parts = values.split(layout.lengths.tolist())
    return torch.stack([F.pad(p, (0, 0, 0, layout.max_length - p.shape[0])) for p in parts])


def nested(values: Tensor, layout: Layout) -> Tensor:
    packed = torch.nested.nested_tensor_from_jagged(
        values, layout.offsets_O, min_seqlen=0, max_seqlen=layout.max_length
    )
    return torch.nested.to_padded_tensor(packed, 0.0)


def work_of(case: PackedCase, device: str) -> Work:
    values, layout = movables(case.lengths, case.width, device)
    size = {
        "batch": layout.batch,
        "total_tokens": layout.total_tokens,
        "width": case.width,
        "element_bytes": values.element_size(),
    }
    size["length"] = layout.max_length
    return Work(
        case,
        jagged_to_padded,
        (values, layout),
        jagged_to_padded_cost(**size),
        jagged_to_padded_backward_cost(**size),
        loop,
        {"nested_to_padded": nested},
        {"nested_to_padded": nested},
    )


if __name__ == "__main__":
    main("jagged_to_padded", CASES, work_of)

"""Time ``jagged_to_padded`` against nested tensors and against a loop over the sequences.

Run ``python packages/jagged/benchmarks/bench_jagged_to_padded.py`` in the repository's root.
"""

import torch
import torch.nn.functional as F
from packed import equals, main, tokens
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_to_padded.cases import CASES
from gem_jagged.kernels.jagged_to_padded.cost import (
    jagged_to_padded_backward_cost,
    jagged_to_padded_cost,
)
from gem_jagged.ops import jagged_to_padded
from gem_opkit.bench import BenchCase, backward_of


def loop(values: Tensor, layout: Layout) -> Tensor:
    parts = values.split(layout.lengths.tolist())
    return torch.stack([F.pad(p, (0, 0, 0, layout.max_length - p.shape[0])) for p in parts])


def nested(values: Tensor, layout: Layout) -> Tensor:
    packed = torch.nested.nested_tensor_from_jagged(
        values, layout.offsets_O, min_seqlen=0, max_seqlen=layout.max_length
    )
    return torch.nested.to_padded_tensor(packed, 0.0)


def make_cases(device: str) -> list[BenchCase]:
    rows = []
    for case in CASES:
        if case.device != device.split(":")[0] or case.total_tokens < 1000:
            continue
        inputs = tokens(case.lengths, case.width, device)
        values, layout = inputs
        size = {
            "batch": layout.batch,
            "total_tokens": layout.total_tokens,
            "length": layout.max_length,
            "width": case.width,
            "element_bytes": values.element_size(),
        }
        shapes = {"lengths": case.lengths, "width": case.width}
        with torch.no_grad():
            forward_of_peer = loop(*inputs)
        rows.append(
            BenchCase(
                name=f"{case.name}_forward",
                run=lambda inputs=inputs: jagged_to_padded(*inputs),
                check=equals(
                    lambda inputs=inputs: jagged_to_padded(*inputs),
                    lambda padded=forward_of_peer: padded,
                ),
                cost=jagged_to_padded_cost(**size),
                shapes=shapes,
                dtype=str(values.dtype).removeprefix("torch."),
                peers={
                    "loop": lambda inputs=inputs: loop(*inputs),
                    "nested_to_padded": lambda inputs=inputs: nested(*inputs),
                },
            )
        )
        backward, backward_loop = backward_of(jagged_to_padded, inputs), backward_of(loop, inputs)
        rows.append(
            BenchCase(
                name=f"{case.name}_backward",
                run=backward,
                check=equals(backward, backward_loop),
                cost=jagged_to_padded_backward_cost(**size),
                shapes=shapes,
                dtype=str(values.dtype).removeprefix("torch."),
                peers={
                    "loop": backward_loop,
                    "nested_to_padded": backward_of(nested, inputs),
                },
            )
        )
    return rows


if __name__ == "__main__":
    main("jagged_to_padded", make_cases)

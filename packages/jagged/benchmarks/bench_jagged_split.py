"""Time ``jagged_split`` against a loop over the sequences.

Run ``python packages/jagged/benchmarks/bench_jagged_split.py`` in the repository's root.
"""

import torch
from packed import equals, main, tokens
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_split.cases import CASES
from gem_jagged.kernels.jagged_split.cost import jagged_split_cost
from gem_jagged.ops import jagged_split
from gem_opkit.bench import BenchCase, backward_of


def loop(values: Tensor, left: Layout, right: Layout) -> tuple[Tensor, Tensor]:
    lengths = torch.stack([left.lengths, right.lengths], dim=1).flatten().tolist()
    parts = values.split(lengths)
    return torch.cat(parts[0::2]), torch.cat(parts[1::2])


def make_cases(device: str) -> list[BenchCase]:
    rows = []
    for left_case, right_case in CASES:
        if left_case.device != device.split(":")[0] or left_case.total_tokens < 1000:
            continue
        left = Layout.from_lengths(left_case.lengths, device=device)
        right = Layout.from_lengths(right_case.lengths, device=device)
        both = (left.lengths + right.lengths).tolist()
        values, _ = tokens(both, left_case.width, device)
        inputs = (values, left, right)
        cost = jagged_split_cost(
            left_tokens=left.total_tokens,
            right_tokens=right.total_tokens,
            width=left_case.width,
            element_bytes=values.element_size(),
        )
        passes = {
            "forward": (lambda i=inputs: jagged_split(*i), lambda i=inputs: loop(*i)),
            "backward": (backward_of(jagged_split, inputs), backward_of(loop, inputs)),
        }
        for which, (run, peer) in passes.items():
            rows.append(
                BenchCase(
                    name=f"{left_case.name}_and_{right.total_tokens}_{which}",
                    run=run,
                    check=equals(run, peer),
                    cost=cost,
                    shapes={
                        "left_lengths": left_case.lengths,
                        "right_lengths": right_case.lengths,
                        "width": left_case.width,
                    },
                    dtype=str(values.dtype).removeprefix("torch."),
                    peers={"loop": peer},
                )
            )
    return rows


if __name__ == "__main__":
    main("jagged_split", make_cases)

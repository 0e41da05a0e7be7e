"""Time ``block_attention`` against torch's attention on padded blocks and on single blocks.

Run ``python packages/attention/benchmarks/bench_block_attention.py`` in the root.
"""

import torch
from packed import Fn, loop_over, main, operands, padded_sdpa, rows, softmax_rows, wanted
from torch import Tensor

from gem_attention.kernels.block_attention.cases import CASES
from gem_attention.kernels.block_attention.cost import (
    block_attention_backward_cost,
    block_attention_cost,
)
from gem_attention.ops import block_attention
from gem_attention.patterns import visible_pairs_block
from gem_jagged.batch import Layout
from gem_opkit.bench import BenchCase

BLOCK = 64


def as_sequences(attend: Fn) -> Fn:
    """Treat every block as a sequence."""

    def run(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        blocks: list[int] = []
        for tokens in layout.lengths.tolist():
            blocks += [BLOCK] * (tokens // BLOCK)
            blocks += [tokens % BLOCK] if tokens % BLOCK else []
        cut = Layout.from_lengths(blocks, device=q.device, dtype=torch.int64)
        return attend(q, k, v, cut, cut)

    return run


def make_cases(device: str) -> list[BenchCase]:
    made = []
    for case in wanted(CASES, device):
        q, k, v, layout, _ = operands(case, device)
        size = {
            "visible_pairs": visible_pairs_block(layout.lengths, BLOCK),
            "tokens": layout.total_tokens,
            "heads": case.heads,
            "kv_heads": case.kv_heads,
            "head_width": case.head_width,
            "value_width": case.head_width,
            "element_bytes": q.element_size(),
        }
        made += rows(
            case,
            block_attention,
            as_sequences(loop_over(softmax_rows, (None, None))),
            (q, k, v, layout),
            costs=(block_attention_cost(**size), block_attention_backward_cost(**size)),
            peers={"padded_sdpa": as_sequences(padded_sdpa((None, None)))},
            shapes={"block_tokens": BLOCK},
        )
    return made


if __name__ == "__main__":
    main("block_attention", make_cases)

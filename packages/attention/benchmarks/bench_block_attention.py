"""Time ``block_attention`` against torch's attention on padded blocks and on single blocks.

Run ``python packages/attention/benchmarks/bench_block_attention.py`` in the root.
"""

from collections.abc import Iterator
from functools import partial

import torch
from packed import Fn, loop_over, operands, padded_sdpa, rows, softmax_rows, wanted
from torch import Tensor

from gem_attention.kernels.block_attention.cases import CASES
from gem_attention.kernels.block_attention.cost import (
    block_attention_backward_cost,
    block_attention_cost,
)
from gem_attention.ops import block_attention
from gem_attention.patterns import visible_pairs_block
from gem_attention.workloads import AttentionCase
from gem_jagged.batch import Layout
from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import Group, run_script

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


def rows_for(case: AttentionCase, device: str) -> list[BenchCase]:
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
    return rows(
        case,
        block_attention,
        as_sequences(loop_over(softmax_rows, (None, None))),
        (q, k, v, layout),
        costs=(block_attention_cost(**size), block_attention_backward_cost(**size)),
        peers={"padded_sdpa": as_sequences(padded_sdpa((None, None)))},
        shapes={"block_tokens": BLOCK},
    )


def groups_of(device: str) -> Iterator[Group]:
    for case in wanted(CASES, device):
        yield case.name, partial(rows_for, case, device)


if __name__ == "__main__":
    run_script("block_attention", groups_of)

"""Time ``jagged_flash_attention`` against padded, nested and looped attention of torch.

Run ``python packages/attention/benchmarks/bench_jagged_flash_attention.py`` in the root.
"""

from functools import partial

from packed import loop_over, main, njt_sdpa, operands, padded_sdpa, rows, softmax_rows, wanted

from gem_attention.kernels.jagged_flash_attention.cases import CASES
from gem_attention.kernels.jagged_flash_attention.cost import (
    jagged_flash_attention_backward_cost,
    jagged_flash_attention_cost,
)
from gem_attention.ops import jagged_flash_attention
from gem_attention.patterns import visible_pairs
from gem_opkit.bench import BenchCase


def make_cases(device: str) -> list[BenchCase]:
    made = []
    for case in wanted(CASES, device):
        inputs = operands(case, device)
        q, _, _, q_layout, k_layout = inputs
        size = {
            "visible_pairs": visible_pairs(q_layout.lengths, k_layout.lengths, *case.window),
            "q_tokens": q_layout.total_tokens,
            "k_tokens": k_layout.total_tokens,
            "heads": case.heads,
            "kv_heads": case.kv_heads,
            "head_width": case.head_width,
            "value_width": case.head_width,
            "element_bytes": q.element_size(),
        }
        peers = {"padded_sdpa": padded_sdpa(case.window)}
        if case.window == (None, None):
            peers["njt_sdpa"] = njt_sdpa
        made += rows(
            case,
            partial(jagged_flash_attention, window=case.window),
            loop_over(softmax_rows, case.window),
            inputs,
            costs=(
                jagged_flash_attention_cost(**size),
                jagged_flash_attention_backward_cost(**size),
            ),
            peers=peers,
        )
    return made


if __name__ == "__main__":
    main("jagged_flash_attention", make_cases)

"""Time ``pooled_attention`` against padded and looped attention of torch with repeated seeds.

Run ``python packages/attention/benchmarks/bench_pooled_attention.py`` in the root.
"""

from packed import Fn, loop_over, main, operands, padded_sdpa, rows, softmax_rows, wanted
from torch import Tensor

from gem_attention.kernels.pooled_attention.cases import CASES
from gem_attention.kernels.pooled_attention.cost import (
    pooled_attention_backward_cost,
    pooled_attention_cost,
)
from gem_attention.ops import pooled_attention
from gem_jagged.batch import Layout
from gem_opkit.bench import BenchCase


def repeated(attend: Fn) -> Fn:
    """Give every sequence its own copy of the seeds."""

    def run(seeds: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        count, heads, width = seeds.shape
        q = seeds.expand(layout.batch, count, heads, width).reshape(-1, heads, width)
        q_layout = Layout.constant(layout.batch, count, device=q.device)
        return attend(q, k, v, q_layout, layout).view(layout.batch, count, heads, -1)

    return run


def make_cases(device: str) -> list[BenchCase]:
    made = []
    for case in wanted(CASES, device):
        q, k, v, _, layout = operands(case, device)
        count = case.q_lengths[0]
        seeds = q[:count].detach().requires_grad_()
        size = {
            "batch": layout.batch,
            "seeds": count,
            "k_tokens": layout.total_tokens,
            "heads": case.heads,
            "kv_heads": case.kv_heads,
            "head_width": case.head_width,
            "value_width": case.head_width,
            "element_bytes": q.element_size(),
        }
        made += rows(
            case,
            pooled_attention,
            repeated(loop_over(softmax_rows, (None, None))),
            (seeds, k, v, layout),
            costs=(pooled_attention_cost(**size), pooled_attention_backward_cost(**size)),
            peers={"padded_sdpa": repeated(padded_sdpa((None, None)))},
        )
    return made


if __name__ == "__main__":
    main("pooled_attention", make_cases)

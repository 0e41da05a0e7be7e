"""Time ``generalized_attention`` (GELU) against padded and looped products of torch.

Run ``python packages/attention/benchmarks/bench_generalized_attention.py`` in the root.
"""

from functools import partial

import torch
import torch.nn.functional as F
from packed import Fn, Window, loop_over, main, operands, rows, wanted
from torch import Tensor

from gem_attention.kernels.generalized_attention.cases import CASES
from gem_attention.kernels.generalized_attention.cost import (
    generalized_attention_backward_cost,
    generalized_attention_cost,
)
from gem_attention.ops import generalized_attention
from gem_attention.patterns import visible_pairs
from gem_jagged.batch import Layout
from gem_jagged.ops import jagged_to_padded, padded_to_jagged
from gem_opkit.bench import BenchCase


def gelu_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    weight = F.gelu(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5)
    return (weight if mask is None else weight * mask) @ v


def padded(window: Window) -> Fn:
    """Pad and multiply; padded values are 0, so only a window needs a mask."""

    def run(q: Tensor, k: Tensor, v: Tensor, q_layout: Layout, k_layout: Layout) -> Tensor:
        padded_q = jagged_to_padded(q, q_layout).transpose(1, 2)
        padded_k, padded_v = (jagged_to_padded(x, k_layout).transpose(1, 2) for x in (k, v))
        mask = None
        if window != (None, None):
            # Self-attention: the place of a query is its number in every sequence.
            place = torch.arange(q_layout.max_length, device=q.device)
            after = place[None, :] - place[:, None]
            mask = (after >= -window[0]) & (after <= window[1])
        out = gelu_rows(padded_q, padded_k, padded_v, mask)
        return padded_to_jagged(out.transpose(1, 2), q_layout)

    return run


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
        made += rows(
            case,
            partial(generalized_attention, activation="gelu", window=case.window),
            loop_over(gelu_rows, case.window),
            inputs,
            costs=(
                generalized_attention_cost(**size),
                generalized_attention_backward_cost(**size),
            ),
            peers={"padded": padded(case.window)},
            shapes={"activation": "gelu"},
        )
    return made


if __name__ == "__main__":
    main("generalized_attention", make_cases)

"""Softmax attention over jagged batches in plain Triton, for any GPU and for the interpreter.

A program works on one tile of a tile list (``gem_attention.tiles``) and one head. Three ranges of
keys (or, for the gradients of keys, of queries) follow from the window: tiles that it cuts at the
left, tiles that every row sees whole, tiles that it or the end of the sequence cuts at the right.
Only the first and the last are masked; masking every tile costs a seventh.

The backward is split: one kernel sums the gradient of q over keys, another those of k and v over
queries, in a fixed order and without atomics, so that its bits are the same in every run. Where
sequences have at most 64 queries and see every key, one pass over the keys gives all three
(``jagged_flash_attention_backward_short_kernel``), because there only memory counts.

Scores are kept in units of log2 with the factor folded into the scale, which saves a product for
each; those of float32 stay NATURAL, which saves roundings. A key that is not visible scores -inf,
so nothing depends on how low the visible ones are. Rows that see no key have lse2 = +inf in the
backward, which makes their probabilities 0.

This file launches the kernels, with ``gem_attention.portable.launching``, which the attention
without softmax shares; the device code is in ``gem_attention.portable`` too.
"""

from functools import partial

import torch
import triton
from torch import Tensor

from gem_attention.portable.backward.kernel import jagged_flash_attention_delta_kernel
from gem_attention.portable.launching.kernel import Call, run_backward, run_forward
from gem_attention.tiles import Window

_NAME = "jagged_flash_attention"


def launch_forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    *,
    window: Window,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend; return out_THV in the dtype of q and lse_TH in fp32, every row of both written."""
    tokens, heads, _ = q_THK.shape
    out_THV = q_THK.new_empty((tokens, heads, v_SGV.shape[2]))
    lse_TH = q_THK.new_empty((tokens, heads), dtype=torch.float32)
    if tokens == 0:
        return out_THV, lse_TH
    call = Call(_NAME, q_THK, k_SGK, v_SGV, q_offsets_O, k_offsets_O, window, scale)
    run = partial(run_forward, call, (q_THK, k_SGK, v_SGV), out_THV, lse_TH)
    with torch.cuda.device_of(q_THK):
        run(call.config("forward", q_THK, run))
    return out_THV, lse_TH


def launch_backward(
    grad_out_THV: Tensor,
    grad_lse_TH: Tensor | None,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    *,
    window: Window,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; always deterministic, every row written."""
    gradients = (
        q_THK.new_empty(q_THK.shape),
        k_SGK.new_empty(k_SGK.shape),
        v_SGV.new_empty(v_SGV.shape),
    )
    call = Call(_NAME, q_THK, k_SGK, v_SGV, q_offsets_O, k_offsets_O, window, scale)
    with torch.cuda.device_of(q_THK):
        lse2_HT, delta_HT = _launch_delta(grad_out_THV, grad_lse_TH, out_THV, lse_TH)
        run_backward(call, (q_THK, k_SGK, v_SGV, grad_out_THV, lse2_HT, delta_HT), gradients)
    return gradients


def _launch_delta(grad_out_THV, grad_lse_TH, out_THV, lse_TH):
    tokens, heads, value_width = out_THV.shape
    lse2_HT, delta_HT = out_THV.new_empty((2, heads, tokens), dtype=torch.float32)
    block_t = 32
    if tokens:
        grad_lse = lse_TH if grad_lse_TH is None else grad_lse_TH
        jagged_flash_attention_delta_kernel[(triton.cdiv(tokens, block_t) * heads,)](
            out_THV,
            grad_out_THV,
            lse_TH,
            grad_lse,
            lse2_HT,
            delta_HT,
            tokens,
            *grad_out_THV.stride()[:2],
            *grad_lse.stride(),
            HEADS=heads,
            VALUE_WIDTH=value_width,
            BLOCK_V=max(16, triton.next_power_of_2(value_width)),
            NATURAL=out_THV.dtype == torch.float32,
            BLOCK_T=block_t,
            HAS_GRAD_LSE=grad_lse_TH is not None,
            num_warps=4,
        )
    return lse2_HT, delta_HT

"""The backward of ``jagged_flash_attention`` for few queries, in one pass over the keys."""

import triton
import triton.language as tl

from gem_attention.portable.device import PRECISION, exponential
from gem_attention.tiling.device import load_rows, sequence, store_rows


@triton.jit
def _take_keys(
    grad_q_tk,
    q_tk,
    grad_tv,
    lse2_t,
    delta_t,
    k_ptr,
    v_ptr,
    grad_k_ptr,
    grad_v_ptr,
    stride_k_s,
    stride_v_s,
    s0,
    k_tokens,
    scale,
    factor,
    MASKED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Write the gradients of one tile of keys and values; return the sum for the queries."""
    k_sk = load_rows(k_ptr, stride_k_s, s0, k_tokens, MASKED, BLOCK_S, WIDTH, BLOCK_K)
    v_sv = load_rows(v_ptr, stride_v_s, s0, k_tokens, MASKED, BLOCK_S, VALUE_WIDTH, BLOCK_V)
    score_ts = tl.dot(q_tk, tl.trans(k_sk), input_precision=PRECISION)
    grad_p_ts = tl.dot(grad_tv, tl.trans(v_sv), input_precision=PRECISION)
    p_ts = exponential(score_ts * factor - lse2_t[:, None], NATURAL)
    if MASKED:
        # Keys beyond the end score 0, which may be far above every true score.
        p_ts = tl.where((s0 + tl.arange(0, BLOCK_S) < k_tokens)[None, :], p_ts, 0.0)
    grad_s_ts = (p_ts * (grad_p_ts - delta_t[:, None])).to(k_sk.dtype)
    grad_q_tk = tl.dot(grad_s_ts, k_sk, grad_q_tk, input_precision=PRECISION)
    grad_v_sv = tl.dot(tl.trans(p_ts.to(grad_tv.dtype)), grad_tv, input_precision=PRECISION)
    store_rows(
        grad_v_ptr, HEADS * VALUE_WIDTH, s0, k_tokens, grad_v_sv, BLOCK_S, VALUE_WIDTH, BLOCK_V
    )
    grad_k_sk = tl.dot(tl.trans(grad_s_ts), q_tk, input_precision=PRECISION) * scale
    store_rows(grad_k_ptr, HEADS * WIDTH, s0, k_tokens, grad_k_sk, BLOCK_S, WIDTH, BLOCK_K)
    return grad_q_tk


@triton.jit(do_not_specialize=["q_tokens", "k_tokens", "batch"])
def jagged_flash_attention_backward_short_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse2_ptr,
    delta_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    entries_ptr,
    count_ptr,
    q_offsets_ptr,
    k_offsets_ptr,
    q_tokens,
    k_tokens,
    batch,
    scale,
    factor,
    stride_q_t,
    stride_q_h,
    stride_k_s,
    stride_k_h,
    stride_v_s,
    stride_v_h,
    stride_g_t,
    stride_g_h,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write all gradients of one sequence and head of at most BLOCK_T queries, in one pass."""
    item = tl.program_id(0)
    if item // HEADS >= tl.load(count_ptr):
        return
    b = tl.load(entries_ptr + item // HEADS * 2)
    h = (item % HEADS).to(tl.int64)
    q_begin, ql = sequence(q_offsets_ptr, b, batch, q_tokens, True)
    k_begin, kl = sequence(k_offsets_ptr, b, batch, k_tokens, False)
    if ql > BLOCK_T:
        return
    q_ptr += q_begin * stride_q_t + h * stride_q_h
    k_ptr += k_begin * stride_k_s + h * stride_k_h
    v_ptr += k_begin * stride_v_s + h * stride_v_h
    grad_out_ptr += q_begin * stride_g_t + h * stride_g_h
    grad_k_ptr += (k_begin * HEADS + h) * WIDTH
    grad_v_ptr += (k_begin * HEADS + h) * VALUE_WIDTH
    t = tl.arange(0, BLOCK_T)
    first = 0 * ql

    q_tk = load_rows(q_ptr, stride_q_t, first, ql, True, BLOCK_T, WIDTH, BLOCK_K)
    grad_tv = load_rows(grad_out_ptr, stride_g_t, first, ql, True, BLOCK_T, VALUE_WIDTH, BLOCK_V)
    row = h * q_tokens.to(tl.int64) + q_begin + t
    lse2_t = tl.load(lse2_ptr + row, mask=t < ql, other=float("inf"))
    delta_t = tl.load(delta_ptr + row, mask=t < ql, other=0.0)
    grad_q_tk = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    whole = kl // BLOCK_S * BLOCK_S
    for s0 in tl.range(0, whole, BLOCK_S, num_stages=STAGES):
        grad_q_tk = _take_keys(
            grad_q_tk, q_tk, grad_tv, lse2_t, delta_t, k_ptr, v_ptr, grad_k_ptr, grad_v_ptr,
            stride_k_s, stride_v_s, s0, kl, scale, factor, False, HEADS,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, BLOCK_S,
        )  # fmt: skip
    if whole < kl:
        grad_q_tk = _take_keys(
            grad_q_tk, q_tk, grad_tv, lse2_t, delta_t, k_ptr, v_ptr, grad_k_ptr, grad_v_ptr,
            stride_k_s, stride_v_s, whole, kl, scale, factor, True, HEADS,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, BLOCK_S,
        )  # fmt: skip
    grad_q_ptr += (q_begin * HEADS + h) * WIDTH
    store_rows(grad_q_ptr, HEADS * WIDTH, first, ql, grad_q_tk * scale, BLOCK_T, WIDTH, BLOCK_K)

"""Backward for few queries in one pass over the keys: softmax, or an activation.

All queries of a sequence and head stay in a program, which so writes every gradient of k and v once
and keeps the sum for q. ``pooled_attention`` shares ``take_keys``.
"""

import triton
import triton.language as tl

from gem_attention.portable.activations.device import activated_with_slope
from gem_attention.portable.device import PRECISION, exponential
from gem_attention.portable.ragged.device import load_ragged, store_ragged
from gem_attention.tiling.device import load_rows, sequence, store_rows


@triton.jit
def take_keys(
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
    place,
    g,
    scale,
    factor,
    h,
    RAGGED: tl.constexpr,
    MASKED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Write the gradients of one tile of keys and values; return the sum for the queries.

    Where RAGGED, the four pointers to keys, values and their gradients are ragged descriptors
    instead, of which the sequence ends at token ``place`` and the head is ``g``.
    """
    if RAGGED:
        k_sk = load_ragged(k_ptr, place, k_tokens, s0, g * WIDTH)
        v_sv = load_ragged(v_ptr, place, k_tokens, s0, g * VALUE_WIDTH)
    else:
        k_sk = load_rows(k_ptr, stride_k_s, s0, k_tokens, MASKED, BLOCK_S, WIDTH, BLOCK_K)
        v_sv = load_rows(v_ptr, stride_v_s, s0, k_tokens, MASKED, BLOCK_S, VALUE_WIDTH, BLOCK_V)
    score_ts = tl.dot(q_tk, tl.trans(k_sk), input_precision=PRECISION)
    grad_p_ts = tl.dot(grad_tv, tl.trans(v_sv), input_precision=PRECISION)
    if ACTIVATIONS == "softmax":
        p_ts = exponential(score_ts * factor - lse2_t[:, None], NATURAL)
        if MASKED:
            # Keys beyond the end score 0, which may be far above every true score.
            p_ts = tl.where((s0 + tl.arange(0, BLOCK_S) < k_tokens)[None, :], p_ts, 0.0)
        grad_s_ts = p_ts * (grad_p_ts - delta_t[:, None])
    else:
        p_ts, slope_ts = activated_with_slope(score_ts, factor, h, ACTIVATIONS, FAST)
        grad_s_ts = slope_ts * grad_p_ts
    grad_s_ts = grad_s_ts.to(k_sk.dtype)
    grad_q_tk = tl.dot(grad_s_ts, k_sk, grad_q_tk, input_precision=PRECISION)
    grad_v_sv = tl.dot(tl.trans(p_ts.to(grad_tv.dtype)), grad_tv, input_precision=PRECISION)
    grad_k_sk = tl.dot(tl.trans(grad_s_ts), q_tk, input_precision=PRECISION) * scale
    if RAGGED:
        store_ragged(grad_v_ptr, place, k_tokens, s0, g * VALUE_WIDTH, grad_v_sv)
        store_ragged(grad_k_ptr, place, k_tokens, s0, g * WIDTH, grad_k_sk)
    else:
        store_rows(
            grad_v_ptr, HEADS * VALUE_WIDTH, s0, k_tokens, grad_v_sv, BLOCK_S, VALUE_WIDTH, BLOCK_V
        )
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
    ACTIVATIONS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    RAGGED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write all gradients of one sequence and head of at most BLOCK_T queries, in one pass."""
    item = tl.program_id(0)
    if item // HEADS >= tl.load(count_ptr):
        return
    b = tl.load(entries_ptr + item // HEADS * 2)
    head = item % HEADS
    h = head.to(tl.int64)
    q_begin, ql = sequence(q_offsets_ptr, b, batch, q_tokens, True)
    k_begin, kl = sequence(k_offsets_ptr, b, batch, k_tokens, False)
    if ql > BLOCK_T:
        return
    q_ptr += q_begin * stride_q_t + h * stride_q_h
    grad_out_ptr += q_begin * stride_g_t + h * stride_g_h
    k_end = (k_begin + kl).to(tl.int32)
    if not RAGGED:
        k_ptr += k_begin * stride_k_s + h * stride_k_h
        v_ptr += k_begin * stride_v_s + h * stride_v_h
        grad_k_ptr += (k_begin * HEADS + h) * WIDTH
        grad_v_ptr += (k_begin * HEADS + h) * VALUE_WIDTH
    t = tl.arange(0, BLOCK_T)
    first = 0 * ql

    q_tk = load_rows(q_ptr, stride_q_t, first, ql, True, BLOCK_T, WIDTH, BLOCK_K)
    grad_tv = load_rows(grad_out_ptr, stride_g_t, first, ql, True, BLOCK_T, VALUE_WIDTH, BLOCK_V)
    lse2_t = tl.zeros([BLOCK_T], tl.float32)
    delta_t = lse2_t
    if ACTIVATIONS == "softmax":
        row = h * q_tokens.to(tl.int64) + q_begin + t
        lse2_t = tl.load(lse2_ptr + row, mask=t < ql, other=float("inf"))
        delta_t = tl.load(delta_ptr + row, mask=t < ql, other=0.0)
    grad_q_tk = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    whole = kl // BLOCK_S * BLOCK_S
    for s0 in tl.range(0, whole, BLOCK_S, num_stages=STAGES):
        grad_q_tk = take_keys(
            grad_q_tk, q_tk, grad_tv, lse2_t, delta_t, k_ptr, v_ptr, grad_k_ptr, grad_v_ptr,
            stride_k_s, stride_v_s, s0, kl, k_end, head, scale, factor, h, RAGGED, False,
            HEADS,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
        )  # fmt: skip
    for s0 in tl.range(whole, kl, BLOCK_S, num_stages=1):
        grad_q_tk = take_keys(
            grad_q_tk, q_tk, grad_tv, lse2_t, delta_t, k_ptr, v_ptr, grad_k_ptr, grad_v_ptr,
            stride_k_s, stride_v_s, s0, kl, k_end, head, scale, factor, h, RAGGED, True,
            HEADS,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
        )  # fmt: skip
    grad_q_ptr += (q_begin * HEADS + h) * WIDTH
    store_rows(grad_q_ptr, HEADS * WIDTH, first, ql, grad_q_tk * scale, BLOCK_T, WIDTH, BLOCK_K)

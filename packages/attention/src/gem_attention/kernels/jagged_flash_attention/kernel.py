"""Softmax attention over jagged batches in plain Triton, for any GPU and for the interpreter.

A program works on one tile of a tile list (``gem_attention.tiles``) and one head. Three ranges of
keys (or, for the gradients of keys, of queries) follow from the window: tiles that it cuts at the
left, tiles that every row sees whole, tiles that it or the end of the sequence cuts at the right.
Only the first and the last are masked; masking every tile costs a seventh.

The backward is split: one kernel sums the gradient of q over keys, another those of k and v over
queries, in a fixed order and without atomics, so that its bits are the same in every run. Where
sequences have at most 64 queries and see every key, one pass over the keys gives all three
(``_..._backward_short_kernel``), because there only memory counts.

Scores are kept in units of log2 with the factor folded into the scale, which saves a product for
each; those of float32 stay NATURAL, which saves roundings. A key that is not visible scores -inf,
so nothing depends on how low the visible ones are. Rows that see no key have lse2 = +inf in the
backward, which makes their probabilities 0.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_attention.tiles import Window, key_tiles, query_tiles
from gem_attention.tiling.device import load_rows, ranges, sequence, store_rows, visible
from gem_attention.tiling.sizes import (
    CANDIDATES,
    SINGLE_CANDIDATES,
    default_config,
    short_config,
    short_rows,
)
from gem_opkit.tuning import LaunchConfig, choose, device_key, length_bucket

_LOG2E = 1.4426950408889634
# Products of float32 on the ordinary units. Three TF32 products take less than half the time, but a
# tensor core cuts off every partial sum: a score near -50 came out 6 units in the last place wrong.
_PRECISION = tl.constexpr("ieee")
# Each would otherwise be a constant where it is 1 or a multiple of 16, and new lengths new code.
_COUNTS = ["q_tokens", "k_tokens", "batch", "left", "right"]


@triton.jit
def _exp(x, NATURAL: tl.constexpr):
    return tl.exp(x) if NATURAL else tl.exp2(x)


@triton.jit
def _attend(
    acc_tv,
    top_t,
    sum_t,
    q_tk,
    k_ptr,
    v_ptr,
    stride_k_s,
    stride_v_s,
    s0,
    t,
    shift,
    left,
    right,
    k_tokens,
    factor,
    MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Take one tile of keys into the running maximum, sum and output."""
    k_sk = load_rows(k_ptr, stride_k_s, s0, k_tokens, MASKED, BLOCK_S, WIDTH, BLOCK_K)
    score_ts = tl.dot(q_tk, tl.trans(k_sk), input_precision=_PRECISION)  # [T, K] @ [K, S] -> [T, S]
    if MASKED:
        s = s0 + tl.arange(0, BLOCK_S)
        seen = visible(t[:, None], s[None, :], shift, left, right, k_tokens, HAS_LEFT, HAS_RIGHT)
        score_ts = tl.where(seen, score_ts * factor, float("-inf"))
        new_top_t = tl.maximum(top_t, tl.max(score_ts, 1))
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        base_t = tl.where(new_top_t == float("-inf"), 0.0, new_top_t)
        p_ts = _exp(score_ts - base_t[:, None], NATURAL)
    else:
        new_top_t = tl.maximum(top_t, tl.max(score_ts, 1) * factor)
        base_t = new_top_t
        p_ts = _exp(score_ts * factor - base_t[:, None], NATURAL)
    shrink_t = _exp(top_t - base_t, NATURAL)
    sum_t = sum_t * shrink_t + tl.sum(p_ts, 1)
    acc_tv = acc_tv * shrink_t[:, None]
    v_sv = load_rows(v_ptr, stride_v_s, s0, k_tokens, MASKED, BLOCK_S, VALUE_WIDTH, BLOCK_V)
    # [T, S] @ [S, V] -> [T, V]
    acc_tv = tl.dot(p_ts.to(v_sv.dtype), v_sv, acc_tv, input_precision=_PRECISION)
    return acc_tv, new_top_t, sum_t


@triton.jit(do_not_specialize=_COUNTS)
def _jagged_flash_attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    entries_ptr,
    count_ptr,
    q_offsets_ptr,
    k_offsets_ptr,
    q_tokens,
    k_tokens,
    batch,
    left,
    right,
    factor,
    stride_q_t,
    stride_q_h,
    stride_k_s,
    stride_k_h,
    stride_v_s,
    stride_v_h,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the output and the logsumexp of one tile of queries and one head."""
    item = tl.program_id(0)
    if item // HEADS >= tl.load(count_ptr):
        return
    b = tl.load(entries_ptr + item // HEADS * 2)
    first = tl.load(entries_ptr + item // HEADS * 2 + 1) * BLOCK_T
    h = (item % HEADS).to(tl.int64)
    q_begin, ql = sequence(q_offsets_ptr, b, batch, q_tokens, True)
    k_begin, kl = sequence(k_offsets_ptr, b, batch, k_tokens, False)
    q_ptr += q_begin * stride_q_t + h * stride_q_h
    k_ptr += k_begin * stride_k_s + h // GROUP * stride_k_h
    v_ptr += k_begin * stride_v_s + h // GROUP * stride_v_h
    out_ptr += (q_begin * HEADS + h) * VALUE_WIDTH
    t = first + tl.arange(0, BLOCK_T)
    shift = kl - ql

    q_tk = load_rows(q_ptr, stride_q_t, first, ql, True, BLOCK_T, WIDTH, BLOCK_K)
    acc_tv = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    top_t = tl.full([BLOCK_T], float("-inf"), tl.float32)
    sum_t = tl.zeros([BLOCK_T], tl.float32)
    low, begin_whole, end_whole, high = ranges(
        first,
        tl.minimum(first + BLOCK_T, ql) - 1,
        shift,
        left,
        right,
        kl,
        HAS_LEFT,
        HAS_RIGHT,
        BLOCK_S,
    )
    if HAS_LEFT:
        for s0 in tl.range(low, begin_whole, BLOCK_S, num_stages=STAGES):
            acc_tv, top_t, sum_t = _attend(
                acc_tv, top_t, sum_t, q_tk, k_ptr, v_ptr, stride_k_s, stride_v_s, s0, t, shift,
                left, right, kl, factor, True, HAS_LEFT, HAS_RIGHT,
                WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, BLOCK_S,
            )  # fmt: skip
    for s0 in tl.range(begin_whole, end_whole, BLOCK_S, num_stages=STAGES):
        acc_tv, top_t, sum_t = _attend(
            acc_tv, top_t, sum_t, q_tk, k_ptr, v_ptr, stride_k_s, stride_v_s, s0, t, shift,
            left, right, kl, factor, False, HAS_LEFT, HAS_RIGHT,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, BLOCK_S,
        )  # fmt: skip
    for s0 in tl.range(end_whole, high, BLOCK_S, num_stages=1):
        acc_tv, top_t, sum_t = _attend(
            acc_tv, top_t, sum_t, q_tk, k_ptr, v_ptr, stride_k_s, stride_v_s, s0, t, shift,
            left, right, kl, factor, True, HAS_LEFT, HAS_RIGHT,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, BLOCK_S,
        )  # fmt: skip
    empty_t = top_t == float("-inf")
    acc_tv = acc_tv / tl.where(empty_t, 1.0, sum_t)[:, None]
    store_rows(out_ptr, HEADS * VALUE_WIDTH, first, ql, acc_tv, BLOCK_T, VALUE_WIDTH, BLOCK_V)
    if NATURAL:
        lse_t = top_t + tl.log(tl.where(empty_t, 1.0, sum_t))
    else:
        lse_t = (top_t + tl.log2(tl.where(empty_t, 1.0, sum_t))) * 0.6931471805599453
    tl.store(lse_ptr + (q_begin + t) * HEADS + h, lse_t, mask=t < ql)


@triton.jit(do_not_specialize=["q_tokens"])
def _jagged_flash_attention_delta_kernel(
    out_ptr,
    grad_out_ptr,
    lse_ptr,
    grad_lse_ptr,
    lse2_ptr,
    delta_ptr,
    q_tokens,
    stride_g_t,
    stride_g_h,
    stride_l_t,
    stride_l_h,
    HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
):
    """Write, head by head, lse in units of log2 and rowsum(grad_out · out) - grad_lse."""
    tokens = q_tokens.to(tl.int64)
    h = (tl.program_id(0) % HEADS).to(tl.int64)
    t = (tl.program_id(0) // HEADS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    v = tl.arange(0, BLOCK_V)
    in_t = t < tokens
    in_tv = in_t[:, None] & (v < VALUE_WIDTH)[None, :]
    out_at = out_ptr + (t[:, None] * HEADS + h) * VALUE_WIDTH + v[None, :]
    grad_at = grad_out_ptr + t[:, None] * stride_g_t + h * stride_g_h + v[None, :]
    out_tv = tl.load(out_at, mask=in_tv, other=0.0).to(tl.float32)
    grad_tv = tl.load(grad_at, mask=in_tv, other=0.0).to(tl.float32)
    delta_t = tl.sum(out_tv * grad_tv, 1)
    if HAS_GRAD_LSE:
        grad_lse_at = grad_lse_ptr + t * stride_l_t + h * stride_l_h
        delta_t -= tl.load(grad_lse_at, mask=in_t, other=0.0).to(tl.float32)
    lse_t = tl.load(lse_ptr + t * HEADS + h, mask=in_t, other=0.0)
    # A row that sees no key: whatever gradient arrives there, it has no part in any other.
    empty_t = lse_t == float("-inf")
    tl.store(delta_ptr + h * tokens + t, tl.where(empty_t, 0.0, delta_t), mask=in_t)
    if not NATURAL:
        lse_t = lse_t * 1.4426950408889634
    lse2_t = tl.where(empty_t, float("inf"), lse_t)
    tl.store(lse2_ptr + h * tokens + t, lse2_t, mask=in_t)


@triton.jit
def _sum_over_keys(
    grad_q_tk,
    q_tk,
    grad_tv,
    lse2_t,
    delta_t,
    k_ptr,
    v_ptr,
    stride_k_s,
    stride_v_s,
    s0,
    t,
    shift,
    left,
    right,
    k_tokens,
    factor,
    MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Add what one tile of keys gives to the gradient of q."""
    k_sk = load_rows(k_ptr, stride_k_s, s0, k_tokens, MASKED, BLOCK_S, WIDTH, BLOCK_K)
    v_sv = load_rows(v_ptr, stride_v_s, s0, k_tokens, MASKED, BLOCK_S, VALUE_WIDTH, BLOCK_V)
    score_ts = tl.dot(q_tk, tl.trans(k_sk), input_precision=_PRECISION)  # [T, K] @ [K, S] -> [T, S]
    grad_p_ts = tl.dot(grad_tv, tl.trans(v_sv), input_precision=_PRECISION)  # [T, V] @ [V, S]
    p_ts = _exp(score_ts * factor - lse2_t[:, None], NATURAL)
    grad_s_ts = p_ts * (grad_p_ts - delta_t[:, None])
    if MASKED:
        s = s0 + tl.arange(0, BLOCK_S)
        seen = visible(t[:, None], s[None, :], shift, left, right, k_tokens, HAS_LEFT, HAS_RIGHT)
        grad_s_ts = tl.where(seen, grad_s_ts, 0.0)
    # [T, S] @ [S, K] -> [T, K]
    return tl.dot(grad_s_ts.to(k_sk.dtype), k_sk, grad_q_tk, input_precision=_PRECISION)


@triton.jit(do_not_specialize=_COUNTS)
def _jagged_flash_attention_backward_queries_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse2_ptr,
    delta_ptr,
    grad_q_ptr,
    entries_ptr,
    count_ptr,
    q_offsets_ptr,
    k_offsets_ptr,
    q_tokens,
    k_tokens,
    batch,
    left,
    right,
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
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SHORT_T: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradient of one tile of queries and one head."""
    item = tl.program_id(0)
    if item // HEADS >= tl.load(count_ptr):
        return
    b = tl.load(entries_ptr + item // HEADS * 2)
    first = tl.load(entries_ptr + item // HEADS * 2 + 1) * BLOCK_T
    h = (item % HEADS).to(tl.int64)
    q_begin, ql = sequence(q_offsets_ptr, b, batch, q_tokens, True)
    k_begin, kl = sequence(k_offsets_ptr, b, batch, k_tokens, False)
    if ql <= SHORT_T:
        return
    q_ptr += q_begin * stride_q_t + h * stride_q_h
    k_ptr += k_begin * stride_k_s + h // GROUP * stride_k_h
    v_ptr += k_begin * stride_v_s + h // GROUP * stride_v_h
    grad_out_ptr += q_begin * stride_g_t + h * stride_g_h
    grad_q_ptr += (q_begin * HEADS + h) * WIDTH
    t = first + tl.arange(0, BLOCK_T)
    shift = kl - ql

    q_tk = load_rows(q_ptr, stride_q_t, first, ql, True, BLOCK_T, WIDTH, BLOCK_K)
    grad_tv = load_rows(grad_out_ptr, stride_g_t, first, ql, True, BLOCK_T, VALUE_WIDTH, BLOCK_V)
    row = h * q_tokens.to(tl.int64) + q_begin + t
    lse2_t = tl.load(lse2_ptr + row, mask=t < ql, other=float("inf"))
    delta_t = tl.load(delta_ptr + row, mask=t < ql, other=0.0)
    grad_q_tk = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    low, begin_whole, end_whole, high = ranges(
        first,
        tl.minimum(first + BLOCK_T, ql) - 1,
        shift,
        left,
        right,
        kl,
        HAS_LEFT,
        HAS_RIGHT,
        BLOCK_S,
    )
    if HAS_LEFT:
        for s0 in tl.range(low, begin_whole, BLOCK_S, num_stages=STAGES):
            grad_q_tk = _sum_over_keys(
                grad_q_tk, q_tk, grad_tv, lse2_t, delta_t, k_ptr, v_ptr, stride_k_s, stride_v_s,
                s0, t, shift, left, right, kl, factor, True, HAS_LEFT, HAS_RIGHT,
                WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, BLOCK_S,
            )  # fmt: skip
    for s0 in tl.range(begin_whole, end_whole, BLOCK_S, num_stages=STAGES):
        grad_q_tk = _sum_over_keys(
            grad_q_tk, q_tk, grad_tv, lse2_t, delta_t, k_ptr, v_ptr, stride_k_s, stride_v_s,
            s0, t, shift, left, right, kl, factor, False, HAS_LEFT, HAS_RIGHT,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, BLOCK_S,
        )  # fmt: skip
    for s0 in tl.range(end_whole, high, BLOCK_S, num_stages=1):
        grad_q_tk = _sum_over_keys(
            grad_q_tk, q_tk, grad_tv, lse2_t, delta_t, k_ptr, v_ptr, stride_k_s, stride_v_s,
            s0, t, shift, left, right, kl, factor, True, HAS_LEFT, HAS_RIGHT,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, BLOCK_S,
        )  # fmt: skip
    # NaN that arrives for a row without keys has reached that row of the products.
    grad_q_tk = tl.where((lse2_t == float("inf"))[:, None], 0.0, grad_q_tk * scale)
    store_rows(grad_q_ptr, HEADS * WIDTH, first, ql, grad_q_tk, BLOCK_T, WIDTH, BLOCK_K)


@triton.jit
def _sum_over_queries(
    grad_k_sk,
    grad_v_sv,
    k_sk,
    v_sv,
    q_ptr,
    grad_out_ptr,
    lse2_ptr,
    delta_ptr,
    stride_q_t,
    stride_g_t,
    t0,
    s,
    shift,
    left,
    right,
    q_tokens,
    k_tokens,
    factor,
    MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Add what one tile of queries gives to the gradients of k and v."""
    t = t0 + tl.arange(0, BLOCK_T)
    q_tk = load_rows(q_ptr, stride_q_t, t0, q_tokens, MASKED, BLOCK_T, WIDTH, BLOCK_K)
    grad_tv = load_rows(
        grad_out_ptr, stride_g_t, t0, q_tokens, MASKED, BLOCK_T, VALUE_WIDTH, BLOCK_V
    )
    if MASKED:
        lse2_t = tl.load(lse2_ptr + t, mask=t < q_tokens, other=float("inf"))
        delta_t = tl.load(delta_ptr + t, mask=t < q_tokens, other=0.0)
    else:
        lse2_t = tl.load(lse2_ptr + t)
        delta_t = tl.load(delta_ptr + t)
    score_st = tl.dot(k_sk, tl.trans(q_tk), input_precision=_PRECISION)  # [S, K] @ [K, T] -> [S, T]
    p_st = _exp(score_st * factor - lse2_t[None, :], NATURAL)
    if MASKED and (HAS_LEFT or HAS_RIGHT):
        seen = visible(t[None, :], s[:, None], shift, left, right, k_tokens, HAS_LEFT, HAS_RIGHT)
        p_st = tl.where(seen, p_st, 0.0)
    grad_p_st = tl.dot(v_sv, tl.trans(grad_tv), input_precision=_PRECISION)  # [S, V] @ [V, T]
    # [S, T] @ [T, V] -> [S, V]
    grad_v_sv = tl.dot(p_st.to(grad_tv.dtype), grad_tv, grad_v_sv, input_precision=_PRECISION)
    grad_s_st = p_st * (grad_p_st - delta_t[None, :])
    # [S, T] @ [T, K] -> [S, K]
    grad_k_sk = tl.dot(grad_s_st.to(q_tk.dtype), q_tk, grad_k_sk, input_precision=_PRECISION)
    return grad_k_sk, grad_v_sv


@triton.jit(do_not_specialize=_COUNTS)
def _jagged_flash_attention_backward_keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse2_ptr,
    delta_ptr,
    grad_k_ptr,
    grad_v_ptr,
    entries_ptr,
    count_ptr,
    q_offsets_ptr,
    k_offsets_ptr,
    q_tokens,
    k_tokens,
    batch,
    left,
    right,
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SHORT_T: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradients of one tile of keys and values of one head, over its query heads."""
    item = tl.program_id(0)
    if item // KV_HEADS >= tl.load(count_ptr):
        return
    b = tl.load(entries_ptr + item // KV_HEADS * 2)
    first = tl.load(entries_ptr + item // KV_HEADS * 2 + 1) * BLOCK_S
    g = (item % KV_HEADS).to(tl.int64)
    q_begin, ql = sequence(q_offsets_ptr, b, batch, q_tokens, False)
    k_begin, kl = sequence(k_offsets_ptr, b, batch, k_tokens, True)
    if (ql > 0) & (ql <= SHORT_T):
        return
    k_ptr += k_begin * stride_k_s + g * stride_k_h
    v_ptr += k_begin * stride_v_s + g * stride_v_h
    s = first + tl.arange(0, BLOCK_S)
    shift = kl - ql

    k_sk = load_rows(k_ptr, stride_k_s, first, kl, True, BLOCK_S, WIDTH, BLOCK_K)
    v_sv = load_rows(v_ptr, stride_v_s, first, kl, True, BLOCK_S, VALUE_WIDTH, BLOCK_V)
    grad_k_sk = tl.zeros([BLOCK_S, BLOCK_K], tl.float32)
    grad_v_sv = tl.zeros([BLOCK_S, BLOCK_V], tl.float32)
    # Seen from a key, the window lies the other way round: right before it, left after it.
    low, begin_whole, end_whole, high = ranges(
        first,
        tl.minimum(first + BLOCK_S, kl) - 1,
        -shift,
        right,
        left,
        ql,
        HAS_RIGHT,
        HAS_LEFT,
        BLOCK_T,
    )
    for member in range(GROUP):
        h = g * GROUP + member
        q_h_ptr = q_ptr + q_begin * stride_q_t + h * stride_q_h
        grad_h_ptr = grad_out_ptr + q_begin * stride_g_t + h * stride_g_h
        lse2_h_ptr = lse2_ptr + h * q_tokens.to(tl.int64) + q_begin
        delta_h_ptr = delta_ptr + h * q_tokens.to(tl.int64) + q_begin
        if HAS_RIGHT:
            for t0 in tl.range(low, begin_whole, BLOCK_T, num_stages=STAGES):
                grad_k_sk, grad_v_sv = _sum_over_queries(
                    grad_k_sk, grad_v_sv, k_sk, v_sv, q_h_ptr, grad_h_ptr, lse2_h_ptr,
                    delta_h_ptr, stride_q_t, stride_g_t, t0, s, shift, left, right, ql, kl,
                    factor, True, HAS_LEFT, HAS_RIGHT,
                    WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, BLOCK_T,
                )  # fmt: skip
        for t0 in tl.range(begin_whole, end_whole, BLOCK_T, num_stages=STAGES):
            grad_k_sk, grad_v_sv = _sum_over_queries(
                grad_k_sk, grad_v_sv, k_sk, v_sv, q_h_ptr, grad_h_ptr, lse2_h_ptr,
                delta_h_ptr, stride_q_t, stride_g_t, t0, s, shift, left, right, ql, kl,
                factor, False, HAS_LEFT, HAS_RIGHT,
                WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, BLOCK_T,
            )  # fmt: skip
        for t0 in tl.range(end_whole, high, BLOCK_T, num_stages=1):
            grad_k_sk, grad_v_sv = _sum_over_queries(
                grad_k_sk, grad_v_sv, k_sk, v_sv, q_h_ptr, grad_h_ptr, lse2_h_ptr,
                delta_h_ptr, stride_q_t, stride_g_t, t0, s, shift, left, right, ql, kl,
                factor, True, HAS_LEFT, HAS_RIGHT,
                WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, BLOCK_T,
            )  # fmt: skip
    grad_k_ptr += (k_begin * KV_HEADS + g) * WIDTH
    grad_v_ptr += (k_begin * KV_HEADS + g) * VALUE_WIDTH
    store_rows(grad_k_ptr, KV_HEADS * WIDTH, first, kl, grad_k_sk * scale, BLOCK_S, WIDTH, BLOCK_K)
    store_rows(
        grad_v_ptr, KV_HEADS * VALUE_WIDTH, first, kl, grad_v_sv, BLOCK_S, VALUE_WIDTH, BLOCK_V
    )


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
    score_ts = tl.dot(q_tk, tl.trans(k_sk), input_precision=_PRECISION)
    grad_p_ts = tl.dot(grad_tv, tl.trans(v_sv), input_precision=_PRECISION)
    p_ts = _exp(score_ts * factor - lse2_t[:, None], NATURAL)
    if MASKED:
        # Keys beyond the end score 0, which may be far above every true score.
        p_ts = tl.where((s0 + tl.arange(0, BLOCK_S) < k_tokens)[None, :], p_ts, 0.0)
    grad_s_ts = (p_ts * (grad_p_ts - delta_t[:, None])).to(k_sk.dtype)
    grad_q_tk = tl.dot(grad_s_ts, k_sk, grad_q_tk, input_precision=_PRECISION)
    grad_v_sv = tl.dot(tl.trans(p_ts.to(grad_tv.dtype)), grad_tv, input_precision=_PRECISION)
    store_rows(
        grad_v_ptr, HEADS * VALUE_WIDTH, s0, k_tokens, grad_v_sv, BLOCK_S, VALUE_WIDTH, BLOCK_V
    )
    grad_k_sk = tl.dot(tl.trans(grad_s_ts), q_tk, input_precision=_PRECISION) * scale
    store_rows(grad_k_ptr, HEADS * WIDTH, s0, k_tokens, grad_k_sk, BLOCK_S, WIDTH, BLOCK_K)
    return grad_q_tk


@triton.jit(do_not_specialize=["q_tokens", "k_tokens", "batch"])
def _jagged_flash_attention_backward_short_kernel(
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
    call = _Call(q_THK, k_SGK, v_SGV, q_offsets_O, k_offsets_O, window, scale)

    def run(config: LaunchConfig) -> None:
        tiles = query_tiles(**call.lists, block_tokens=config.block_rows)
        _jagged_flash_attention_forward_kernel[(tiles.capacity * heads,)](
            q_THK,
            k_SGK,
            v_SGV,
            out_THV,
            lse_TH,
            tiles.entries,
            tiles.count,
            q_offsets_O,
            k_offsets_O,
            *call.counts,
            call.factor,
            *call.strides,
            HEADS=heads,
            **call.constants,
            BLOCK_T=config.block_rows,
            BLOCK_S=config.block_columns,
            STAGES=config.stages,
            num_warps=config.warps,
            num_stages=config.stages,
        )

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
    grad_q_THK, grad_k_SGK, grad_v_SGV = (x.new_empty(x.shape) for x in (q_THK, k_SGK, v_SGV))
    call = _Call(q_THK, k_SGK, v_SGV, q_offsets_O, k_offsets_O, window, scale)
    tokens = q_THK.shape[0]
    with torch.cuda.device_of(q_THK):
        lse2_HT, delta_HT = _launch_delta(grad_out_THV, grad_lse_TH, out_THV, lse_TH)
        given = (q_THK, k_SGK, v_SGV, grad_out_THV, lse2_HT, delta_HT)
        short = 0
        if call.group == 1 and window == (None, None):
            short = short_rows(tokens, call.batch, width=call.width)
        queries = partial(_launch_queries, call, given, grad_q_THK, short)
        keys = partial(_launch_keys, call, given, grad_k_SGK, grad_v_SGV, short)
        if short:
            gradients = (grad_q_THK, grad_k_SGK, grad_v_SGV)
            _launch_short(call, given, gradients, short_config(short, q_THK.element_size()))
        if tokens:
            queries(call.config("backward_queries", q_THK, queries))
        if k_SGK.shape[0]:
            keys(call.config("backward_keys", k_SGK, keys))
    return grad_q_THK, grad_k_SGK, grad_v_SGV


class _Call:
    """What the launches of one call share."""

    def __init__(self, q_THK, k_SGK, v_SGV, q_offsets_O, k_offsets_O, window, scale):
        left, right = window
        self.batch = q_offsets_O.shape[0] - 1
        self.heads, self.kv_heads = q_THK.shape[1], k_SGK.shape[1]
        self.group = self.heads // self.kv_heads
        blocks = [max(16, triton.next_power_of_2(x.shape[2])) for x in (k_SGK, v_SGV)]
        self.width = max(blocks)
        self.scale = scale
        self.factor = scale if q_THK.dtype == torch.float32 else scale * _LOG2E
        self.windowed = left is not None or right is not None
        self.counts = (q_THK.shape[0], k_SGK.shape[0], self.batch, left or 0, right or 0)
        self.strides = (*q_THK.stride()[:2], *k_SGK.stride()[:2], *v_SGV.stride()[:2])
        self.offsets = (q_offsets_O, k_offsets_O)
        self.widths = {
            "WIDTH": k_SGK.shape[2],
            "VALUE_WIDTH": v_SGV.shape[2],
            "BLOCK_K": blocks[0],
            "BLOCK_V": blocks[1],
            "NATURAL": q_THK.dtype == torch.float32,
        }
        self.constants = self.widths | {
            "GROUP": self.group,
            "HAS_LEFT": left is not None,
            "HAS_RIGHT": right is not None,
        }
        self.lists = {
            "q_offsets_O": q_offsets_O,
            "k_offsets_O": k_offsets_O,
            "q_tokens": q_THK.shape[0],
            "k_tokens": k_SGK.shape[0],
            "window": window,
        }

    def config(
        self, kernel: str, tiled: Tensor, run: Callable[[LaunchConfig], None]
    ) -> LaunchConfig:
        """Choose tile sizes by the bucket of the shorter side; a window makes long ones short."""
        mean = length_bucket(min(self.counts[:2]), self.batch)
        if self.windowed:
            mean = mean or 512
        size = tiled.element_size()
        widths = f"{self.widths['BLOCK_K']}x{self.widths['BLOCK_V']}"
        pattern = "window" if self.windowed else "full"
        dtype = str(tiled.dtype).removeprefix("torch.")
        return choose(
            f"jagged_flash_attention.{kernel}.{dtype}.{widths}.{mean or 'long'}.{pattern}",
            default_config(kernel, width=self.width, element_bytes=size, mean=mean),
            device=_device(tiled),
            candidates=SINGLE_CANDIDATES if size == 4 else CANDIDATES,
            time_ms=partial(_time_ms, run),
        )


_devices: dict[int | None, str] = {}


def _device(tensor: Tensor) -> str:
    index = tensor.device.index if tensor.is_cuda else None
    if index not in _devices:
        _devices[index] = device_key(index)
    return _devices[index]


def _time_ms(run: Callable[[LaunchConfig], None], config: LaunchConfig) -> float:
    if torch.cuda.is_available():
        return triton.testing.do_bench(partial(run, config), warmup=5, rep=20, return_mode="median")
    begin = time.perf_counter()
    run(config)
    return 1e3 * (time.perf_counter() - begin)


def _launch_delta(grad_out_THV, grad_lse_TH, out_THV, lse_TH):
    tokens, heads, value_width = out_THV.shape
    lse2_HT, delta_HT = out_THV.new_empty((2, heads, tokens), dtype=torch.float32)
    block_t = 32
    if tokens:
        grad_lse = lse_TH if grad_lse_TH is None else grad_lse_TH
        _jagged_flash_attention_delta_kernel[(triton.cdiv(tokens, block_t) * heads,)](
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


def _launch_queries(call, given, grad_q_THK, short, config):
    tiles = query_tiles(**call.lists, block_tokens=config.block_rows)
    _jagged_flash_attention_backward_queries_kernel[(tiles.capacity * call.heads,)](
        *given,
        grad_q_THK,
        tiles.entries,
        tiles.count,
        *call.offsets,
        *call.counts,
        call.scale,
        call.factor,
        *call.strides,
        *given[3].stride()[:2],
        HEADS=call.heads,
        **call.constants,
        BLOCK_T=config.block_rows,
        BLOCK_S=config.block_columns,
        SHORT_T=short,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _launch_keys(call, given, grad_k_SGK, grad_v_SGV, short, config):
    tiles = key_tiles(**call.lists, block_tokens=config.block_rows)
    _jagged_flash_attention_backward_keys_kernel[(tiles.capacity * call.kv_heads,)](
        *given,
        grad_k_SGK,
        grad_v_SGV,
        tiles.entries,
        tiles.count,
        *call.offsets,
        *call.counts,
        call.scale,
        call.factor,
        *call.strides,
        *given[3].stride()[:2],
        KV_HEADS=call.kv_heads,
        **call.constants,
        BLOCK_T=config.block_columns,
        BLOCK_S=config.block_rows,
        SHORT_T=short,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _launch_short(call, given, gradients, config):
    tiles = query_tiles(**call.lists, block_tokens=config.block_rows)
    _jagged_flash_attention_backward_short_kernel[(tiles.capacity * call.heads,)](
        *given,
        *gradients,
        tiles.entries,
        tiles.count,
        *call.offsets,
        *call.counts[:3],
        call.scale,
        call.factor,
        *call.strides,
        *given[3].stride()[:2],
        HEADS=call.heads,
        **call.widths,
        BLOCK_T=config.block_rows,
        BLOCK_S=config.block_columns,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
    )

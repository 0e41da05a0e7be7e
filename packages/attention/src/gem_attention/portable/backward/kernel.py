"""The split backward of attention over jagged batches in plain Triton, softmax or an activation.

One kernel writes delta and the logsumexp as the others read them, one the gradient of q, one those
of k and v; ``gem_attention.portable.launching`` launches them. An activation has neither delta nor
logsumexp: its weights and their slopes follow from the scores alone, and a pair beyond the end of a
side, whose rows are read as 0, adds nothing. ACTIVATIONS is as in the forward.
"""

import triton
import triton.language as tl

from gem_attention.portable.activations.device import activated_with_slope
from gem_attention.portable.device import COUNTS, PRECISION, add_product, exponential
from gem_attention.tiling.device import load_rows, ranges, sequence, store_rows, visible


@triton.jit(do_not_specialize=["q_tokens"])
def jagged_flash_attention_delta_kernel(
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
    h,
    MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Add what one tile of keys gives to the gradient of q."""
    k_sk = load_rows(k_ptr, stride_k_s, s0, k_tokens, MASKED, BLOCK_S, WIDTH, BLOCK_K)
    v_sv = load_rows(v_ptr, stride_v_s, s0, k_tokens, MASKED, BLOCK_S, VALUE_WIDTH, BLOCK_V)
    score_ts = tl.dot(q_tk, tl.trans(k_sk), input_precision=PRECISION)  # [T, K] @ [K, S] -> [T, S]
    grad_p_ts = tl.dot(grad_tv, tl.trans(v_sv), input_precision=PRECISION)  # [T, V] @ [V, S]
    if ACTIVATIONS == "softmax":
        p_ts = exponential(score_ts * factor - lse2_t[:, None], NATURAL)
        grad_s_ts = p_ts * (grad_p_ts - delta_t[:, None])
    else:
        _, slope_ts = activated_with_slope(score_ts, factor, h, ACTIVATIONS, FAST)
        grad_s_ts = slope_ts * grad_p_ts
    if MASKED and (ACTIVATIONS == "softmax" or HAS_LEFT or HAS_RIGHT):
        s = s0 + tl.arange(0, BLOCK_S)
        seen = visible(t[:, None], s[None, :], shift, left, right, k_tokens, HAS_LEFT, HAS_RIGHT)
        grad_s_ts = tl.where(seen, grad_s_ts, 0.0)
    # [T, S] @ [S, K] -> [T, K]
    APART: tl.constexpr = NATURAL and ACTIVATIONS != "softmax"
    return add_product(grad_q_tk, grad_s_ts.to(k_sk.dtype), k_sk, factor, APART)


@triton.jit(do_not_specialize=COUNTS)
def jagged_flash_attention_backward_queries_kernel(
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
    ACTIVATIONS: tl.constexpr,
    FAST: tl.constexpr,
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
    lse2_t = tl.zeros([BLOCK_T], tl.float32)
    delta_t = lse2_t
    if ACTIVATIONS == "softmax":
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
                s0, t, shift, left, right, kl, factor, h, True, HAS_LEFT, HAS_RIGHT,
                WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
            )  # fmt: skip
    for s0 in tl.range(begin_whole, end_whole, BLOCK_S, num_stages=STAGES):
        grad_q_tk = _sum_over_keys(
            grad_q_tk, q_tk, grad_tv, lse2_t, delta_t, k_ptr, v_ptr, stride_k_s, stride_v_s,
            s0, t, shift, left, right, kl, factor, h, False, HAS_LEFT, HAS_RIGHT,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
        )  # fmt: skip
    for s0 in tl.range(end_whole, high, BLOCK_S, num_stages=1):
        grad_q_tk = _sum_over_keys(
            grad_q_tk, q_tk, grad_tv, lse2_t, delta_t, k_ptr, v_ptr, stride_k_s, stride_v_s,
            s0, t, shift, left, right, kl, factor, h, True, HAS_LEFT, HAS_RIGHT,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
        )  # fmt: skip
    grad_q_tk = grad_q_tk * scale
    if ACTIVATIONS == "softmax":
        # NaN that arrives for a row without keys has reached that row of the products.
        grad_q_tk = tl.where((lse2_t == float("inf"))[:, None], 0.0, grad_q_tk)
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
    h,
    MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Add what one tile of queries gives to the gradients of k and v."""
    t = t0 + tl.arange(0, BLOCK_T)
    q_tk = load_rows(q_ptr, stride_q_t, t0, q_tokens, MASKED, BLOCK_T, WIDTH, BLOCK_K)
    grad_tv = load_rows(
        grad_out_ptr, stride_g_t, t0, q_tokens, MASKED, BLOCK_T, VALUE_WIDTH, BLOCK_V
    )
    score_st = tl.dot(k_sk, tl.trans(q_tk), input_precision=PRECISION)  # [S, K] @ [K, T] -> [S, T]
    if ACTIVATIONS == "softmax":
        if MASKED:
            lse2_t = tl.load(lse2_ptr + t, mask=t < q_tokens, other=float("inf"))
            delta_t = tl.load(delta_ptr + t, mask=t < q_tokens, other=0.0)
        else:
            lse2_t = tl.load(lse2_ptr + t)
            delta_t = tl.load(delta_ptr + t)
        p_st = exponential(score_st * factor - lse2_t[None, :], NATURAL)
    else:
        p_st, slope_st = activated_with_slope(score_st, factor, h, ACTIVATIONS, FAST)
    if MASKED and (HAS_LEFT or HAS_RIGHT):
        seen = visible(t[None, :], s[:, None], shift, left, right, k_tokens, HAS_LEFT, HAS_RIGHT)
        p_st = tl.where(seen, p_st, 0.0)
    grad_p_st = tl.dot(v_sv, tl.trans(grad_tv), input_precision=PRECISION)  # [S, V] @ [V, T]
    # [S, T] @ [T, V] -> [S, V]
    APART: tl.constexpr = NATURAL and ACTIVATIONS != "softmax"
    grad_v_sv = add_product(grad_v_sv, p_st.to(grad_tv.dtype), grad_tv, factor, APART)
    if ACTIVATIONS == "softmax":
        grad_s_st = p_st * (grad_p_st - delta_t[None, :])
    else:
        grad_s_st = slope_st * grad_p_st
        if MASKED and (HAS_LEFT or HAS_RIGHT):
            grad_s_st = tl.where(seen, grad_s_st, 0.0)
    # [S, T] @ [T, K] -> [S, K]
    grad_k_sk = add_product(grad_k_sk, grad_s_st.to(q_tk.dtype), q_tk, factor, APART)
    return grad_k_sk, grad_v_sv


@triton.jit(do_not_specialize=COUNTS)
def jagged_flash_attention_backward_keys_kernel(
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
    ACTIVATIONS: tl.constexpr,
    FAST: tl.constexpr,
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
                    factor, h, True, HAS_LEFT, HAS_RIGHT,
                    WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_T,
                )  # fmt: skip
        for t0 in tl.range(begin_whole, end_whole, BLOCK_T, num_stages=STAGES):
            grad_k_sk, grad_v_sv = _sum_over_queries(
                grad_k_sk, grad_v_sv, k_sk, v_sv, q_h_ptr, grad_h_ptr, lse2_h_ptr,
                delta_h_ptr, stride_q_t, stride_g_t, t0, s, shift, left, right, ql, kl,
                factor, h, False, HAS_LEFT, HAS_RIGHT,
                WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_T,
            )  # fmt: skip
        for t0 in tl.range(end_whole, high, BLOCK_T, num_stages=1):
            grad_k_sk, grad_v_sv = _sum_over_queries(
                grad_k_sk, grad_v_sv, k_sk, v_sv, q_h_ptr, grad_h_ptr, lse2_h_ptr,
                delta_h_ptr, stride_q_t, stride_g_t, t0, s, shift, left, right, ql, kl,
                factor, h, True, HAS_LEFT, HAS_RIGHT,
                WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_T,
            )  # fmt: skip
    grad_k_ptr += (k_begin * KV_HEADS + g) * WIDTH
    grad_v_ptr += (k_begin * KV_HEADS + g) * VALUE_WIDTH
    store_rows(grad_k_ptr, KV_HEADS * WIDTH, first, kl, grad_k_sk * scale, BLOCK_S, WIDTH, BLOCK_K)
    store_rows(
        grad_v_ptr, KV_HEADS * VALUE_WIDTH, first, kl, grad_v_sv, BLOCK_S, VALUE_WIDTH, BLOCK_V
    )

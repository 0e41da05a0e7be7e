"""The forward of attention over jagged batches in plain Triton, softmax or an activation.

ACTIVATIONS is ``"softmax"``, or names for ``gem_attention.portable.activations``. An activation has
no row statistics, and f(0) = 0, so that keys beyond the end, which are read as 0, need no mask.
"""

import triton
import triton.language as tl

from gem_attention.portable.activations.device import activated
from gem_attention.portable.device import COUNTS, PRECISION, add_product, exponential
from gem_attention.tiling.device import load_rows, ranges, sequence, store_rows, visible


@triton.jit
def weigh(
    acc_tv,
    top_t,
    sum_t,
    score_ts,
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
    NATURAL: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Turn the scores of one tile of keys into weights; rebase the output, maximum and sum."""
    if ACTIVATIONS != "softmax":
        p_ts = activated(score_ts, factor, h, ACTIVATIONS, FAST)
        if MASKED and (HAS_LEFT or HAS_RIGHT):
            s = s0 + tl.arange(0, BLOCK_S)
            seen = visible(
                t[:, None], s[None, :], shift, left, right, k_tokens, HAS_LEFT, HAS_RIGHT
            )
            p_ts = tl.where(seen, p_ts, 0.0)
        new_top_t = top_t
    elif MASKED:
        s = s0 + tl.arange(0, BLOCK_S)
        seen = visible(t[:, None], s[None, :], shift, left, right, k_tokens, HAS_LEFT, HAS_RIGHT)
        score_ts = tl.where(seen, score_ts * factor, float("-inf"))
        new_top_t = tl.maximum(top_t, tl.max(score_ts, 1))
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        base_t = tl.where(new_top_t == float("-inf"), 0.0, new_top_t)
        p_ts = exponential(score_ts - base_t[:, None], NATURAL)
    else:
        new_top_t = tl.maximum(top_t, tl.max(score_ts, 1) * factor)
        base_t = new_top_t
        p_ts = exponential(score_ts * factor - base_t[:, None], NATURAL)
    if ACTIVATIONS == "softmax":
        shrink_t = exponential(top_t - base_t, NATURAL)
        sum_t = sum_t * shrink_t + tl.sum(p_ts, 1)
        acc_tv = acc_tv * shrink_t[:, None]
    return p_ts, acc_tv, new_top_t, sum_t


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
    """Take one tile of keys into the running maximum, sum and output; or into the output alone."""
    k_sk = load_rows(k_ptr, stride_k_s, s0, k_tokens, MASKED, BLOCK_S, WIDTH, BLOCK_K)
    score_ts = tl.dot(q_tk, tl.trans(k_sk), input_precision=PRECISION)  # [T, K] @ [K, S] -> [T, S]
    p_ts, acc_tv, new_top_t, sum_t = weigh(
        acc_tv, top_t, sum_t, score_ts, s0, t, shift, left, right, k_tokens, factor, h,
        MASKED, HAS_LEFT, HAS_RIGHT, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
    )  # fmt: skip
    v_sv = load_rows(v_ptr, stride_v_s, s0, k_tokens, MASKED, BLOCK_S, VALUE_WIDTH, BLOCK_V)
    # [T, S] @ [S, V] -> [T, V]
    APART: tl.constexpr = NATURAL and ACTIVATIONS != "softmax"
    acc_tv = add_product(acc_tv, p_ts.to(v_sv.dtype), v_sv, factor, APART)
    return acc_tv, new_top_t, sum_t


@triton.jit(do_not_specialize=COUNTS)
def jagged_flash_attention_forward_kernel(
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
    ACTIVATIONS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the output of one tile of queries and one head, and of softmax the logsumexp."""
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
                left, right, kl, factor, h, True, HAS_LEFT, HAS_RIGHT,
                WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
            )  # fmt: skip
    for s0 in tl.range(begin_whole, end_whole, BLOCK_S, num_stages=STAGES):
        acc_tv, top_t, sum_t = _attend(
            acc_tv, top_t, sum_t, q_tk, k_ptr, v_ptr, stride_k_s, stride_v_s, s0, t, shift,
            left, right, kl, factor, h, False, HAS_LEFT, HAS_RIGHT,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
        )  # fmt: skip
    for s0 in tl.range(end_whole, high, BLOCK_S, num_stages=1):
        acc_tv, top_t, sum_t = _attend(
            acc_tv, top_t, sum_t, q_tk, k_ptr, v_ptr, stride_k_s, stride_v_s, s0, t, shift,
            left, right, kl, factor, h, True, HAS_LEFT, HAS_RIGHT,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
        )  # fmt: skip
    if ACTIVATIONS == "softmax":
        empty_t = top_t == float("-inf")
        acc_tv = acc_tv / tl.where(empty_t, 1.0, sum_t)[:, None]
        if NATURAL:
            lse_t = top_t + tl.log(tl.where(empty_t, 1.0, sum_t))
        else:
            lse_t = (top_t + tl.log2(tl.where(empty_t, 1.0, sum_t))) * 0.6931471805599453
        tl.store(lse_ptr + (q_begin + t) * HEADS + h, lse_t, mask=t < ql)
    store_rows(out_ptr, HEADS * VALUE_WIDTH, first, ql, acc_tv, BLOCK_T, VALUE_WIDTH, BLOCK_V)

"""The backward of attention in MXFP8 in plain Triton: two kernels, without atomics.

One sums the gradient of q over keys, the other those of k and v over queries, in a fixed order.
Scores are formed again from the bytes of the forward. In the second kernel the tile of scores is
transposed, so that what is rounded in blocks lies along the dim of the sum in both.
"""

import triton
import triton.language as tl

from gem_attention.portable.device import COUNTS
from gem_attention.portable.scaled.device import (
    load_column_scales,
    load_row_scales,
    rounded_product,
    scaled_scores,
    words_of_tile,
)
from gem_attention.portable.scaled.kernel import first_block
from gem_attention.tiling.device import load_rows, sequence, store_rows, visible


@triton.jit(do_not_specialize=[*COUNTS, "seed"])
def mx_attention_backward_queries_kernel(
    q_ptr, q_scales_ptr, k_ptr, k_scales_ptr, k_columns_ptr, k_column_scales_ptr, v_ptr,
    v_scales_ptr, grad_ptr, grad_scales_ptr, lse2_ptr, delta_ptr, grad_q_ptr, entries_ptr,
    count_ptr, q_offsets_ptr, k_offsets_ptr, q_tokens, k_tokens, batch, left, right, scale, factor,
    seed,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    RCEIL: tl.constexpr, CAST: tl.constexpr, CHANCE: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one tile of queries and one head."""
    item = tl.program_id(0)
    if item // HEADS >= tl.load(count_ptr):
        return
    KV_HEADS: tl.constexpr = HEADS // GROUP
    b = tl.load(entries_ptr + item // HEADS * 2)
    first = tl.load(entries_ptr + item // HEADS * 2 + 1) * BLOCK_T
    h = (item % HEADS).to(tl.int64)
    g = h // GROUP
    q_begin, ql = sequence(q_offsets_ptr, b, batch, q_tokens, True)
    k_begin, kl = sequence(k_offsets_ptr, b, batch, k_tokens, False)
    q_row = q_begin * HEADS + h
    k_row = k_begin * KV_HEADS + g
    strip = first_block(k_begin, b) * KV_HEADS + g
    t = first + tl.arange(0, BLOCK_T)
    shift = kl - ql
    read = tl.where(b == batch, 0, ql)  # of the tail nothing is read
    in_t = t < read
    q_tk = load_rows(
        q_ptr + q_row * WIDTH, HEADS * WIDTH, first, read, True, BLOCK_T, WIDTH, BLOCK_K
    )
    q_scale = load_row_scales(
        q_scales_ptr + q_row * BLOCKS, HEADS * BLOCKS, first, read, NATIVE, BLOCK_T, WIDTH, BLOCK_K
    )
    grad_tv = load_rows(
        grad_ptr + q_row * VALUE_WIDTH, HEADS * VALUE_WIDTH, first, read, True, BLOCK_T,
        VALUE_WIDTH, BLOCK_V,
    )  # fmt: skip
    grad_scale = load_row_scales(
        grad_scales_ptr + q_row * VALUE_BLOCKS, HEADS * VALUE_BLOCKS, first, read, NATIVE, BLOCK_T,
        VALUE_WIDTH, BLOCK_V,
    )  # fmt: skip
    at = (q_begin + t) * HEADS + h
    # Rows that see no key have +inf, which makes their probabilities 0.
    lse2_t = tl.load(lse2_ptr + at, mask=in_t, other=float("inf"))
    delta_t = tl.load(delta_ptr + at, mask=in_t, other=0.0)
    acc_tk = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    words = tl.zeros([BLOCK_T, BLOCK_S], tl.uint32)
    low, high = 0, kl
    if HAS_LEFT:
        low = tl.minimum(tl.maximum(first + shift - left, 0), kl) // BLOCK_S * BLOCK_S
    if HAS_RIGHT:
        high = tl.minimum(tl.minimum(first + BLOCK_T, ql) + shift + right, kl)
    for s0 in range(low, high, BLOCK_S):
        k_sk = load_rows(
            k_ptr + k_row * WIDTH, KV_HEADS * WIDTH, s0, kl, True, BLOCK_S, WIDTH, BLOCK_K
        )
        k_scale = load_row_scales(
            k_scales_ptr + k_row * BLOCKS, KV_HEADS * BLOCKS, s0, kl, NATIVE, BLOCK_S, WIDTH,
            BLOCK_K,
        )  # fmt: skip
        v_sv = load_rows(
            v_ptr + k_row * VALUE_WIDTH, KV_HEADS * VALUE_WIDTH, s0, kl, True, BLOCK_S,
            VALUE_WIDTH, BLOCK_V,
        )  # fmt: skip
        v_scale = load_row_scales(
            v_scales_ptr + k_row * VALUE_BLOCKS, KV_HEADS * VALUE_BLOCKS, s0, kl, NATIVE, BLOCK_S,
            VALUE_WIDTH, BLOCK_V,
        )  # fmt: skip
        score_ts = scaled_scores(q_tk, q_scale, k_sk, k_scale, factor, NATIVE) * factor
        s = s0 + tl.arange(0, BLOCK_S)
        seen = visible(t[:, None], s[None, :], shift, left, right, kl, HAS_LEFT, HAS_RIGHT)
        p_ts = tl.where(seen, tl.exp2(score_ts - lse2_t[:, None]), 0.0)
        grad_p_ts = scaled_scores(grad_tv, grad_scale, v_sv, v_scale, factor, NATIVE)
        grad_s_ts = p_ts * (grad_p_ts - delta_t[:, None])
        k_columns_sk = load_rows(
            k_columns_ptr + k_row * WIDTH, KV_HEADS * WIDTH, s0, kl, True, BLOCK_S, WIDTH, BLOCK_K
        )
        k_column_scale = load_column_scales(
            k_column_scales_ptr + strip * WIDTH, KV_HEADS * WIDTH, s0, kl, NATIVE, BLOCK_S, WIDTH,
            BLOCK_K,
        )  # fmt: skip
        if CHANCE:
            words = words_of_tile(seed, q_begin + t, s0, h, 0, BLOCK_S)
        acc_tk = rounded_product(
            grad_s_ts, words, k_columns_sk, k_column_scale, acc_tk, RCEIL, CAST, CHANCE, NATIVE,
            BLOCK_T, BLOCK_S,
        )  # fmt: skip
    store_rows(
        grad_q_ptr + q_row * WIDTH, HEADS * WIDTH, first, ql, acc_tk * scale, BLOCK_T, WIDTH,
        BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*COUNTS, "seed"])
def mx_attention_backward_keys_kernel(
    q_ptr, q_scales_ptr, q_columns_ptr, q_column_scales_ptr, k_ptr, k_scales_ptr, v_ptr,
    v_scales_ptr, grad_ptr, grad_scales_ptr, grad_columns_ptr, grad_column_scales_ptr, lse2_ptr,
    delta_ptr, grad_k_ptr, grad_v_ptr, entries_ptr, count_ptr, q_offsets_ptr, k_offsets_ptr,
    q_tokens, k_tokens, batch, left, right, scale, factor, seed,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    RCEIL: tl.constexpr, CAST: tl.constexpr, CHANCE: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one tile of keys and values and one of their heads."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    item = tl.program_id(0)
    if item // KV_HEADS >= tl.load(count_ptr):
        return
    b = tl.load(entries_ptr + item // KV_HEADS * 2)
    first = tl.load(entries_ptr + item // KV_HEADS * 2 + 1) * BLOCK_S
    g = (item % KV_HEADS).to(tl.int64)
    q_begin, ql = sequence(q_offsets_ptr, b, batch, q_tokens, False)
    k_begin, kl = sequence(k_offsets_ptr, b, batch, k_tokens, True)
    k_row = k_begin * KV_HEADS + g
    s = first + tl.arange(0, BLOCK_S)
    shift = kl - ql
    read = tl.where(b == batch, 0, kl)  # of the tail nothing is read
    k_sk = load_rows(
        k_ptr + k_row * WIDTH, KV_HEADS * WIDTH, first, read, True, BLOCK_S, WIDTH, BLOCK_K
    )
    k_scale = load_row_scales(
        k_scales_ptr + k_row * BLOCKS, KV_HEADS * BLOCKS, first, read, NATIVE, BLOCK_S, WIDTH,
        BLOCK_K,
    )  # fmt: skip
    v_sv = load_rows(
        v_ptr + k_row * VALUE_WIDTH, KV_HEADS * VALUE_WIDTH, first, read, True, BLOCK_S,
        VALUE_WIDTH, BLOCK_V,
    )  # fmt: skip
    v_scale = load_row_scales(
        v_scales_ptr + k_row * VALUE_BLOCKS, KV_HEADS * VALUE_BLOCKS, first, read, NATIVE, BLOCK_S,
        VALUE_WIDTH, BLOCK_V,
    )  # fmt: skip
    acc_k_sk = tl.zeros([BLOCK_S, BLOCK_K], tl.float32)
    acc_v_sv = tl.zeros([BLOCK_S, BLOCK_V], tl.float32)
    none = tl.zeros([BLOCK_S, BLOCK_T], tl.uint32)
    words = none
    low, high = 0, ql
    if HAS_RIGHT:
        low = tl.minimum(tl.maximum(first - shift - right, 0), ql) // BLOCK_T * BLOCK_T
    if HAS_LEFT:
        high = tl.minimum(tl.minimum(first + BLOCK_S, kl) - shift + left, ql)
    for turn in range(GROUP):
        h = g * GROUP + turn
        q_row = q_begin * HEADS + h
        strip = first_block(q_begin, b) * HEADS + h
        for t0 in range(low, high, BLOCK_T):
            t = t0 + tl.arange(0, BLOCK_T)
            in_t = t < ql
            q_tk = load_rows(
                q_ptr + q_row * WIDTH, HEADS * WIDTH, t0, ql, True, BLOCK_T, WIDTH, BLOCK_K
            )
            q_scale = load_row_scales(
                q_scales_ptr + q_row * BLOCKS, HEADS * BLOCKS, t0, ql, NATIVE, BLOCK_T, WIDTH,
                BLOCK_K,
            )  # fmt: skip
            grad_tv = load_rows(
                grad_ptr + q_row * VALUE_WIDTH, HEADS * VALUE_WIDTH, t0, ql, True, BLOCK_T,
                VALUE_WIDTH, BLOCK_V,
            )  # fmt: skip
            grad_scale = load_row_scales(
                grad_scales_ptr + q_row * VALUE_BLOCKS, HEADS * VALUE_BLOCKS, t0, ql, NATIVE,
                BLOCK_T, VALUE_WIDTH, BLOCK_V,
            )  # fmt: skip
            at = (q_begin + t) * HEADS + h
            lse2_t = tl.load(lse2_ptr + at, mask=in_t, other=float("inf"))
            delta_t = tl.load(delta_ptr + at, mask=in_t, other=0.0)
            score_st = scaled_scores(k_sk, k_scale, q_tk, q_scale, factor, NATIVE) * factor
            seen = visible(t[None, :], s[:, None], shift, left, right, kl, HAS_LEFT, HAS_RIGHT)
            p_st = tl.where(seen, tl.exp2(score_st - lse2_t[None, :]), 0.0)
            grad_columns_tv = load_rows(
                grad_columns_ptr + q_row * VALUE_WIDTH, HEADS * VALUE_WIDTH, t0, ql, True, BLOCK_T,
                VALUE_WIDTH, BLOCK_V,
            )  # fmt: skip
            grad_column_scale = load_column_scales(
                grad_column_scales_ptr + strip * VALUE_WIDTH, HEADS * VALUE_WIDTH, t0, ql, NATIVE,
                BLOCK_T, VALUE_WIDTH, BLOCK_V,
            )  # fmt: skip
            acc_v_sv = rounded_product(
                p_st, none, grad_columns_tv, grad_column_scale, acc_v_sv, RCEIL, CAST, False,
                NATIVE, BLOCK_S, BLOCK_T,
            )  # fmt: skip
            grad_p_st = scaled_scores(v_sv, v_scale, grad_tv, grad_scale, factor, NATIVE)
            grad_s_st = p_st * (grad_p_st - delta_t[None, :])
            q_columns_tk = load_rows(
                q_columns_ptr + q_row * WIDTH, HEADS * WIDTH, t0, ql, True, BLOCK_T, WIDTH, BLOCK_K
            )
            q_column_scale = load_column_scales(
                q_column_scales_ptr + strip * WIDTH, HEADS * WIDTH, t0, ql, NATIVE, BLOCK_T, WIDTH,
                BLOCK_K,
            )  # fmt: skip
            if CHANCE:
                words = words_of_tile(seed, k_begin + s, t0, h, 1, BLOCK_T)
            acc_k_sk = rounded_product(
                grad_s_st, words, q_columns_tk, q_column_scale, acc_k_sk, RCEIL, CAST, CHANCE,
                NATIVE, BLOCK_S, BLOCK_T,
            )  # fmt: skip
    store_rows(
        grad_k_ptr + k_row * WIDTH, KV_HEADS * WIDTH, first, kl, acc_k_sk * scale, BLOCK_S, WIDTH,
        BLOCK_K,
    )  # fmt: skip
    store_rows(
        grad_v_ptr + k_row * VALUE_WIDTH, KV_HEADS * VALUE_WIDTH, first, kl, acc_v_sv, BLOCK_S,
        VALUE_WIDTH, BLOCK_V,
    )  # fmt: skip

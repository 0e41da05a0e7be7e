"""Attention in MXFP8 in plain Triton: quantising packed sequences, and the forward.

Blocks of 32 tokens begin where a sequence begins. The scales of the blocks of sequence b lie from
row offset // 32 + b of their matrix on, which leaves every sequence room for its ragged last one.

The maximum of a row is kept as a whole number of powers of two, rounded up. Rebasing the running
sums is then exact, and so is that of the probabilities of a tile: their bytes do not depend on the
tiles that were seen before.
"""

import triton
import triton.language as tl

from gem_attention.portable.device import COUNTS
from gem_attention.portable.scaled.device import (
    BLOCK,
    codes_of,
    load_column_scales,
    load_row_scales,
    numbers_of,
    rounded_product,
    rounded_rows,
    scale_of,
    scaled_scores,
    words_of_tile,
)
from gem_attention.tiling.device import load_rows, sequence, store_rows, visible
from gem_precision.device import bits_of


@triton.jit
def first_block(begin, b):
    """Return the row of the matrix of scales at which the blocks of a sequence begin."""
    return begin // BLOCK + b


@triton.jit(do_not_specialize=["tokens", "batch", "seed"])
def mx_quantize_sequences_kernel(
    x_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, entries_ptr, count_ptr,
    offsets_ptr, tokens, batch, stride_t, stride_h, seed,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RCEIL: tl.constexpr, CAST: tl.constexpr,
    CHANCE: tl.constexpr, DECODED: tl.constexpr,
):  # fmt: skip
    """Quantise 32 tokens of a sequence and one head along the head width and along tokens."""
    item = tl.program_id(0)
    if item // HEADS >= tl.load(count_ptr):
        return
    b = tl.load(entries_ptr + item // HEADS * 2)
    if b == batch:  # tokens behind the last sequence, which nobody reads
        return
    tile = tl.load(entries_ptr + item // HEADS * 2 + 1)
    h = (item % HEADS).to(tl.int64)
    begin, length = sequence(offsets_ptr, b, batch, tokens, False)
    r = tile * BLOCK + tl.arange(0, BLOCK)
    t = begin + r
    w = tl.arange(0, BLOCK_W)
    m = tl.arange(0, BLOCK_W // BLOCK)
    mask = (r < length)[:, None] & (w < WIDTH)[None, :]
    x = tl.load(x_ptr + (t * stride_t + h * stride_h)[:, None] + w[None, :], mask=mask, other=0)
    bits = bits_of(x)
    to = ((t * HEADS + h) * WIDTH)[:, None] + w[None, :]
    words = tl.zeros((BLOCK, BLOCK_W), tl.uint32)
    if ROWS:
        if CHANCE:
            words = words_of_tile(seed, t, 0, h, 2, BLOCK_W)
        code, scale, spread = rounded_rows(
            bits.to(tl.float32, bitcast=True), words, RCEIL, CAST, CHANCE, BLOCK, BLOCK_W
        )
        if DECODED:
            made = numbers_of(code, spread).to(rows_ptr.dtype.element_ty)
            tl.store(rows_ptr + to, made, mask=mask)
        else:
            tl.store(rows_ptr + to, code, mask=mask)
            at = ((t * HEADS + h) * BLOCKS)[:, None] + m[None, :]
            inside = (r < length)[:, None] & (m < BLOCKS)[None, :]
            tl.store(row_scales_ptr + at, scale.to(tl.uint8), mask=inside)
    if COLUMNS:
        if CHANCE:
            words = words_of_tile(seed, t, 0, h, 3, BLOCK_W)
        scale = scale_of(tl.max(bits & 0x7FFFFFFF, axis=0), RCEIL)
        spread = tl.broadcast_to(scale[None, :], (BLOCK, BLOCK_W))
        code = codes_of(bits, spread, words, CAST, CHANCE)
        if DECODED:
            made = numbers_of(code, spread).to(columns_ptr.dtype.element_ty)
            tl.store(columns_ptr + to, made, mask=mask)
        else:
            tl.store(columns_ptr + to, code, mask=mask)
            at = ((first_block(begin, b) + tile) * HEADS + h) * WIDTH + w
            tl.store(column_scales_ptr + at, scale.to(tl.uint8), mask=w < WIDTH)


@triton.jit(do_not_specialize=COUNTS)
def mx_attention_forward_kernel(
    q_ptr, q_scales_ptr, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, out_ptr, lse2_ptr, entries_ptr,
    count_ptr, q_offsets_ptr, k_offsets_ptr, q_tokens, k_tokens, batch, left, right, factor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, RCEIL: tl.constexpr, CAST: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write the output of one tile of queries and one head, and its logsumexp in powers of two."""
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
    # The tail has no keys, so that what is read of its queries, or written nowhere, does not count.
    q_tk = load_rows(
        q_ptr + q_row * WIDTH, HEADS * WIDTH, first, tl.where(b == batch, 0, ql), True, BLOCK_T,
        WIDTH, BLOCK_K,
    )  # fmt: skip
    q_scale = load_row_scales(
        q_scales_ptr + q_row * BLOCKS, HEADS * BLOCKS, first, tl.where(b == batch, 0, ql), NATIVE,
        BLOCK_T, WIDTH, BLOCK_K,
    )  # fmt: skip
    acc_tv = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    top_t = tl.full([BLOCK_T], float("-inf"), tl.float32)
    sum_t = tl.zeros([BLOCK_T], tl.float32)
    none = tl.zeros([BLOCK_T, BLOCK_S], tl.uint32)
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
        score_ts = scaled_scores(q_tk, q_scale, k_sk, k_scale, factor, NATIVE) * factor
        s = s0 + tl.arange(0, BLOCK_S)
        seen = visible(t[:, None], s[None, :], shift, left, right, kl, HAS_LEFT, HAS_RIGHT)
        score_ts = tl.where(seen, score_ts, float("-inf"))
        new_top_t = tl.maximum(top_t, tl.ceil(tl.max(score_ts, 1)))
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        base_t = tl.where(new_top_t == float("-inf"), 0.0, new_top_t)
        p_ts = tl.exp2(score_ts - base_t[:, None])
        shrink_t = tl.exp2(top_t - base_t)
        sum_t = sum_t * shrink_t + tl.sum(p_ts, 1)
        v_sv = load_rows(
            v_ptr + k_row * VALUE_WIDTH, KV_HEADS * VALUE_WIDTH, s0, kl, True, BLOCK_S,
            VALUE_WIDTH, BLOCK_V,
        )  # fmt: skip
        v_scale = load_column_scales(
            v_scales_ptr + strip * VALUE_WIDTH, KV_HEADS * VALUE_WIDTH, s0, kl, NATIVE, BLOCK_S,
            VALUE_WIDTH, BLOCK_V,
        )  # fmt: skip
        acc_tv = rounded_product(
            p_ts, none, v_sv, v_scale, acc_tv * shrink_t[:, None], RCEIL, CAST, False, NATIVE,
            BLOCK_T, BLOCK_S,
        )  # fmt: skip
        top_t = new_top_t
    empty_t = top_t == float("-inf")
    total_t = tl.where(empty_t & (sum_t == 0.0), 1.0, sum_t)
    tl.store(lse2_ptr + (q_begin + t) * HEADS + h, top_t + tl.log2(total_t), mask=t < ql)
    store_rows(
        out_ptr + q_row * VALUE_WIDTH, HEADS * VALUE_WIDTH, first, ql, acc_tv / total_t[:, None],
        BLOCK_T, VALUE_WIDTH, BLOCK_V,
    )  # fmt: skip

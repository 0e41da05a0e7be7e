"""Forward and backward of block attention, one block and head a program.

A program takes one block of a sequence (an entry of a tile list, ``gem_attention.tiles``) and one
head. The block's keys are its only ones: scores, softmax and products happen once, nothing is
carried from tile to tile, no logsumexp is kept, and the backward takes rowsum(P ∘ dP) from what it
holds, so that it does not read the output.

Heads wider than one tile of columns are read in chunks; the backward then computes the weights of
a block again for each chunk of its results.

Rows behind the last offset are the tail, a sequence that sees nothing: zeros are written there.
"""

import triton
import triton.language as tl

from gem_attention.portable.blocks.device import (
    load_columns,
    load_turned,
    probabilities_and_slopes,
    store_columns,
    store_turned_back,
    weights,
)
from gem_attention.portable.blocks.wide.device import wide_gradients
from gem_attention.portable.device import PRECISION
from gem_attention.tiling.device import sequence

_COUNTS = ["tokens", "batch", "block_tokens"]


@triton.jit
def _block(entries_ptr, offsets_ptr, place, tokens, batch, block_tokens):
    """Return the first token of a block, its rows, and how many of them see each other."""
    b = tl.load(entries_ptr + place * 2)
    tile = tl.load(entries_ptr + place * 2 + 1)
    begin, length = sequence(offsets_ptr, b, batch, tokens, True)
    rows = tl.minimum(length - tile * block_tokens, block_tokens)
    return begin + tile * block_tokens, rows, tl.where(b == batch, 0, rows)


@triton.jit(do_not_specialize=_COUNTS)
def block_attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    turns_ptr,
    gap_ptr,
    entries_ptr,
    count_ptr,
    offsets_ptr,
    tokens,
    batch,
    block_tokens,
    factor,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    CHUNK_K: tl.constexpr,
    CHUNK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    ROTARY: tl.constexpr,
    HAS_GAP: tl.constexpr,
    FAST: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Write the output of one block and head."""
    item = tl.program_id(0)
    if item // HEADS >= tl.load(count_ptr):
        return
    first, rows, seen = _block(entries_ptr, offsets_ptr, item // HEADS, tokens, batch, block_tokens)
    h = item % HEADS
    q_column, k_column, v_column = h * WIDTH, h // GROUP * WIDTH, h // GROUP * VALUE_WIDTH
    if not RAGGED:
        q_ptr += first * stride_q_t + h.to(tl.int64) * stride_q_h
        k_ptr += first * stride_k_t + (h // GROUP).to(tl.int64) * stride_k_h
        v_ptr += first * stride_v_t + (h // GROUP).to(tl.int64) * stride_v_h
        out_ptr += (first * HEADS + h) * VALUE_WIDTH
    end = (first + seen).to(tl.int32)
    gap_t = tl.zeros([BLOCK_T], tl.float32)
    if HAS_GAP:
        t = tl.arange(0, BLOCK_T)
        gap_t = tl.load(gap_ptr + first + t, mask=t < seen, other=0.0)

    score_ts = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    for c in tl.range(0, (WIDTH + CHUNK_K - 1) // CHUNK_K, num_stages=1):
        q_tk = load_turned(
            q_ptr, stride_q_t, end, seen, q_column, gap_t, turns_ptr, c, ROTARY, HAS_GAP, FAST,
            RAGGED, BLOCK_T, WIDTH, CHUNK_K,
        )  # fmt: skip
        k_sk = load_turned(
            k_ptr, stride_k_t, end, seen, k_column, gap_t, turns_ptr, c, ROTARY, HAS_GAP, FAST,
            RAGGED, BLOCK_T, WIDTH, CHUNK_K,
        )  # fmt: skip
        score_ts = tl.dot(q_tk, tl.trans(k_sk), score_ts, input_precision=PRECISION)
    weight_ts, total_t = weights(score_ts, factor, seen, NATURAL, BLOCK_T)
    for c in tl.range(0, (VALUE_WIDTH + CHUNK_V - 1) // CHUNK_V, num_stages=1):
        v_sv = load_columns(
            v_ptr, stride_v_t, end, seen, v_column, c, RAGGED, BLOCK_T, VALUE_WIDTH, CHUNK_V
        )
        out_tv = tl.dot(weight_ts.to(v_sv.dtype), v_sv, input_precision=PRECISION)
        store_columns(
            out_ptr, HEADS * VALUE_WIDTH, (first + rows).to(tl.int32), rows, h * VALUE_WIDTH, c,
            out_tv / total_t[:, None], RAGGED, BLOCK_T, VALUE_WIDTH, CHUNK_V,
        )  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)
def block_attention_backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    turns_ptr,
    gap_ptr,
    entries_ptr,
    count_ptr,
    offsets_ptr,
    tokens,
    batch,
    block_tokens,
    scale,
    factor,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    stride_g_t,
    stride_g_h,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    CHUNK_K: tl.constexpr,
    CHUNK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    ROTARY: tl.constexpr,
    HAS_GAP: tl.constexpr,
    FAST: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Write the gradients of one block: of a key head and of the query heads that read it."""
    item = tl.program_id(0)
    if item // KV_HEADS >= tl.load(count_ptr):
        return
    first, rows, seen = _block(
        entries_ptr, offsets_ptr, item // KV_HEADS, tokens, batch, block_tokens
    )
    HEADS: tl.constexpr = KV_HEADS * GROUP
    g = item % KV_HEADS
    if not RAGGED:
        q_ptr += first * stride_q_t + (g * GROUP).to(tl.int64) * stride_q_h
        k_ptr += first * stride_k_t + g.to(tl.int64) * stride_k_h
        v_ptr += first * stride_v_t + g.to(tl.int64) * stride_v_h
        grad_out_ptr += first * stride_g_t + (g * GROUP).to(tl.int64) * stride_g_h
        grad_q_ptr += (first * HEADS + g * GROUP) * WIDTH
        grad_k_ptr += (first * KV_HEADS + g) * WIDTH
        grad_v_ptr += (first * KV_HEADS + g) * VALUE_WIDTH
    end, stored_end = (first + seen).to(tl.int32), (first + rows).to(tl.int32)
    gap_t = tl.zeros([BLOCK_T], tl.float32)
    if HAS_GAP:
        t = tl.arange(0, BLOCK_T)
        gap_t = tl.load(gap_ptr + first + t, mask=t < seen, other=0.0)

    if WIDTH > CHUNK_K or VALUE_WIDTH > CHUNK_V:
        wide_gradients(
            q_ptr, k_ptr, v_ptr, grad_out_ptr, grad_q_ptr, grad_k_ptr, grad_v_ptr,
            stride_q_t, stride_q_h, stride_k_t, stride_v_t, stride_g_t, stride_g_h,
            rows, seen, gap_t, turns_ptr, scale, factor,
            HEADS, KV_HEADS, GROUP, NATURAL, ROTARY, HAS_GAP, FAST,
            BLOCK_T, WIDTH, VALUE_WIDTH, CHUNK_K, CHUNK_V,
        )  # fmt: skip
    else:
        grad_k_sk = tl.zeros([BLOCK_T, CHUNK_K], tl.float32)
        grad_v_sv = tl.zeros([BLOCK_T, CHUNK_V], tl.float32)
        for j in tl.range(0, GROUP, num_stages=1):
            h = g * GROUP + j
            q_j, grad_j, grad_q_j = q_ptr, grad_out_ptr, grad_q_ptr
            if not RAGGED:
                q_j += j * stride_q_h
                grad_j += j * stride_g_h
                grad_q_j += j * WIDTH
            q_tk = load_turned(
                q_j, stride_q_t, end, seen, h * WIDTH, gap_t, turns_ptr, 0, ROTARY,
                HAS_GAP, FAST, RAGGED, BLOCK_T, WIDTH, CHUNK_K,
            )  # fmt: skip
            k_sk = load_turned(
                k_ptr, stride_k_t, end, seen, g * WIDTH, gap_t, turns_ptr, 0, ROTARY,
                HAS_GAP, FAST, RAGGED, BLOCK_T, WIDTH, CHUNK_K,
            )  # fmt: skip
            score_ts = tl.dot(q_tk, tl.trans(k_sk), input_precision=PRECISION)
            v_sv = load_columns(
                v_ptr, stride_v_t, end, seen, g * VALUE_WIDTH, 0,
                RAGGED, BLOCK_T, VALUE_WIDTH, CHUNK_V,
            )  # fmt: skip
            grad_tv = load_columns(
                grad_j, stride_g_t, end, seen, h * VALUE_WIDTH, 0,
                RAGGED, BLOCK_T, VALUE_WIDTH, CHUNK_V,
            )  # fmt: skip
            grad_p_ts = tl.dot(grad_tv, tl.trans(v_sv), input_precision=PRECISION)
            p_ts, grad_s_ts = probabilities_and_slopes(
                score_ts, grad_p_ts, factor, seen, NATURAL, BLOCK_T
            )
            p_ts, grad_s_ts = p_ts.to(q_tk.dtype), grad_s_ts.to(q_tk.dtype)
            grad_v_sv = tl.dot(tl.trans(p_ts), grad_tv, grad_v_sv, input_precision=PRECISION)
            if j == GROUP - 1:  # at once: the registers are needed for the next sum
                store_columns(
                    grad_v_ptr, KV_HEADS * VALUE_WIDTH, stored_end, rows, g * VALUE_WIDTH, 0,
                    grad_v_sv, RAGGED, BLOCK_T, VALUE_WIDTH, CHUNK_V,
                )  # fmt: skip
            grad_k_sk = tl.dot(tl.trans(grad_s_ts), q_tk, grad_k_sk, input_precision=PRECISION)
            if j == GROUP - 1:
                store_turned_back(
                    grad_k_ptr, KV_HEADS * WIDTH, stored_end, rows, g * WIDTH, 0,
                    grad_k_sk * scale, gap_t, turns_ptr, ROTARY, HAS_GAP, FAST,
                    RAGGED, BLOCK_T, WIDTH, CHUNK_K,
                )  # fmt: skip
            grad_q_tk = tl.dot(grad_s_ts, k_sk, input_precision=PRECISION) * scale
            store_turned_back(
                grad_q_j, HEADS * WIDTH, stored_end, rows, h * WIDTH, 0,
                grad_q_tk, gap_t, turns_ptr, ROTARY, HAS_GAP, FAST,
                RAGGED, BLOCK_T, WIDTH, CHUNK_K,
            )  # fmt: skip

"""The backward of a block whose heads are wider than one tile of columns.

The weights of the block are computed again for each chunk of columns of a result. Values are as
wide as keys: of 16 columns beside keys of 256, Triton 3.6 made a wrong gradient of the values, with
the results in one loop and in two, where the interpreter makes the right one.
"""

import triton
import triton.language as tl

from gem_attention.portable.blocks.device import (
    load_columns,
    load_turned,
    probabilities_and_slopes,
    store_columns,
    store_turned_back,
)
from gem_attention.portable.device import PRECISION


@triton.jit
def scores_by_chunks(
    q,
    k,
    v,
    grad_out,
    stride_q_t,
    stride_k_t,
    stride_v_t,
    stride_g_t,
    seen,
    gap_t,
    turns_ptr,
    ROTARY: tl.constexpr,
    HAS_GAP: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    CHUNK_K: tl.constexpr,
    CHUNK_V: tl.constexpr,
):
    """Return the scores of a block, and dO Vᵀ, summed over chunks of columns read by pointers."""
    score_ts = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    for i in tl.range(0, (WIDTH + CHUNK_K - 1) // CHUNK_K, num_stages=1):
        q_tk = load_turned(
            q, stride_q_t, 0, seen, 0, gap_t, turns_ptr, i, ROTARY, HAS_GAP, FAST,
            False, BLOCK_T, WIDTH, CHUNK_K,
        )  # fmt: skip
        k_sk = load_turned(
            k, stride_k_t, 0, seen, 0, gap_t, turns_ptr, i, ROTARY, HAS_GAP, FAST,
            False, BLOCK_T, WIDTH, CHUNK_K,
        )  # fmt: skip
        score_ts = tl.dot(q_tk, tl.trans(k_sk), score_ts, input_precision=PRECISION)
    grad_p_ts = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    for i in tl.range(0, (VALUE_WIDTH + CHUNK_V - 1) // CHUNK_V, num_stages=1):
        grad_tv = load_columns(
            grad_out, stride_g_t, 0, seen, 0, i, False, BLOCK_T, VALUE_WIDTH, CHUNK_V
        )
        v_sv = load_columns(v, stride_v_t, 0, seen, 0, i, False, BLOCK_T, VALUE_WIDTH, CHUNK_V)
        grad_p_ts = tl.dot(grad_tv, tl.trans(v_sv), grad_p_ts, input_precision=PRECISION)
    return score_ts, grad_p_ts


@triton.jit
def wide_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_v_t,
    stride_g_t,
    stride_g_h,
    rows,
    seen,
    gap_t,
    turns_ptr,
    scale,
    factor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    NATURAL: tl.constexpr,
    ROTARY: tl.constexpr,
    HAS_GAP: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    CHUNK_K: tl.constexpr,
    CHUNK_V: tl.constexpr,
):
    """Write the gradients of one block and key head; pointers are those of block and head."""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    for c in tl.range(0, (VALUE_WIDTH + CHUNK_V - 1) // CHUNK_V, num_stages=1):
        grad_v_sv = tl.zeros([BLOCK_T, CHUNK_V], tl.float32)
        for j in tl.range(0, GROUP, num_stages=1):
            score_ts, grad_p_ts = scores_by_chunks(
                q_ptr + j * stride_q_h, k_ptr, v_ptr, grad_out_ptr + j * stride_g_h,
                stride_q_t, stride_k_t, stride_v_t, stride_g_t, seen,
                gap_t, turns_ptr, ROTARY, HAS_GAP, FAST,
                BLOCK_T, WIDTH, VALUE_WIDTH, CHUNK_K, CHUNK_V,
            )  # fmt: skip
            p_ts, _ = probabilities_and_slopes(score_ts, grad_p_ts, factor, seen, NATURAL, BLOCK_T)
            grad_tv = load_columns(
                grad_out_ptr + j * stride_g_h, stride_g_t, 0, seen, 0, c,
                False, BLOCK_T, VALUE_WIDTH, CHUNK_V,
            )  # fmt: skip
            grad_v_sv = tl.dot(
                tl.trans(p_ts.to(DTYPE)), grad_tv, grad_v_sv, input_precision=PRECISION
            )
        store_columns(
            grad_v_ptr, KV_HEADS * VALUE_WIDTH, 0, rows, 0, c, grad_v_sv,
            False, BLOCK_T, VALUE_WIDTH, CHUNK_V,
        )  # fmt: skip
    for c in tl.range(0, (WIDTH + CHUNK_K - 1) // CHUNK_K, num_stages=1):
        grad_k_sk = tl.zeros([BLOCK_T, CHUNK_K], tl.float32)
        for j in tl.range(0, GROUP, num_stages=1):
            score_ts, grad_p_ts = scores_by_chunks(
                q_ptr + j * stride_q_h, k_ptr, v_ptr, grad_out_ptr + j * stride_g_h,
                stride_q_t, stride_k_t, stride_v_t, stride_g_t, seen,
                gap_t, turns_ptr, ROTARY, HAS_GAP, FAST,
                BLOCK_T, WIDTH, VALUE_WIDTH, CHUNK_K, CHUNK_V,
            )  # fmt: skip
            _, grad_s_ts = probabilities_and_slopes(
                score_ts, grad_p_ts, factor, seen, NATURAL, BLOCK_T
            )
            grad_s_ts = grad_s_ts.to(DTYPE)
            q_tk = load_turned(
                q_ptr + j * stride_q_h, stride_q_t, 0, seen, 0, gap_t, turns_ptr, c, ROTARY,
                HAS_GAP, FAST, False, BLOCK_T, WIDTH, CHUNK_K,
            )  # fmt: skip
            k_sk = load_turned(
                k_ptr, stride_k_t, 0, seen, 0, gap_t, turns_ptr, c, ROTARY,
                HAS_GAP, FAST, False, BLOCK_T, WIDTH, CHUNK_K,
            )  # fmt: skip
            grad_k_sk = tl.dot(tl.trans(grad_s_ts), q_tk, grad_k_sk, input_precision=PRECISION)
            grad_q_tk = tl.dot(grad_s_ts, k_sk, input_precision=PRECISION) * scale
            store_turned_back(
                grad_q_ptr + j * WIDTH, HEADS * WIDTH, 0, rows, 0, c, grad_q_tk,
                gap_t, turns_ptr, ROTARY, HAS_GAP, FAST, False, BLOCK_T, WIDTH, CHUNK_K,
            )  # fmt: skip
        store_turned_back(
            grad_k_ptr, KV_HEADS * WIDTH, 0, rows, 0, c, grad_k_sk * scale,
            gap_t, turns_ptr, ROTARY, HAS_GAP, FAST, False, BLOCK_T, WIDTH, CHUNK_K,
        )  # fmt: skip

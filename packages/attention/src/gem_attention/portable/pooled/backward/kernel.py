"""The backward of ``pooled_attention`` in plain Triton, in one pass over the keys.

A program holds all seeds of the heads that share a key head, and takes a fixed run of chunks of the
list (``gem_attention.portable.pooled.kernel`` says what these are). It writes the gradients of each
tile of keys and values, keeps the sum for the seeds in registers, and writes it once; a last kernel
adds these sums up. The order is fixed, so the bits are the same in every run.
"""

import triton
import triton.language as tl

from gem_attention.portable.pooled.device import COUNTS, load_tile, row_offsets, store_tile
from gem_attention.portable.ragged.device import store_ragged
from gem_attention.portable.short.kernel import take_keys
from gem_attention.tiling.device import sequence, store_rows

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=COUNTS)
def pooled_attention_backward_kernel(
    seeds_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    grad_k_ptr,
    grad_v_ptr,
    entries_ptr,
    count_ptr,
    k_offsets_ptr,
    k_tokens,
    batch,
    seeds,
    split,
    scale,
    factor,
    stride_q_p,
    stride_q_h,
    stride_k_s,
    stride_k_h,
    stride_v_s,
    stride_v_h,
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
    RAGGED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradients of a run of chunks, and what they add to the gradient of the seeds."""
    seeds = seeds.to(tl.int32)
    rows = seeds * GROUP
    head = tl.program_id(0) % KV_HEADS
    g = head.to(tl.int64)
    lane = tl.program_id(0) // KV_HEADS
    lanes = tl.num_programs(0) // KV_HEADS
    r = tl.arange(0, BLOCK_T)
    held = r < rows
    at_q = row_offsets(r, stride_q_p, stride_q_h, GROUP)
    at_out = row_offsets(r, KV_HEADS * GROUP, 1, GROUP)
    q_tk = load_tile(seeds_ptr + g * GROUP * stride_q_h, at_q, held, WIDTH, BLOCK_K)
    grad_q_tk = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)

    # Chunks stand costliest first: every other turn goes back, so that sums come out even.
    count = tl.load(count_ptr)
    turns = count // lanes
    last = tl.where(turns % 2 == 0, lane, lanes - 1 - lane)
    turns += (last < count % lanes).to(tl.int32)
    for turn in tl.range(0, turns, num_stages=1):
        place = turn * lanes + tl.where(turn % 2 == 0, lane, lanes - 1 - lane)
        b = tl.load(entries_ptr + place * 2).to(tl.int64)
        first = tl.load(entries_ptr + place * 2 + 1) * split
        begin, kl = sequence(k_offsets_ptr, b, batch, k_tokens, True)
        end = tl.minimum(first + split, kl)
        # The tail belongs to no sequence: its gradients are 0, whatever stands in it.
        lives = b < batch
        stop = tl.where(lives, end, first)
        end_token = (begin + end).to(tl.int32)
        if RAGGED:
            k_b_ptr, v_b_ptr, grad_k_b_ptr, grad_v_b_ptr = k_ptr, v_ptr, grad_k_ptr, grad_v_ptr
        else:
            k_b_ptr = k_ptr + begin * stride_k_s + g * stride_k_h
            v_b_ptr = v_ptr + begin * stride_v_s + g * stride_v_h
            grad_k_b_ptr = grad_k_ptr + (begin * KV_HEADS + g) * WIDTH
            grad_v_b_ptr = grad_v_ptr + (begin * KV_HEADS + g) * VALUE_WIDTH

        row = (b * seeds * KV_HEADS + g) * GROUP
        mine = held & lives
        grad_tv = load_tile(
            grad_out_ptr + row * VALUE_WIDTH, at_out * VALUE_WIDTH, mine, VALUE_WIDTH, BLOCK_V
        )
        delta_t = tl.zeros([BLOCK_T], tl.float32)
        lse2_t = delta_t
        if ACTIVATIONS == "softmax":
            out_tv = load_tile(
                out_ptr + row * VALUE_WIDTH, at_out * VALUE_WIDTH, mine, VALUE_WIDTH, BLOCK_V
            )
            delta_t = tl.sum(out_tv.to(tl.float32) * grad_tv.to(tl.float32), 1)
            lse2_t = tl.load(lse_ptr + row + at_out, mask=mine, other=float("inf"))
            if not NATURAL:
                lse2_t = lse2_t * _LOG2E
        whole = first + (stop - first) // BLOCK_S * BLOCK_S
        for s0 in tl.range(first, whole, BLOCK_S, num_stages=STAGES):
            grad_q_tk = take_keys(
                grad_q_tk, q_tk, grad_tv, lse2_t, delta_t, k_b_ptr, v_b_ptr, grad_k_b_ptr,
                grad_v_b_ptr, stride_k_s, stride_v_s, s0, end, end_token, head, scale,
                factor, g * GROUP, RAGGED, False, KV_HEADS,
                WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
            )  # fmt: skip
        for s0 in tl.range(whole, stop, BLOCK_S, num_stages=1):
            grad_q_tk = take_keys(
                grad_q_tk, q_tk, grad_tv, lse2_t, delta_t, k_b_ptr, v_b_ptr, grad_k_b_ptr,
                grad_v_b_ptr, stride_k_s, stride_v_s, s0, end, end_token, head, scale,
                factor, g * GROUP, RAGGED, True, KV_HEADS,
                WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
            )  # fmt: skip
        for s0 in tl.range(stop, end, BLOCK_S, num_stages=1):
            zeros_sk = tl.zeros([BLOCK_S, BLOCK_K], tl.float32)
            zeros_sv = tl.zeros([BLOCK_S, BLOCK_V], tl.float32)
            if RAGGED:
                store_ragged(grad_k_b_ptr, end_token, end, s0, head * WIDTH, zeros_sk)
                store_ragged(grad_v_b_ptr, end_token, end, s0, head * VALUE_WIDTH, zeros_sv)
            else:
                store_rows(
                    grad_k_b_ptr, KV_HEADS * WIDTH, s0, end, zeros_sk, BLOCK_S, WIDTH, BLOCK_K
                )
                store_rows(
                    grad_v_b_ptr, KV_HEADS * VALUE_WIDTH, s0, end, zeros_sv, BLOCK_S, VALUE_WIDTH,
                    BLOCK_V,
                )  # fmt: skip
    at = ((lane * KV_HEADS + g) * rows + r) * WIDTH
    store_tile(part_ptr, at, held, grad_q_tk, WIDTH, BLOCK_K)


@triton.jit(do_not_specialize=["lanes", "rows"])
def pooled_attention_sum_kernel(
    part_ptr,
    grad_seeds_ptr,
    lanes,
    rows,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Add up the parts of the gradient of the seeds, always in the same order."""
    rows = rows.to(tl.int64)
    elements = KV_HEADS * rows * WIDTH
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    total_e = tl.zeros([BLOCK_E], tl.float32)
    for first in range(0, lanes, BLOCK_L):
        lane = first + tl.arange(0, BLOCK_L)
        mask = (lane < lanes)[:, None] & (e < elements)[None, :]
        at = lane.to(tl.int64)[:, None] * elements + e[None, :]
        total_e += tl.sum(tl.load(part_ptr + at, mask=mask, other=0.0), 0)
    r = e // WIDTH % rows
    head = r // GROUP * KV_HEADS * GROUP + e // WIDTH // rows * GROUP + r % GROUP
    value_e = (total_e * scale).to(grad_seeds_ptr.dtype.element_ty)
    tl.store(grad_seeds_ptr + head * WIDTH + e % WIDTH, value_e, mask=e < elements)

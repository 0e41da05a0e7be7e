"""The forward of ``pooled_attention`` in plain Triton, and the merge of its chunks.

The queries, called seeds, are the same for every sequence. Those of the heads that share a key
head lie below each other in one tile: row r is seed r // GROUP of the group's head r % GROUP. So
keys and values are read once for the whole group.

A list cuts the keys of a sequence into chunks of at most ``split`` (``gem_attention.tiles``). The
program that reads a sequence of one chunk finishes it. Of a longer one every program writes its
maximum, sum and output in fp32, and the merge adds them up in the order of the chunks. Chunk i of
the sequence that begins at key s has the place 2·s // split + i, which no other chunk has: a
sequence of more than ``split`` keys has at most 2·keys // split chunks.

ACTIVATIONS is ``"softmax"``, or names for ``gem_attention.portable.activations``: one for all
heads, or one a head where no heads share keys.
"""

import triton
import triton.language as tl

from gem_attention.portable.device import PRECISION, exponential
from gem_attention.portable.forward.kernel import weigh
from gem_attention.portable.pooled.device import COUNTS, load_tile, row_offsets, store_tile
from gem_attention.portable.ragged.device import load_ragged
from gem_attention.tiling.device import load_rows, sequence

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _store_result(
    out_ptr,
    lse_ptr,
    row,
    r,
    held,
    acc_tv,
    top_t,
    sum_t,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
):
    """Store the output of rows r of the group at ``row``; of softmax divided, and its logsumexp."""
    at = row_offsets(r, HEADS, 1, GROUP)
    if ACTIVATIONS == "softmax":
        empty_t = top_t == float("-inf")
        sum_t = tl.where(empty_t, 1.0, sum_t)
        acc_tv = acc_tv / sum_t[:, None]
        lse_t = top_t + tl.log(sum_t) if NATURAL else (top_t + tl.log2(sum_t)) * _LN2
        tl.store(lse_ptr + row + at, lse_t, mask=held)
    out_ptr += row * VALUE_WIDTH
    store_tile(out_ptr, at * VALUE_WIDTH, held, acc_tv, VALUE_WIDTH, BLOCK_V)


@triton.jit
def _take_keys(
    acc_tv,
    top_t,
    sum_t,
    q_tk,
    k_ptr,
    v_ptr,
    stride_k_s,
    stride_v_s,
    s0,
    r,
    k_tokens,
    place,
    g,
    factor,
    h,
    RAGGED: tl.constexpr,
    MASKED: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Take one tile of keys into the running maximum, sum and output."""
    if RAGGED:
        k_sk = load_ragged(k_ptr, place, k_tokens, s0, g * WIDTH)
    else:
        k_sk = load_rows(k_ptr, stride_k_s, s0, k_tokens, MASKED, BLOCK_S, WIDTH, BLOCK_K)
    score_ts = tl.dot(q_tk, tl.trans(k_sk), input_precision=PRECISION)  # [T, K] @ [K, S] -> [T, S]
    p_ts, acc_tv, top_t, sum_t = weigh(
        acc_tv, top_t, sum_t, score_ts, s0, r, 0, 0, 0, k_tokens, factor, h,
        MASKED, False, False, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
    )  # fmt: skip
    if RAGGED:
        v_sv = load_ragged(v_ptr, place, k_tokens, s0, g * VALUE_WIDTH)
    else:
        v_sv = load_rows(v_ptr, stride_v_s, s0, k_tokens, MASKED, BLOCK_S, VALUE_WIDTH, BLOCK_V)
    # [T, S] @ [S, V] -> [T, V]
    acc_tv = tl.dot(p_ts.to(v_sv.dtype), v_sv, acc_tv, input_precision=PRECISION)
    return acc_tv, top_t, sum_t


@triton.jit(do_not_specialize=COUNTS)
def pooled_attention_forward_kernel(
    seeds_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_top_ptr,
    part_sum_ptr,
    entries_ptr,
    count_ptr,
    k_offsets_ptr,
    k_tokens,
    batch,
    seeds,
    split,
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
    """Attend from one tile of seeds to one chunk of keys of one key head."""
    seeds = seeds.to(tl.int32)
    rows = seeds * GROUP
    tiles = (rows + BLOCK_T - 1) // BLOCK_T
    item = tl.program_id(0)
    place = item // (tiles * KV_HEADS)
    if place >= tl.load(count_ptr):
        return
    b = tl.load(entries_ptr + place * 2).to(tl.int64)
    if b == batch:  # the tail: no sequence, no output
        return
    chunk = tl.load(entries_ptr + place * 2 + 1)
    head = item // tiles % KV_HEADS
    g = head.to(tl.int64)
    r = item % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    held = r < rows
    begin, kl = sequence(k_offsets_ptr, b, batch, k_tokens, False)
    first = chunk * split
    end = tl.minimum(first + split, kl)
    end_token = (begin + end).to(tl.int32)
    if not RAGGED:
        k_ptr += begin * stride_k_s + g * stride_k_h
        v_ptr += begin * stride_v_s + g * stride_v_h

    at_q = row_offsets(r, stride_q_p, stride_q_h, GROUP)
    q_tk = load_tile(seeds_ptr + g * GROUP * stride_q_h, at_q, held, WIDTH, BLOCK_K)
    acc_tv = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    top_t = tl.full([BLOCK_T], float("-inf"), tl.float32)
    sum_t = tl.zeros([BLOCK_T], tl.float32)
    whole = first + (end - first) // BLOCK_S * BLOCK_S
    for s0 in tl.range(first, whole, BLOCK_S, num_stages=STAGES):
        acc_tv, top_t, sum_t = _take_keys(
            acc_tv, top_t, sum_t, q_tk, k_ptr, v_ptr, stride_k_s, stride_v_s, s0, r,
            end, end_token, head, factor, g * GROUP, RAGGED, False,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
        )  # fmt: skip
    for s0 in tl.range(whole, end, BLOCK_S, num_stages=1):
        acc_tv, top_t, sum_t = _take_keys(
            acc_tv, top_t, sum_t, q_tk, k_ptr, v_ptr, stride_k_s, stride_v_s, s0, r,
            end, end_token, head, factor, g * GROUP, RAGGED, True,
            WIDTH, VALUE_WIDTH, BLOCK_K, BLOCK_V, NATURAL, ACTIVATIONS, FAST, BLOCK_S,
        )  # fmt: skip
    if kl > split:
        at = (begin * 2 // split + chunk) * KV_HEADS + g
        at = at * rows + r
        if ACTIVATIONS == "softmax":
            tl.store(part_top_ptr + at, top_t, mask=held)
            tl.store(part_sum_ptr + at, sum_t, mask=held)
        store_tile(part_ptr, at * VALUE_WIDTH, held, acc_tv, VALUE_WIDTH, BLOCK_V)
    else:
        _store_result(
            out_ptr, lse_ptr, (b * seeds * KV_HEADS + g) * GROUP, r, held,
            acc_tv, top_t, sum_t, KV_HEADS * GROUP, GROUP, VALUE_WIDTH, BLOCK_V, NATURAL,
            ACTIVATIONS,
        )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def pooled_attention_merge_kernel(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_top_ptr,
    part_sum_ptr,
    k_offsets_ptr,
    k_tokens,
    batch,
    seeds,
    split,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATURAL: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Add up the chunks of a long sequence; write zeros for one without keys."""
    seeds = seeds.to(tl.int32)
    rows = seeds * GROUP
    tiles = (rows + BLOCK_T - 1) // BLOCK_T
    item = tl.program_id(0)
    b = (item // (tiles * KV_HEADS)).to(tl.int64)
    begin, kl = sequence(k_offsets_ptr, b, batch, k_tokens, False)
    if (kl > 0) & (kl <= split):
        return
    g = (item // tiles % KV_HEADS).to(tl.int64)
    r = item % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    held = r < rows
    acc_tv = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    top_t = tl.full([BLOCK_T], float("-inf"), tl.float32)
    sum_t = tl.zeros([BLOCK_T], tl.float32)
    first = begin * 2 // split
    for chunk in range(0, (kl + split - 1) // split):
        at = ((first + chunk) * KV_HEADS + g) * rows + r
        chunk_tv = load_tile(part_ptr, at * VALUE_WIDTH, held, VALUE_WIDTH, BLOCK_V)
        if ACTIVATIONS == "softmax":
            chunk_top_t = tl.load(part_top_ptr + at, mask=held, other=float("-inf"))
            chunk_sum_t = tl.load(part_sum_ptr + at, mask=held, other=0.0)
            new_top_t = tl.maximum(top_t, chunk_top_t)
            # Where no chunk has a score above -inf yet: -inf minus -inf would be NaN.
            base_t = tl.where(new_top_t == float("-inf"), 0.0, new_top_t)
            shrink_t = exponential(top_t - base_t, NATURAL)
            grow_t = exponential(chunk_top_t - base_t, NATURAL)
            acc_tv = acc_tv * shrink_t[:, None] + chunk_tv * grow_t[:, None]
            sum_t = sum_t * shrink_t + chunk_sum_t * grow_t
            top_t = new_top_t
        else:
            acc_tv += chunk_tv
    _store_result(
        out_ptr, lse_ptr, (b * seeds * KV_HEADS + g) * GROUP, r, held,
        acc_tv, top_t, sum_t, KV_HEADS * GROUP, GROUP, VALUE_WIDTH, BLOCK_V, NATURAL,
        ACTIVATIONS,
    )  # fmt: skip

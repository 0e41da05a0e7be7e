"""What stands before and after the fused backward on Hopper, in plain Triton.

Before: delta and the logsumexp of each row, into buffers in which every sequence begins at a
multiple of the tile, so that the backward reads them with TMA and never meets the next sequence;
zeros where the first launches add; dq of queries that have no keys; and where the tile list is cut.
After: the sums of the last launch into rows of dq, as the launches themselves do it with those of
the launch before (``hopper.backward.converting``, which also says how a part of dQ is ordered).
"""

import triton
import triton.language as tl

# Rows and columns of a part of dQ.
_SIDE = tl.constexpr(64)


@triton.jit
def _rows_of(offsets, sequence, batch, tokens, HAS_TAIL: tl.constexpr):
    begin = tl.load(offsets + sequence)
    end = tl.load(offsets + tl.minimum(sequence + 1, batch))
    begin = tl.minimum(tl.maximum(begin, 0), tokens).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), tokens).to(tl.int32)
    if HAS_TAIL:
        end = tl.where(sequence == batch, tokens, end)
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def _write_bounds(
    bounds,
    k_tiles,
    k_count,
    k_offsets,
    batch,
    k_tokens,
    programs,
    KV_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    DESCENDING: tl.constexpr,
):
    """Cut the list of key tiles in two between sequences, the first part to full turns or less."""
    count = tl.load(k_count)
    cut = count
    if SPLIT:
        cut = count * KV_HEADS // (2 * programs) * programs // KV_HEADS
        if cut > 0:
            # Tiles of a sequence follow each other: cut before the first of this one.
            sequence = tl.load(k_tiles + 2 * cut)
            tile = tl.load(k_tiles + 2 * cut + 1)
            if DESCENDING:
                _begin, length = _rows_of(k_offsets, sequence, batch, k_tokens, True)
                tile = (length + KEYS - 1) // KEYS - 1 - tile
            cut = tl.maximum(cut - tile, 0)
    tl.store(bounds, 0)
    tl.store(bounds + 1, cut)
    tl.store(bounds + 2, count)


@triton.jit(do_not_specialize=["batch", "q_tokens", "k_tokens", "padded_tokens", "programs"])
def prepare_kernel(
    out,
    grad_out,
    lse,
    grad_lse,
    delta_HP,
    lse_HP,
    grad_q,
    sums,
    bounds,
    q_tiles,
    q_count,
    k_tiles,
    k_count,
    q_offsets,
    k_offsets,
    batch,
    q_tokens,
    k_tokens,
    padded_tokens,
    programs,
    stride_gt,
    stride_gh,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    DESCENDING: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Prepare one tile of 128 queries and one head.

    delta = rowsum(dO ∘ out) − dlse; lse in base 2. Padding, and rows that see no key, get delta 0
    and lse +inf, so that their softmax weights are 0.
    """
    if tl.program_id(0) == 0:
        _write_bounds(
            bounds,
            k_tiles,
            k_count,
            k_offsets,
            batch,
            k_tokens,
            programs,
            KV_HEADS,
            KEYS,
            SPLIT,
            DESCENDING,
        )
    entry = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    if entry >= tl.load(q_count):
        return
    sequence = tl.load(q_tiles + 2 * entry)
    tile = tl.load(q_tiles + 2 * entry + 1)
    begin, length = _rows_of(q_offsets, sequence, batch, q_tokens, True)
    _k_begin, k_length = _rows_of(k_offsets, sequence, batch, k_tokens, False)
    padded = (begin // ROWS + sequence) * ROWS
    padded_length = (length + ROWS - 1) // ROWS * ROWS
    col = tl.arange(0, WIDTH)
    inner = tl.arange(0, _SIDE * WIDTH)
    summed = k_length > (0 if WINDOWED else KEYS)
    for half in tl.static_range(2):
        first = (tile * 2 + half) * _SIDE
        row = first + tl.arange(0, _SIDE)
        there = row < length
        at = (begin + row).to(tl.int64)
        if summed & (head < SUM_HEADS) & (first < padded_length):
            block = ((padded + first) // _SIDE).to(tl.int64) * SUM_HEADS + head
            tl.store(sums + block * (_SIDE * WIDTH) + inner, tl.zeros([_SIDE * WIDTH], tl.float32))
        if (k_length == 0) & (not SHARED):
            rows = at[:, None] * (HEADS * WIDTH) + head * WIDTH + col[None, :]
            tl.store(
                grad_q + rows,
                tl.zeros([_SIDE, WIDTH], grad_q.dtype.element_ty),
                mask=there[:, None],
            )
        if SOFTMAX:
            o = tl.load(
                out + at[:, None] * (HEADS * WIDTH) + head * WIDTH + col[None, :],
                mask=there[:, None],
                other=0.0,
            )
            g = tl.load(
                grad_out + at[:, None] * stride_gt + head * stride_gh + col[None, :],
                mask=there[:, None],
                other=0.0,
            )
            delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
            if HAS_GRAD_LSE:
                delta -= tl.load(grad_lse + at * HEADS + head, mask=there, other=0.0)
            natural = tl.load(lse + at * HEADS + head, mask=there, other=float("inf"))
            seeing = natural != float("-inf")
            to = head.to(tl.int64) * padded_tokens + padded + row
            in_pad = row < padded_length
            tl.store(delta_HP + to, tl.where(seeing, delta, 0.0), mask=in_pad)
            tl.store(
                lse_HP + to,
                tl.where(seeing, natural * 1.4426950408889634, float("inf")),
                mask=in_pad,
            )


@triton.jit(do_not_specialize=["part", "head_begin", "zeros", "batch", "q_tokens", "k_tokens"])
def finish_kernel(
    sums,
    grad_q,
    bounds,
    k_tiles,
    q_offsets,
    k_offsets,
    part,
    head_begin,
    zeros,
    batch,
    q_tokens,
    k_tokens,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Write dq of the share of one item: every n-th block of 64 queries of its sequence.

    Leaves zeros in place of the sums where another launch is to add there.
    """
    PARTS: tl.constexpr = WIDTH // _SIDE
    entry = tl.load(bounds + part) + tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    if entry >= tl.load(bounds + part + 1):
        return
    sequence = tl.load(k_tiles + 2 * entry)
    tile = tl.load(k_tiles + 2 * entry + 1)
    begin, length = _rows_of(q_offsets, sequence, batch, q_tokens, False)
    _k_begin, k_length = _rows_of(k_offsets, sequence, batch, k_tokens, True)
    if k_length <= (0 if WINDOWED else KEYS):
        return
    tiles = (k_length + KEYS - 1) // KEYS
    padded_block = (begin // ROWS + sequence) * (ROWS // _SIDE)
    inner = tl.arange(0, _SIDE * _SIDE)
    col = tl.arange(0, _SIDE)
    for block in range(tile, (length + _SIDE - 1) // _SIDE, tiles):
        row = block * _SIDE + tl.arange(0, _SIDE)
        for member in tl.static_range(GROUP):
            head = kv_head * GROUP + member
            for side in tl.static_range(PARTS):
                place = (padded_block + block).to(tl.int64) * (KV_HEADS * GROUP) + head
                here = sums + (place * PARTS + side) * (_SIDE * _SIDE) + inner
                x = tl.load(here)
                x = tl.reshape(x, [4, _SIDE // 8, 8, 4, 2, 2])
                x = tl.reshape(tl.permute(x, [0, 4, 2, 1, 3, 5]), [_SIDE, _SIDE])
                to = (begin + row).to(tl.int64)[:, None] * (ALL_HEADS * WIDTH)
                to += (head_begin * GROUP + head) * WIDTH + side * _SIDE
                tl.store(
                    grad_q + to + col[None, :],
                    (x * scale).to(grad_q.dtype.element_ty),
                    mask=(row < length)[:, None],
                )
                if zeros:
                    tl.store(here, tl.zeros([_SIDE * _SIDE], tl.float32))


@triton.jit(do_not_specialize=["queries", "parts", "copies"])
def gather_kernel(
    sums,
    grad_q,
    queries,
    parts,
    copies,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write 16 rows of a part of dq of queries that all sequences share: the sum of all copies."""
    PARTS: tl.constexpr = WIDTH // _SIDE
    CHUNK: tl.constexpr = 16 * _SIDE
    warp = tl.program_id(0) % 4
    part = tl.program_id(0) // 4
    inner = tl.arange(0, CHUNK)
    here = sums + part.to(tl.int64) * (4 * CHUNK) + warp * CHUNK + inner
    apart = parts.to(tl.int64) * (4 * CHUNK)
    x = tl.zeros([CHUNK], tl.float32)
    for _ in range(copies):
        x += tl.load(here)
        here += apart
    x = tl.reshape(x, [1, _SIDE // 8, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [0, 4, 2, 1, 3, 5]), [16, _SIDE])
    row = part // (HEADS * PARTS) * _SIDE + warp * 16 + tl.arange(0, 16)
    col = part % (HEADS * PARTS) * _SIDE + tl.arange(0, _SIDE)
    to = row.to(tl.int64)[:, None] * (HEADS * WIDTH) + col[None, :]
    tl.store(grad_q + to, (x * scale).to(grad_q.dtype.element_ty), mask=(row < queries)[:, None])

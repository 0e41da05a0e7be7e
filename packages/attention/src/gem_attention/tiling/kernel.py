"""Triton kernel that writes a tile list; ``gem_attention.tiles`` says what the list is."""

import triton
import triton.language as tl


@triton.jit
def _lengths(offsets_ptr, b, batch, tokens, HAS_TAIL: tl.constexpr):
    """Tokens of sequences b; the tail, sequence ``batch``, has what lies behind the last offset."""
    # Clamped, so that a sequence lies within the tokens whatever the offsets promise.
    begin = tl.load(offsets_ptr + b, mask=b <= batch, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + b + 1, mask=b < batch, other=0).to(tl.int64)
    begin = tl.minimum(tl.maximum(begin, 0), tokens)
    end = tl.minimum(tl.maximum(end, 0), tokens)
    if HAS_TAIL:
        end = tl.where(b == batch, tokens, end)
    return tl.maximum(end - begin, 0).to(tl.int32)


@triton.jit
def _tiles_and_costs(
    tiled_ptr, other_ptr, b, batch, tokens, other_tokens, span, BLOCK_TOKENS: tl.constexpr
):
    tiles = (_lengths(tiled_ptr, b, batch, tokens, True) + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    cost = tl.minimum(_lengths(other_ptr, b, batch, other_tokens, False), span)
    return tiles, cost


# A value of 1 would become a constant, and every other batch another kernel.
@triton.jit(do_not_specialize=["tokens", "other_tokens", "batch", "span", "capacity"])
def _tile_list_kernel(
    tiled_ptr,
    other_ptr,
    starts_ptr,
    entries_ptr,
    count_ptr,
    tokens,
    other_tokens,
    batch,
    span,
    capacity,
    BLOCK_TOKENS: tl.constexpr,
    DESCENDING: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write the tiles of BLOCK_B sequences, the tail included, to their places in the list."""
    tokens = tokens.to(tl.int64)
    other_tokens = other_tokens.to(tl.int64)
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    tiles, cost = _tiles_and_costs(
        tiled_ptr, other_ptr, b, batch, tokens, other_tokens, span, BLOCK_TOKENS
    )
    if HAS_STARTS:
        start = tl.load(starts_ptr + b, mask=b <= batch, other=0).to(tl.int32)
        if tl.program_id(0) == 0:
            count = tl.load(starts_ptr + batch + 1)
            tl.store(count_ptr, tl.minimum(count, capacity).to(tl.int32))
    else:
        # The place of a sequence is the number of tiles of all costlier ones; equals by index.
        start = tl.zeros([BLOCK_B], tl.int32)
        count = tl.zeros([BLOCK_C], tl.int32)
        for first in range(0, batch + 1, BLOCK_C):
            c = first + tl.arange(0, BLOCK_C)
            c_tiles, c_cost = _tiles_and_costs(
                tiled_ptr, other_ptr, c, batch, tokens, other_tokens, span, BLOCK_TOKENS
            )
            before = (c_cost[None, :] > cost[:, None]) | (
                (c_cost[None, :] == cost[:, None]) & (c[None, :] < b[:, None])
            )
            start += tl.sum(tl.where(before, c_tiles[None, :], 0), 1)
            count += c_tiles
        if tl.program_id(0) == 0:
            tl.store(count_ptr, tl.minimum(tl.sum(count, 0), capacity))
    for first in range(0, tl.max(tiles, 0), BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        place = start[:, None] + m[None, :]
        # Offsets that decrease list tokens twice, more of them than the list holds.
        written = (m[None, :] < tiles[:, None]) & (place < capacity)
        place = place.to(tl.int64) * 2
        tile = tiles[:, None] - 1 - m[None, :] if DESCENDING else m[None, :] + 0 * tiles[:, None]
        sequence = b[:, None] + 0 * m[None, :]
        tl.store(entries_ptr + place, sequence, mask=written)
        tl.store(entries_ptr + place + 1, tile, mask=written)


def launch_tile_list(
    tiled_offsets_O,
    other_offsets_O,
    starts_C,
    entries,
    count,
    *,
    tokens,
    other_tokens,
    span,
    block_tokens,
    descending,
):
    """Fill ``entries`` and ``count``; ``starts_C`` holds places found by sorting, or is None."""
    batch = tiled_offsets_O.shape[0] - 1
    block_b = 16
    grid = (triton.cdiv(batch + 1, block_b),)
    _tile_list_kernel[grid](
        tiled_offsets_O,
        other_offsets_O,
        entries if starts_C is None else starts_C,
        entries,
        count,
        tokens,
        other_tokens,
        batch,
        span,
        entries.shape[0],
        BLOCK_TOKENS=block_tokens,
        DESCENDING=descending,
        HAS_STARTS=starts_C is not None,
        BLOCK_B=block_b,
        BLOCK_C=256,
        BLOCK_M=64,
        num_warps=4,
    )

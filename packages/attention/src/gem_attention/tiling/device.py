"""Triton functions of kernels that follow a tile list: rows of a sequence, and what a tile sees."""

import triton
import triton.language as tl


@triton.jit
def sequence(offsets_ptr, b, batch, tokens, HAS_TAIL: tl.constexpr):
    """Return the first token of a sequence and how many it has; the tail is sequence ``batch``."""
    tokens = tokens.to(tl.int64)
    # Clamped like the tile list, so that wrong offsets read nothing outside.
    begin = tl.load(offsets_ptr + b).to(tl.int64)
    end = tl.load(offsets_ptr + tl.minimum(b + 1, batch)).to(tl.int64)
    begin = tl.minimum(tl.maximum(begin, 0), tokens)
    end = tl.minimum(tl.maximum(end, 0), tokens)
    if HAS_TAIL:
        end = tl.where(b == batch, tokens, end)
    return begin, tl.maximum(end - begin, 0).to(tl.int32)


@triton.jit
def ranges(
    first,
    last,
    shift,
    before,
    after,
    length,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return where the loop over the other side begins, is whole from, whole to, and ends.

    Rows [first, last] of a tile stand at places row + shift of the other side, where each sees
    [place - before, place + after].
    """
    low = 0
    high = length
    whole_low = 0
    whole_high = length
    if HAS_BEFORE:
        low = tl.minimum(tl.maximum(first + shift - before, 0), length)
        whole_low = tl.maximum(last + shift - before, 0)
    if HAS_AFTER:
        high = tl.maximum(tl.minimum(last + shift + after + 1, length), low)
        whole_high = tl.minimum(first + shift + after + 1, length)
    whole_low = tl.maximum(tl.minimum(whole_low, high), low)
    begin_whole = low + (whole_low - low + BLOCK - 1) // BLOCK * BLOCK
    end_whole = begin_whole + tl.maximum(whole_high - begin_whole, 0) // BLOCK * BLOCK
    return low, begin_whole, end_whole, high


@triton.jit
def visible(t, s, shift, left, right, s_tokens, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Return which keys s each query t sees; both broadcast to the shape of the scores."""
    seen = (s < s_tokens) & (t >= 0)
    if HAS_LEFT:
        seen = seen & (s >= t + shift - left)
    if HAS_RIGHT:
        seen = seen & (s <= t + shift + right)
    return seen


@triton.jit
def load_rows(
    ptr,
    stride,
    row,
    rows,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Load rows [row, row + BLOCK) of one head; those from ``rows`` on are 0 where MASKED."""
    r = tl.arange(0, BLOCK)
    w = tl.arange(0, BLOCK_WIDTH)
    # Offsets within the tile in int32: half the registers of pointers.
    at = ptr + tl.cast(row, tl.int64) * stride + (r[:, None] * stride + w[None, :])
    if MASKED:
        if WIDTH == BLOCK_WIDTH:
            return tl.load(at, mask=(row + r < rows)[:, None], other=0.0)
        return tl.load(at, mask=(row + r < rows)[:, None] & (w < WIDTH)[None, :], other=0.0)
    if WIDTH == BLOCK_WIDTH:
        return tl.load(at)
    return tl.load(at, mask=(w < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(
    ptr,
    stride,
    row,
    rows,
    values,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Store rows [row, row + BLOCK) of one head, but none from ``rows`` on."""
    r = tl.arange(0, BLOCK)
    w = tl.arange(0, BLOCK_WIDTH)
    # Offsets within the tile in int32: half the registers of pointers.
    at = ptr + tl.cast(row, tl.int64) * stride + (r[:, None] * stride + w[None, :])
    stored = (row + r < rows)[:, None] & (w < WIDTH)[None, :]
    tl.store(at, values.to(ptr.dtype.element_ty), mask=stored)

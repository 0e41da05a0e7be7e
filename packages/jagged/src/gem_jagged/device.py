"""Device functions that the kernels of this package share: search, copy, sum. Private.

A program owns a block of rows, not a sequence, so that one giant among dwarfs is as much work as
the same tokens in many sequences. The sequence of a row is found by binary search on the offsets,
in the kernel: nothing is prepared on the host, and a captured graph follows new offsets.

Row numbers are int64 throughout: rows times width pass 2^31 long before the rows do.
"""

import triton
import triton.language as tl

FAN: tl.constexpr = tl.constexpr(256)
FEW: tl.constexpr = tl.constexpr(16)


@triton.jit
def begin_of(offsets_ptr, pair_ptr, b, mask, CHUNK: tl.constexpr, PAIR: tl.constexpr):
    """Return the row at which sequence ``b`` begins.

    With PAIR the rows are those of two batches joined sequence by sequence. With CHUNK the rows
    are pieces of at most CHUNK tokens: begin // CHUNK + b is a number of the first piece that no
    other sequence reaches, because L tokens make at most (end // CHUNK - begin // CHUNK) + 1.
    """
    begin = tl.load(offsets_ptr + b, mask=mask, other=0).to(tl.int64)
    if PAIR:
        begin += tl.load(pair_ptr + b, mask=mask, other=0).to(tl.int64)
    if CHUNK > 0:
        begin = begin // CHUNK + b
    return begin


@triton.jit
def last_sequence(
    offsets_ptr, pair_ptr, row, batch, CHUNK: tl.constexpr, PAIR: tl.constexpr
):  # fmt: skip
    """Return the last sequence that begins at or before one row; int32.

    An empty sequence is never returned for a row that exists. A row behind the last offset gets
    ``batch``, whose begin is the last offset.
    """
    # A step looks at FAN places at once, because what counts is the number of loads that wait for
    # each other.
    fan = tl.arange(0, FAN)
    found = batch * 0
    span = found + batch + 1
    while span > 1:
        step = (span + FAN - 1) // FAN
        place = found + fan * step
        begin = begin_of(offsets_ptr, pair_ptr, place, place <= batch, CHUNK, PAIR)
        before = ((place <= batch) & (begin <= row)).to(tl.int32)
        found += (tl.sum(before, axis=0) - 1) * step
        span = step
    return found


@triton.jit
def sequences_from(
    offsets_ptr, pair_ptr, first, here, start, last_row, batch,
    CHUNK: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Return for each row of a block how many sequences after ``first`` it is in; and for the last.

    ``here`` counts the rows from ``start``, both ends of the block are ``start`` and ``last_row``,
    and no sequence after ``first`` begins before ``start``. int32.
    """
    # Mostly few sequences begin in a block, and so in the places that follow.
    place = first + 1 + tl.arange(0, FAN)
    ahead = begin_of(offsets_ptr, pair_ptr, place, place <= batch, CHUNK, PAIR)
    most = tl.sum(((place <= batch) & (ahead <= last_row)).to(tl.int32), axis=0)
    if most == FAN:
        most = last_sequence(offsets_ptr, pair_ptr, last_row, batch, CHUNK, PAIR) - first
    # In int32: differences of begins in one block fit, also where the begins do not, because int32
    # wraps.
    origin = start.to(tl.int32)
    found = here * 0
    if most <= FEW:
        # Two instructions for a row and a sequence, and no load waits for another.
        for s in range(0, most, 4):
            for i in tl.static_range(4):
                exists = s + i < most
                begin = begin_of(offsets_ptr, pair_ptr, first + 1 + s + i, exists, CHUNK, PAIR)
                found += (exists & (begin.to(tl.int32) - origin <= here)).to(tl.int32)
    else:
        step = most * 0 + 1
        while step <= most:
            step = step << 1
        step = step >> 1
        while step > 0:
            near = found + step
            begin = begin_of(offsets_ptr, pair_ptr, first + near, near <= most, CHUNK, PAIR)
            found = tl.where((near <= most) & (begin.to(tl.int32) - origin <= here), near, found)
            step = step >> 1
    return found, most


@triton.jit
def rows_of_tile(
    offsets_ptr, pair_ptr, start, first, rows, batch, PAIR: tl.constexpr, BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """Return the rows of a tile, which of them exist, their sequences, and which have one.

    Rows and sequences are int64; rows count over the whole packed output. A row behind the last
    offset exists and has no sequence. ``first`` is the last sequence that begins before ``start``
    or at it; returned last is that of the next tile.
    """
    here = tl.arange(0, BLOCK_ROWS)
    row = start + here
    in_row = row < rows
    last = tl.minimum(start + BLOCK_ROWS, rows) - 1
    found, most = sequences_from(
        offsets_ptr, pair_ptr, first, here, start, last, batch, 0, PAIR
    )  # fmt: skip
    b = first + found
    return row, in_row, b.to(tl.int64), in_row & (b < batch), first + most


@triton.jit
def copy_tile(
    out_ptr, row, in_row, source_ptr, source_at, has_source, stride_w, fill, width,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write rows of ``width`` words of a packed output: a source row, or ``fill`` without one.

    ``source_at`` is the word at which the source of each row begins, int64, and ``stride_w`` the
    words from one word of it to the next.
    """
    for begin in range(0, width, BLOCK_W):
        w = begin + tl.arange(0, BLOCK_W)
        inside = in_row[:, None] & (w < width)[None, :]
        words = tl.load(
            source_ptr + source_at[:, None] + (w.to(tl.int64) * stride_w)[None, :],
            mask=inside & has_source[:, None],
            other=fill,
        )
        tl.store(out_ptr + row[:, None] * width + w[None, :], words, mask=inside)


@triton.jit
def sum_tile(
    source_ptr, first, count, in_s, stride_row, stride_d, d, in_d,
    WIDE: tl.constexpr, S: tl.constexpr, T: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum ``count`` rows from ``first`` on, for each of S runs of rows at once.

    The order of the additions depends on the position in the run alone, so a sum is the same in
    every call and in every batch. ``first`` and ``count`` are int64 blocks of S, ``d`` the columns.
    Returns [S, columns], fp64 where WIDE, else fp32.
    """
    steps = tl.max(tl.where(in_s, count, 0), axis=0)
    total = tl.zeros((S, T, d.shape[0]), dtype=tl.float64 if WIDE else tl.float32)
    t = tl.arange(0, T)
    columns = source_ptr + (d.to(tl.int64) * stride_d)[None, None, :]
    for begin in range(0, steps, T * UNROLL):
        for turn in tl.static_range(UNROLL):
            place = begin + turn * T + t
            inside = in_s[:, None] & (place[None, :] < count[:, None])
            row = first[:, None] + place[None, :]
            tile = tl.load(
                columns + (row * stride_row)[:, :, None],
                mask=inside[:, :, None] & in_d[None, None, :],
                other=0.0,
            )
            total += tile.to(total.dtype)
    return tl.sum(total, axis=1)

"""Kernels that sum packed rows by sequence and spread sequences over rows. Private.

A sum is taken in two steps of fixed order, without atomics. Sequences are cut into pieces of at
most ``PIECE_TOKENS``, counted from their own begin; a program sums several pieces. A sequence of
one piece is done then; the sums of longer ones are added up by a second kernel, in the order of
the pieces. So a giant is shared by many programs, and a sum has the same bits in every batch.
"""

import torch
import triton
import triton.language as tl

from gem_jagged.device import last_sequence, rows_of_tile, sequences_from, sum_tile
from gem_jagged.launching import in_a_row, on_device

PIECE_TOKENS = 128
_SPREAD_TILES = 4  # of a program


@triton.jit
def _divided(total, length, WIDE: tl.constexpr):
    count = tl.maximum(length, 1).to(total.dtype)[:, None]
    # The plain division of fp32 is two units off; a mean of equal values must be that value.
    return total / count if WIDE else tl.div_rn(total, count + tl.zeros_like(total))


@triton.jit(do_not_specialize=["slots", "batch"])
def _piece_sum_kernel(
    values_ptr, stride_t, stride_d, offsets_ptr, out_ptr, partial_ptr, slots, batch, width,
    MEAN: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, S: tl.constexpr, T: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * S
    here = tl.arange(0, S)
    slot = start + here
    last = tl.minimum(start + S, slots) - 1
    first = last_sequence(offsets_ptr, offsets_ptr, start, batch, PIECE, False)
    found, _ = sequences_from(
        offsets_ptr, offsets_ptr, first, here, start, last, batch, PIECE, False
    )
    b = (first + found).to(tl.int64)
    known = (slot <= last) & (b < batch)
    begin = tl.load(offsets_ptr + b, mask=known, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + b + 1, mask=known, other=0).to(tl.int64)
    piece = slot - (begin // PIECE + b)
    begin_piece = begin + piece * PIECE
    count = tl.minimum(end - begin_piece, PIECE)
    # Every sequence has a first piece, which of an empty one sums nothing; other slots may be void.
    live = known & ((count > 0) | (piece == 0))
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = d < width
    total = sum_tile(
        values_ptr, begin_piece, count, live, stride_t, stride_d, d, in_d, WIDE, S, T, UNROLL
    )
    whole = end - begin <= PIECE
    result = _divided(total, end - begin, WIDE) if MEAN else total
    tl.store(out_ptr + b[:, None] * width + d[None, :], result, mask=(live & whole)[:, None] & in_d)
    tl.store(
        partial_ptr + (2 * begin // PIECE + piece)[:, None] * width + d[None, :],
        total,
        mask=(live & (whole == 0))[:, None] & in_d,
    )


@triton.jit(do_not_specialize=["batch"])
def _long_sum_kernel(
    partial_ptr, offsets_ptr, out_ptr, batch, width,
    MEAN: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, S: tl.constexpr, T: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One axis of programs: rows of this kernel can be whole matrices, and the second axis of a grid
    # ends at 65,535.
    blocks_d = tl.cdiv(width, BLOCK_D)
    b = (tl.program_id(0) // blocks_d).to(tl.int64) * S + tl.arange(0, S)
    in_b = b < batch
    begin = tl.load(offsets_ptr + b, mask=in_b, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + b + 1, mask=in_b, other=0).to(tl.int64)
    is_long = in_b & (end - begin > PIECE)
    pieces = (end - begin + PIECE - 1) // PIECE
    d = (tl.program_id(0) % blocks_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = d < width
    total = sum_tile(
        partial_ptr, 2 * begin // PIECE, pieces, is_long, width, 1, d, in_d, WIDE, S, T, UNROLL
    )
    result = _divided(total, end - begin, WIDE) if MEAN else total
    tl.store(out_ptr + b[:, None] * width + d[None, :], result, mask=is_long[:, None] & in_d)


@triton.jit(do_not_specialize=["rows", "batch"])
def _spread_kernel(
    values_ptr, values_stride_t, values_stride_d, dense_ptr, dense_stride_b, dense_stride_d,
    offsets_ptr, out_ptr, rows, batch, width,
    ADD: tl.constexpr, MEAN: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    begin_row = tl.program_id(0).to(tl.int64) * (BLOCK_ROWS * TILES)
    first = last_sequence(offsets_ptr, offsets_ptr, begin_row, batch, 0, False)
    for tile in range(TILES):
        row, in_row, b, known, first = rows_of_tile(
            offsets_ptr, offsets_ptr, begin_row + tile * BLOCK_ROWS, first, rows, batch, False,
            BLOCK_ROWS,
        )  # fmt: skip
        if MEAN:
            length = tl.load(offsets_ptr + b + 1, mask=known, other=1).to(tl.int64)
            length -= tl.load(offsets_ptr + b, mask=known, other=0).to(tl.int64)
            # A division takes as many instructions as all else here. A result of 16 bits does
            # not show the two roundings of a product with the reciprocal.
            if NARROW:
                share = tl.div_rn(tl.full(length.shape, 1.0, tl.float32), length.to(tl.float32))
        for begin in range(0, width, BLOCK_D):
            d = begin + tl.arange(0, BLOCK_D)
            in_d = (d < width)[None, :]
            mask = known[:, None] & in_d
            at_d = d.to(tl.int64)[None, :]
            x = tl.load(
                dense_ptr + (b * dense_stride_b)[:, None] + at_d * dense_stride_d,
                mask=mask,
                other=0.0,
            ).to(tl.float64 if WIDE else tl.float32)
            if MEAN:
                x = x * share[:, None] if NARROW else _divided(x, length, WIDE)
            if ADD:
                x += tl.load(
                    values_ptr + (row * values_stride_t)[:, None] + at_d * values_stride_d,
                    mask=mask,
                    other=0.0,
                ).to(tl.float64 if WIDE else tl.float32)
            tl.store(out_ptr + row[:, None] * width + d[None, :], x, mask=in_row[:, None] & in_d)


def launch_sum(values_TD, offsets_O, *, mean):
    """Sum the rows of each sequence, or average them."""
    tokens, width = values_TD.shape
    batch = offsets_O.shape[0] - 1
    out = values_TD.new_empty((batch, width))
    if out.numel() == 0:
        return out
    (offsets_O,) = in_a_row(offsets_O)
    is_wide = values_TD.dtype == torch.float64
    # Two rows a piece: ceil(L / P) pieces of a sequence longer than P fit between 2·begin // P and
    # 2·end // P.
    rows = 2 * tokens // PIECE_TOKENS + 1 if tokens > PIECE_TOKENS else 0
    partial = values_TD.new_empty((rows, width), dtype=torch.float64 if is_wide else torch.float32)
    slots = tokens // PIECE_TOKENS + batch
    block_d = min(triton.next_power_of_2(width), 128)
    # A tile takes neighbouring tokens too: narrow rows are contiguous then, and a long piece among
    # short ones keeps its program less long. 8 KiB of it, several times, are in flight.
    size = values_TD.element_size()
    block_t = min(max(8, 64 // block_d), 32)
    most_s = 64 if block_d == 1 else 32  # more would spill registers
    block_s = min(max(2, 8192 // size // (block_t * block_d)), most_s)
    with on_device(out):
        _piece_sum_kernel[(triton.cdiv(slots, block_s), triton.cdiv(width, block_d))](
            values_TD, *values_TD.stride(), offsets_O, out, partial, slots, batch,
            width,
            MEAN=mean, WIDE=is_wide, PIECE=PIECE_TOKENS, S=block_s, T=block_t,
            UNROLL=8 if size == 4 and block_t == 8 else 4, BLOCK_D=block_d,
        )  # fmt: skip
        if rows:
            add_long_sums(partial, offsets_O, out, piece=PIECE_TOKENS, mean=mean)
    return out


def add_long_sums(partial, offsets_O, out, *, piece, mean=False):
    """Write the rows of sequences longer than ``piece``, from the sums of their pieces.

    The sums of sequence b stand in ``partial`` from row 2·begin // piece on. ``out`` is (B, width)
    and contiguous; its other rows stay as they are. ``offsets_O`` is contiguous.
    """
    batch, width = out.shape
    block_d = min(triton.next_power_of_2(width), 16)
    _long_sum_kernel[(triton.cdiv(batch, 8) * triton.cdiv(width, block_d),)](
        partial, offsets_O, out, batch, width,
        MEAN=mean, WIDE=partial.dtype == torch.float64, PIECE=piece,
        S=8, T=16, UNROLL=4, BLOCK_D=block_d,
    )  # fmt: skip


def launch_spread(dense_BD, offsets_O, total_tokens, *, mean, values_TD=None):
    """Give each token the row of its sequence, divided by the length or added to ``values_TD``."""
    width, batch = dense_BD.shape[1], offsets_O.shape[0] - 1
    out = dense_BD.new_empty((total_tokens, width))
    if out.numel() == 0:
        return out
    (offsets_O,) = in_a_row(offsets_O)
    values = dense_BD if values_TD is None else values_TD
    block_d = min(triton.next_power_of_2(width), 512)
    block_rows = max(1, 8192 // out.element_size() // block_d)
    with on_device(out):
        _spread_kernel[(triton.cdiv(total_tokens, block_rows * _SPREAD_TILES),)](
            values, *values.stride(), dense_BD, *dense_BD.stride(), offsets_O, out,
            total_tokens, batch, width,
            ADD=values_TD is not None, MEAN=mean,
            WIDE=out.dtype == torch.float64, NARROW=out.element_size() < 4,
            BLOCK_ROWS=block_rows, TILES=_SPREAD_TILES, BLOCK_D=block_d,
        )  # fmt: skip
    return out

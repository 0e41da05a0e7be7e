"""Kernels that move rows between packed and padded batches, and their launchers. Private.

Every kernel is driven by its output: each row of the output is written once, from the row that it
comes from or with a fill. Rows behind the last offset are never read; in an output they get 0.
The inverse of a move is its backward, so two operators share each kernel.
"""

import triton
import triton.language as tl

from gem_jagged.device import copy_tile, last_sequence, rows_of_tile
from gem_jagged.launching import as_words, fill_word, in_a_row, move_blocks, on_device


# Sizes that change with every batch must not compile a kernel anew.
@triton.jit(do_not_specialize=["rows", "length", "fill"])
def _pad_kernel(
    values_ptr, stride_t, stride_w, offsets_ptr, out_ptr, rows, length, width, fill,
    RIGHT: tl.constexpr, WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = start + tl.arange(0, BLOCK_ROWS)
    in_row = row < rows
    # One wide division a program; those of the rows are narrow unless the padded length is huge.
    begin_b = start // length
    place = (start - begin_b * length) + tl.arange(0, BLOCK_ROWS)
    if not WIDE:
        place = place.to(tl.int32)
    passed = place // length
    b = begin_b + passed
    n = (place - passed * length).to(tl.int64)
    begin = tl.load(offsets_ptr + b, mask=in_row, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + b + 1, mask=in_row, other=0).to(tl.int64)
    token = end - length + n if RIGHT else begin + n
    holds = in_row & (token >= begin) & (token < end)
    copy_tile(
        out_ptr, row, in_row, values_ptr, token * stride_t, holds, stride_w, fill, width, BLOCK_W
    )


@triton.jit(do_not_specialize=["rows", "length", "batch"])
def _unpad_kernel(
    padded_ptr, stride_b, stride_n, stride_w, offsets_ptr, out_ptr, rows, length, batch, width,
    RIGHT: tl.constexpr, BLOCK_ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    begin_row = tl.program_id(0).to(tl.int64) * (BLOCK_ROWS * TILES)
    first = last_sequence(offsets_ptr, offsets_ptr, begin_row, batch, 0, False)
    for tile in range(TILES):
        row, in_row, b, known, first = rows_of_tile(
            offsets_ptr, offsets_ptr, begin_row + tile * BLOCK_ROWS, first, rows, batch, False,
            BLOCK_ROWS,
        )  # fmt: skip
        if RIGHT:
            n = row - tl.load(offsets_ptr + b + 1, mask=known, other=0).to(tl.int64) + length
        else:
            n = row - tl.load(offsets_ptr + b, mask=known, other=0).to(tl.int64)
        holds = known & (n >= 0) & (n < length)
        copy_tile(
            out_ptr, row, in_row, padded_ptr, b * stride_b + n * stride_n, holds, stride_w, 0,
            width, BLOCK_W,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "batch"])
def _join_kernel(
    left_ptr, left_stride_t, left_stride_w, right_ptr, right_stride_t, right_stride_w,
    left_offsets_ptr, right_offsets_ptr, out_ptr, rows, batch, width,
    BLOCK_ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    begin_row = tl.program_id(0).to(tl.int64) * (BLOCK_ROWS * TILES)
    first = last_sequence(left_offsets_ptr, right_offsets_ptr, begin_row, batch, 0, True)
    for tile in range(TILES):
        row, in_row, b, known, first = rows_of_tile(
            left_offsets_ptr, right_offsets_ptr, begin_row + tile * BLOCK_ROWS, first,
            rows, batch, True, BLOCK_ROWS,
        )  # fmt: skip
        left_end = tl.load(left_offsets_ptr + b + 1, mask=known, other=0).to(tl.int64)
        right_begin = tl.load(right_offsets_ptr + b, mask=known, other=0).to(tl.int64)
        # Tokens of the left stand right_begin rows further on, those of the right left_end rows.
        is_left = row - right_begin < left_end
        for begin in range(0, width, BLOCK_W):
            w = begin + tl.arange(0, BLOCK_W)
            inside = (w < width)[None, :]
            of_left = (row - right_begin) * left_stride_t
            left = tl.load(
                left_ptr + of_left[:, None] + (w.to(tl.int64) * left_stride_w)[None, :],
                mask=(known & is_left)[:, None] & inside,
                other=0,
            )
            of_right = (row - left_end) * right_stride_t
            right = tl.load(
                right_ptr + of_right[:, None] + (w.to(tl.int64) * right_stride_w)[None, :],
                mask=(known & (is_left == 0))[:, None] & inside,
                other=0,
            )
            tl.store(
                out_ptr + row[:, None] * width + w[None, :],
                tl.where(is_left[:, None], left, right),
                mask=in_row[:, None] & inside,
            )


@triton.jit(do_not_specialize=["rows", "batch"])
def _part_kernel(
    values_ptr, stride_t, stride_w, own_offsets_ptr, other_offsets_ptr, out_ptr, rows, batch,
    width,
    LEFT: tl.constexpr, BLOCK_ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    begin_row = tl.program_id(0).to(tl.int64) * (BLOCK_ROWS * TILES)
    first = last_sequence(own_offsets_ptr, own_offsets_ptr, begin_row, batch, 0, False)
    for tile in range(TILES):
        row, in_row, b, known, first = rows_of_tile(
            own_offsets_ptr, own_offsets_ptr, begin_row + tile * BLOCK_ROWS, first,
            rows, batch, False, BLOCK_ROWS,
        )  # fmt: skip
        before = b if LEFT else b + 1
        token = row + tl.load(other_offsets_ptr + before, mask=known, other=0).to(tl.int64)
        copy_tile(
            out_ptr, row, in_row, values_ptr, token * stride_t, known, stride_w, 0, width, BLOCK_W
        )


@triton.jit(do_not_specialize=["rows", "batch"])
def _tail_kernel(
    source_ptr, stride_t, stride_w, own_offsets_ptr, source_offsets_ptr, out_ptr, rows, batch,
    width, BLOCK_ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    begin_row = tl.program_id(0).to(tl.int64) * (BLOCK_ROWS * TILES)
    first = last_sequence(own_offsets_ptr, own_offsets_ptr, begin_row, batch, 0, False)
    for tile in range(TILES):
        row, in_row, b, known, first = rows_of_tile(
            own_offsets_ptr, own_offsets_ptr, begin_row + tile * BLOCK_ROWS, first,
            rows, batch, False, BLOCK_ROWS,
        )  # fmt: skip
        end = tl.load(own_offsets_ptr + b + 1, mask=known, other=0).to(tl.int64)
        source_begin = tl.load(source_offsets_ptr + b, mask=known, other=0).to(tl.int64)
        source_end = tl.load(source_offsets_ptr + b + 1, mask=known, other=0).to(tl.int64)
        # Sequences are aligned at their ends.
        token = source_end - (end - row)
        holds = known & (token >= source_begin)
        copy_tile(
            out_ptr, row, in_row, source_ptr, token * stride_t, holds, stride_w, 0, width, BLOCK_W
        )


@triton.jit(do_not_specialize=["rows", "selected", "batch"])
def _select_kernel(
    values_ptr, stride_t, stride_w, offsets_ptr, indices_ptr, selected_offsets_ptr, out_ptr, rows,
    selected, batch, width, BLOCK_ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    begin_row = tl.program_id(0).to(tl.int64) * (BLOCK_ROWS * TILES)
    first = last_sequence(selected_offsets_ptr, selected_offsets_ptr, begin_row, selected, 0, False)
    for tile in range(TILES):
        row, in_row, i, known, first = rows_of_tile(
            selected_offsets_ptr, selected_offsets_ptr, begin_row + tile * BLOCK_ROWS, first,
            rows, selected, False, BLOCK_ROWS,
        )  # fmt: skip
        b = tl.load(indices_ptr + i, mask=known, other=0).to(tl.int64)
        known = known & (b >= 0) & (b < batch)
        begin = tl.load(offsets_ptr + b, mask=known, other=0).to(tl.int64)
        end = tl.load(offsets_ptr + b + 1, mask=known, other=0).to(tl.int64)
        token = begin + row - tl.load(selected_offsets_ptr + i, mask=known, other=0).to(tl.int64)
        holds = known & (token < end)
        copy_tile(
            out_ptr, row, in_row, values_ptr, token * stride_t, holds, stride_w, 0, width, BLOCK_W
        )


def launch_pad(values_TD, offsets_O, length, fill, align):
    """Pad packed rows; ``fill`` where no token is."""
    batch = offsets_O.shape[0] - 1
    out = values_TD.new_empty((batch, length, values_TD.shape[1]))
    if out.numel() == 0:
        return out
    (offsets_O,) = in_a_row(offsets_O)
    values, target = as_words(values_TD, out)
    rows, width = batch * length, target.shape[2]
    block_rows, block_w, _ = move_blocks(width)
    with on_device(out):
        _pad_kernel[(triton.cdiv(rows, block_rows),)](
            values, *values.stride(), offsets_O, target, rows, length, width,
            fill_word(fill, out.dtype, target.dtype),
            RIGHT=align == "right", WIDE=length >= 2**30,
            BLOCK_ROWS=block_rows, BLOCK_W=block_w,
        )  # fmt: skip
    return out


def launch_unpad(padded_BND, offsets_O, total_tokens, align):
    """Take packed rows out of padded ones; 0 where the padded batch has none."""
    batch, length, width = padded_BND.shape
    out = padded_BND.new_empty((total_tokens, width))
    if out.numel() == 0:
        return out
    (offsets_O,) = in_a_row(offsets_O)
    padded, target = as_words(padded_BND, out)
    block_rows, block_w, tiles = move_blocks(target.shape[1])
    with on_device(out):
        _unpad_kernel[(triton.cdiv(total_tokens, block_rows * tiles),)](
            padded, *padded.stride(), offsets_O, target, total_tokens, length, batch,
            target.shape[1],
            RIGHT=align == "right", BLOCK_ROWS=block_rows, TILES=tiles, BLOCK_W=block_w,
        )  # fmt: skip
    return out


def launch_join(left_TD, right_SD, left_offsets_O, right_offsets_O):
    """Append to each sequence of the left that of the right."""
    rows, batch = left_TD.shape[0] + right_SD.shape[0], left_offsets_O.shape[0] - 1
    out = left_TD.new_empty((rows, left_TD.shape[1]))
    if out.numel() == 0:
        return out
    left_offsets_O, right_offsets_O = in_a_row(left_offsets_O, right_offsets_O)
    left, right, target = as_words(left_TD, right_SD, out)
    block_rows, block_w, tiles = move_blocks(target.shape[1])
    with on_device(out):
        _join_kernel[(triton.cdiv(rows, block_rows * tiles),)](
            left, *left.stride(), right, *right.stride(), left_offsets_O, right_offsets_O, target,
            rows, batch, target.shape[1],
            BLOCK_ROWS=block_rows, TILES=tiles, BLOCK_W=block_w,
        )  # fmt: skip
    return out


def launch_part(values_TD, left_offsets_O, right_offsets_O, left_tokens):
    """Take the left and the right part out of joined sequences."""
    left_offsets_O, right_offsets_O = in_a_row(left_offsets_O, right_offsets_O)
    sides = (
        (left_tokens, left_offsets_O, right_offsets_O, True),
        (values_TD.shape[0] - left_tokens, right_offsets_O, left_offsets_O, False),
    )
    parts = []
    for rows, own_offsets_O, other_offsets_O, is_left in sides:
        batch = own_offsets_O.shape[0] - 1
        out = values_TD.new_empty((rows, values_TD.shape[1]))
        parts.append(out)
        if out.numel() == 0:
            continue
        values, target = as_words(values_TD, out)
        block_rows, block_w, tiles = move_blocks(target.shape[1])
        with on_device(out):
            _part_kernel[(triton.cdiv(rows, block_rows * tiles),)](
                values, *values.stride(), own_offsets_O, other_offsets_O, target, rows, batch,
                target.shape[1],
                LEFT=is_left, BLOCK_ROWS=block_rows, TILES=tiles, BLOCK_W=block_w,
            )  # fmt: skip
    return tuple(parts)


def launch_tail(source_TD, source_offsets_O, own_offsets_O, rows):
    """Fill sequences from their ends on with those of the source; 0 where it has no more."""
    batch = own_offsets_O.shape[0] - 1
    out = source_TD.new_empty((rows, source_TD.shape[1]))
    if out.numel() == 0:
        return out
    source_offsets_O, own_offsets_O = in_a_row(source_offsets_O, own_offsets_O)
    source, target = as_words(source_TD, out)
    block_rows, block_w, tiles = move_blocks(target.shape[1])
    with on_device(out):
        _tail_kernel[(triton.cdiv(rows, block_rows * tiles),)](
            source, *source.stride(), own_offsets_O, source_offsets_O, target, rows, batch,
            target.shape[1],
            BLOCK_ROWS=block_rows, TILES=tiles, BLOCK_W=block_w,
        )  # fmt: skip
    return out


def launch_select(values_TD, offsets_O, indices_I, selected_offsets_O, rows):
    """Gather whole sequences; 0 where an index names no sequence."""
    selected = indices_I.shape[0]
    out = values_TD.new_empty((rows, values_TD.shape[1]))
    if out.numel() == 0:
        return out
    offsets_O, indices_I, selected_offsets_O = in_a_row(offsets_O, indices_I, selected_offsets_O)
    values, target = as_words(values_TD, out)
    block_rows, block_w, tiles = move_blocks(target.shape[1])
    with on_device(out):
        _select_kernel[(triton.cdiv(rows, block_rows * tiles),)](
            values, *values.stride(), offsets_O, indices_I, selected_offsets_O, target, rows,
            selected, offsets_O.shape[0] - 1, target.shape[1],
            BLOCK_ROWS=block_rows, TILES=tiles, BLOCK_W=block_w,
        )  # fmt: skip
    return out

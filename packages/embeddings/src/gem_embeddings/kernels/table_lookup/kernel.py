"""Triton kernels of ``table_lookup``: bags, long bags and rows; its gradients are ``merging``'s.

A program sums several bags of one feature at once, one id of each at a time, so that as many rows
are on their way as it has bags. A bag of more than ``PIECE_IDS`` ids is cut into pieces, counted
from its own begin, which programs of another kernel sum; a third adds the pieces up in their order.
So a sum has the same bits in every batch.
"""

import functools

import torch
import triton
import triton.language as tl

from gem_embeddings.merging.dot.kernel import launch_dot
from gem_embeddings.merging.kernel import launch_merge
from gem_embeddings.merging.lines.kernel import begin_of_output, begins_of
from gem_embeddings.places import places_of
from gem_jagged.device import last_sequence
from gem_jagged.launching import in_a_row, on_device
from gem_opkit.errors import UnsupportedError, refusal

PIECE_IDS = 64
# Of a program. More rows are on their way with more bags; with long bags, more programs do better.
_TILE_ELEMENTS = 1024
_LONG_TILE_ELEMENTS = 512
_FEW_IDS = 2
# Ids of a bag whose rows are asked for at once, by the bytes of an element: narrow rows wait longer
# for each other than they take to move.
_AHEAD = {2: 4, 4: 1, 8: 1}
_WIDEST_BLOCK = 512


@triton.jit
def _read_ids(ids_ptr, id_weights_ptr, i, mask, rows, WEIGHTED: tl.constexpr):
    """Return some ids, whether they lie in their table, and their weights."""
    row = tl.load(ids_ptr + i, mask=mask, other=-1).to(tl.int64)
    inside = mask & (row >= 0) & (row < rows)
    weight = tl.load(id_weights_ptr + i, mask=inside, other=0.0) if WEIGHTED else inside
    return row, inside, weight


@triton.jit
def _read_rows(
    weights_ptr, row, inside, offset, width, columns, ALIGN: tl.constexpr
):  # fmt: skip
    """Return rows as they are stored; zeros outside their table."""
    at = tl.multiple_of(offset + row * width, (ALIGN,))
    return tl.load(
        weights_ptr + at[:, None] + columns[None, :],
        mask=inside[:, None] & (columns < width)[None, :],
        other=0.0,
    )


@triton.jit
def _weighted(x, weight, WEIGHTED: tl.constexpr):
    """Return rows in fp32, times their weights."""
    x = x.to(tl.float32)
    return x * weight.to(tl.float32)[:, None] if WEIGHTED else x


@triton.jit
def _rows_of_ids(
    weights_ptr, ids_ptr, id_weights_ptr, i, mask, offset, rows, width, columns,
    WEIGHTED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Return the rows of some ids, in fp32 and weighted; zeros outside their table."""
    row, inside, weight = _read_ids(ids_ptr, id_weights_ptr, i, mask, rows, WEIGHTED)
    x = _read_rows(weights_ptr, row, inside, offset, width, columns, ALIGN)
    return _weighted(x, weight, WEIGHTED)


@triton.jit
def _feature(table_ptr, f, features, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Return offset, rows and width of a feature's table; int64."""
    offset = tl.load(table_ptr + f)
    rows = tl.load(table_ptr + 2 * features + f)
    if WIDTH > 0:
        width = f * 0 + WIDTH
    else:
        width = tl.multiple_of(tl.load(table_ptr + 3 * features + f), ALIGN)
    return offset, rows, width


@triton.jit(do_not_specialize=["batch", "features"])
def _bag_kernel(
    weights_ptr, ids_ptr, bags_ptr, id_weights_ptr, out_ptr, table_ptr, begins_ptr, list_ptr,
    batch, features,
    MIXED: tl.constexpr, WEIGHTED: tl.constexpr, CUT: tl.constexpr, PIECE: tl.constexpr,
    WIDTH: tl.constexpr, ALIGN: tl.constexpr, S: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(batch, S)
    f = tl.load(list_ptr + tl.program_id(0) // blocks)
    offset, rows, width = _feature(table_ptr, f, features, WIDTH, ALIGN)
    b = (tl.program_id(0) % blocks).to(tl.int64) * S + tl.arange(0, S)
    in_b = b < batch
    begin = tl.load(bags_ptr + f * batch + b, mask=in_b, other=0).to(tl.int64)
    end = tl.load(bags_ptr + f * batch + b + 1, mask=in_b, other=0).to(tl.int64)
    if CUT:
        in_b = in_b & (end - begin <= PIECE)
    steps = tl.max(tl.where(in_b, end - begin, 0), axis=0)
    columns = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((S, BLOCK_E), dtype=tl.float32)
    for step in range(0, steps.to(tl.int32), AHEAD):
        # All ids first, so that no row waits for another; Triton takes no stars.
        read, ahead = (), ()
        for turn in tl.static_range(AHEAD):
            i = begin + step + turn
            ids = _read_ids(ids_ptr, id_weights_ptr, i, in_b & (i < end), rows, WEIGHTED)
            read = read + (ids,)  # noqa: RUF005
        for turn in tl.static_range(AHEAD):
            row, inside, _ = read[turn]
            x = _read_rows(weights_ptr, row, inside, offset, width, columns, ALIGN)
            ahead = ahead + (x,)  # noqa: RUF005
        for turn in tl.static_range(AHEAD):
            total += _weighted(ahead[turn], read[turn][2], WEIGHTED)
    if tl.load(table_ptr + 4 * features + f) == 1:
        count = tl.maximum(end - begin, 1).to(tl.float32)[:, None]
        total = tl.div_rn(total, count + tl.zeros_like(total))
    start = begin_of_output(begins_ptr, f, batch >= 0, batch, MIXED)
    at = tl.multiple_of(start + b * width, (ALIGN,))
    tl.store(
        out_ptr + at[:, None] + columns[None, :],
        total,
        mask=in_b[:, None] & (columns < width)[None, :],
    )


@triton.jit(do_not_specialize=["batch", "features"])
def _piece_kernel(
    weights_ptr, ids_ptr, bags_ptr, id_weights_ptr, pieces_ptr, table_ptr, batch, features,
    CLASS: tl.constexpr, WEIGHTED: tl.constexpr, PIECE: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Sum a piece of a long bag; 2·begin // PIECE is the number of a bag's first piece.

    ceil(L / PIECE) pieces of a bag of more than PIECE ids fit between 2·begin // PIECE and
    2·end // PIECE, and its last piece is numbered before the next bag begins.
    """
    piece = tl.program_id(0).to(tl.int64)
    bags = batch * features
    bag = last_sequence(bags_ptr, bags_ptr, (piece + 1) * PIECE // 2 - 1, bags, 0, False)
    if bag >= bags:
        return
    bag = bag.to(tl.int64)
    begin = tl.load(bags_ptr + bag).to(tl.int64)
    end = tl.load(bags_ptr + bag + 1).to(tl.int64)
    begin_piece = begin + (piece - 2 * begin // PIECE) * PIECE
    if (end - begin <= PIECE) | (begin_piece >= end):
        return
    f = bag // batch
    is_single = tl.load(table_ptr + 4 * features + f) == 2
    if is_single | (tl.load(table_ptr + 5 * features + f) != CLASS):
        return
    offset, rows, width = _feature(table_ptr, f, features, WIDTH, ALIGN)
    end = tl.minimum(end, begin_piece + PIECE)
    columns = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((T, BLOCK_E), dtype=tl.float32)
    for first in range(0, PIECE, T):
        i = begin_piece + first + tl.arange(0, T)
        total += _rows_of_ids(
            weights_ptr, ids_ptr, id_weights_ptr, i, i < end, offset, rows, width, columns,
            WEIGHTED, ALIGN,
        )  # fmt: skip
    at = piece * (tl.num_programs(1) * BLOCK_E) + columns
    tl.store(pieces_ptr + at, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["batch", "features"])
def _long_bag_kernel(
    pieces_ptr, bags_ptr, out_ptr, table_ptr, begins_ptr, list_ptr, batch, features,
    MIXED: tl.constexpr, PIECE: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr,
    S: tl.constexpr, T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(batch, S)
    f = tl.load(list_ptr + tl.program_id(0) // blocks)
    _, _, width = _feature(table_ptr, f, features, WIDTH, ALIGN)
    b = (tl.program_id(0) % blocks).to(tl.int64) * S + tl.arange(0, S)
    in_b = b < batch
    begin = tl.load(bags_ptr + f * batch + b, mask=in_b, other=0).to(tl.int64)
    length = tl.load(bags_ptr + f * batch + b + 1, mask=in_b, other=0).to(tl.int64) - begin
    is_long = in_b & (length > PIECE)
    pieces = tl.where(is_long, (length + PIECE - 1) // PIECE, 0)
    steps = tl.max(pieces, axis=0)
    columns = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.num_programs(1) * BLOCK_E
    t = tl.arange(0, T)
    total = tl.zeros((S, T, BLOCK_E), dtype=tl.float32)
    for first in range(0, steps, T):
        inside = first + t[None, :] < pieces[:, None]
        at = (2 * begin // PIECE + first)[:, None] + t[None, :]
        total += tl.load(
            pieces_ptr + (at * row)[:, :, None] + columns[None, None, :],
            mask=inside[:, :, None] & (columns >= 0)[None, None, :],
            other=0.0,
        )
    result = tl.sum(total, axis=1)
    if tl.load(table_ptr + 4 * features + f) == 1:
        count = tl.maximum(length, 1).to(tl.float32)[:, None]
        result = tl.div_rn(result, count + tl.zeros_like(result))
    start = begin_of_output(begins_ptr, f, batch >= 0, batch, MIXED)
    at = tl.multiple_of(start + b * width, (ALIGN,))
    tl.store(
        out_ptr + at[:, None] + columns[None, :],
        result,
        mask=is_long[:, None] & (columns < width)[None, :],
    )


@triton.jit(do_not_specialize=["batch", "features"])
def _row_kernel(
    weights_ptr, ids_ptr, bags_ptr, id_weights_ptr, out_ptr, table_ptr, begins_ptr, list_ptr,
    batch, features,
    WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, T: tl.constexpr,
    TILES: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    f = tl.load(list_ptr + tl.program_id(1))
    first = tl.load(bags_ptr + f * batch).to(tl.int64)
    count = tl.load(bags_ptr + (f + 1) * batch).to(tl.int64) - first
    begin = tl.program_id(0).to(tl.int64) * (T * TILES)
    if begin >= count:
        return
    offset, rows, width = _feature(table_ptr, f, features, WIDTH, ALIGN)
    start = tl.load(begins_ptr + f)
    columns = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    for tile in tl.static_range(TILES):
        i = begin + tile * T + tl.arange(0, T)
        x = _rows_of_ids(
            weights_ptr, ids_ptr, id_weights_ptr, first + i, i < count, offset, rows, width,
            columns, WEIGHTED, ALIGN,
        )  # fmt: skip
        at = tl.multiple_of(start + i * width, (ALIGN,))
        tl.store(
            out_ptr + at[:, None] + columns[None, :],
            x,
            mask=(i < count)[:, None] & (columns < width)[None, :],
        )


def _refuse_fp64(*tensors):
    for tensor in tensors:
        if tensor is not None and tensor.dtype == torch.float64:
            raise UnsupportedError(
                refusal(
                    "table_lookup",
                    "impl",
                    must='be "reference" for fp64',
                    got="a Triton kernel",
                    fix="use fp32 tables, or the reference",
                )
            )


def _rows_of_tile(block_e, elements):
    return max(1, min(128, elements // block_e))


def launch_forward(weights_N, ids_I, bags_O, id_weights_I, slots, counts, longest, out_dtype):
    """Look up all features."""
    _refuse_fp64(weights_N, id_weights_I)
    places = places_of("table_lookup", slots, weights_N.device)
    batch = (bags_O.shape[0] - 1) // max(1, len(counts))
    ids_I, bags_O = in_a_row(ids_I, bags_O)
    poolings = slots[4::5]
    total = sum(
        (count if pooling == 2 else batch) * width
        for count, pooling, width in zip(counts, poolings, places.widths, strict=True)
    )
    out = torch.empty(total, dtype=out_dtype, device=weights_N.device)
    if total == 0:
        return out
    is_weighted = id_weights_I is not None
    weights = id_weights_I.contiguous() if is_weighted else weights_N
    shared = {"WEIGHTED": is_weighted, "ALIGN": places.align}
    with on_device(out):
        begins = begins_of(places, bags_O, batch)
        for of in places.classes:
            block_e = min(of.columns, _WIDEST_BLOCK)
            across = triton.cdiv(of.columns, block_e)
            constants = {**shared, "WIDTH": of.width, "BLOCK_E": block_e, "num_warps": 1}
            if of.pooled_count and batch:
                elements = _TILE_ELEMENTS if longest <= _FEW_IDS else _LONG_TILE_ELEMENTS
                block_s = _rows_of_tile(block_e, elements)
                blocks = of.pooled_count * triton.cdiv(batch, block_s)
                _bag_kernel[(blocks, across)](
                    weights_N, ids_I, bags_O, weights, out, places.table, begins, of.pooled,
                    batch, places.features,
                    MIXED=places.mixed, CUT=longest > PIECE_IDS, PIECE=PIECE_IDS, S=block_s,
                    AHEAD=1 if longest <= _FEW_IDS else _AHEAD[weights_N.itemsize], **constants,
                )  # fmt: skip
                if longest > PIECE_IDS:
                    _add_long_bags(
                        weights_N, ids_I, bags_O, weights, out, places, begins, of, batch,
                        constants, across,
                    )  # fmt: skip
            for alike in _alike(of.singles, counts):
                tiles, block_t = 4, _rows_of_tile(block_e, _TILE_ELEMENTS)
                most = max(counts[index] for index in alike)
                listed = of.single if alike == of.singles else _listed(alike, out.device)
                _row_kernel[(triton.cdiv(most, block_t * tiles), len(alike), across)](
                    weights_N, ids_I, bags_O, weights, out, places.table, begins, listed,
                    batch, places.features, T=block_t, TILES=tiles, **constants,
                )  # fmt: skip
    return out


def _alike(features, counts):
    """Group features by their number of ids, within a factor of 16.

    A grid has as many programs for each of its features as for the longest: beside a million ids, a
    feature of a thousand would start a thousand times too many.
    """
    groups = {}
    for index in features:
        if counts[index]:
            groups.setdefault(counts[index].bit_length() // 4, []).append(index)
    return [tuple(group) for group in groups.values()]


@functools.lru_cache(maxsize=64)
def _listed(features, device):
    return torch.tensor(features, dtype=torch.int64).to(device)


def _add_long_bags(
    weights_N, ids_I, bags_O, weights, out, places, begins, of, batch, constants, across
):
    """Write the sums of bags that ``_bag_kernel`` has left out."""
    count = 2 * ids_I.shape[0] // PIECE_IDS + 1
    block_e = constants["BLOCK_E"]
    pieces = torch.empty((count, across * block_e), dtype=torch.float32, device=out.device)
    _piece_kernel[(count, across)](
        weights_N, ids_I, bags_O, weights, pieces, places.table, batch, places.features,
        CLASS=of.number, PIECE=PIECE_IDS, T=min(16, max(1, _TILE_ELEMENTS // block_e)),
        **constants,
    )  # fmt: skip
    constants = {k: v for k, v in constants.items() if k not in ("WEIGHTED", "num_warps")}
    _long_bag_kernel[(of.pooled_count * triton.cdiv(batch, 4), across)](
        pieces, bags_O, out, places.table, begins, of.pooled, batch, places.features,
        MIXED=places.mixed, PIECE=PIECE_IDS, S=4, T=max(1, min(16, 2048 // block_e)), **constants,
    )  # fmt: skip


def launch_backward(grad, ids_I, bags_O, id_weights_I, slots, counts, like_N):
    """Return the dense gradient of the weights."""
    _refuse_fp64(like_N, grad, id_weights_I)
    grad_N = torch.zeros(like_N.shape, dtype=like_N.dtype, device=like_N.device)
    places = places_of("table_lookup", slots, like_N.device)
    launch_merge(grad_N, (), ids_I, bags_O, grad, id_weights_I, places, rule="gradient")
    return grad_N


def launch_id_weights_backward(grad, weights_N, ids_I, bags_O, slots, counts):
    """Return the gradient of the weight of each id."""
    _refuse_fp64(weights_N, grad)
    places = places_of("table_lookup", slots, weights_N.device)
    return launch_dot(weights_N, ids_I, bags_O, grad, places)

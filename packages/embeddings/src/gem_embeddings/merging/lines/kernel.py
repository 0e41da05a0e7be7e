"""Kernels that put the ids of a batch in the order of their rows. Private.

Every id gets a key, the number of its row over all tables, and the keys are sorted. Then each id,
in its new order, is written down as two words, which say all that a kernel behind needs to know of
it: the *line* of its row and that of its gradient.

- Row: where it begins in the weights (bits 0 to 47); whether the id is the first (48) and the last
  (49) that names it; its class of widths (50 and above), or 15 for an id outside its table.
- Gradient: where it begins (bits 0 to 47), and the width (48 and above).
"""

import torch
import triton
import triton.language as tl

from gem_embeddings.merging.device import place_of
from gem_jagged.device import last_sequence, rows_of_tile
from gem_jagged.launching import in_a_row, on_device

PLACE: tl.constexpr = tl.constexpr(2**48 - 1)
FIRST_BIT: tl.constexpr = tl.constexpr(48)
LAST_BIT: tl.constexpr = tl.constexpr(49)
CLASS_BIT: tl.constexpr = tl.constexpr(50)
WIDTH_BIT: tl.constexpr = tl.constexpr(48)
# Of no class; the word of an id that is not there.
NO_CLASS: tl.constexpr = tl.constexpr(15)
NO_ROW: tl.constexpr = tl.constexpr(15 << 50)
# A feature stands above the place of its gradient in the word of an id that is not sorted yet.
FEATURE_BIT: tl.constexpr = tl.constexpr(48)
_BLOCK = 256


@triton.jit(do_not_specialize=["batch", "features"])
def _begins_kernel(begins_ptr, bags_ptr, table_ptr, batch, features, BLOCK_F: tl.constexpr):
    """Write at which element of the output each feature begins."""
    f = tl.arange(0, BLOCK_F)
    known = f < features
    width = tl.load(table_ptr + 3 * features + f, mask=known, other=0)
    single = tl.load(table_ptr + 4 * features + f, mask=known, other=0) == 2
    first = tl.load(bags_ptr + f.to(tl.int64) * batch, mask=known, other=0).to(tl.int64)
    end = tl.load(bags_ptr + (f + 1).to(tl.int64) * batch, mask=known, other=0).to(tl.int64)
    size = tl.where(single, end - first, batch) * width
    tl.store(begins_ptr + f, tl.cumsum(size, axis=0) - size, mask=known)


@triton.jit
def begin_of_output(begins_ptr, f, mask, batch, MIXED: tl.constexpr):
    """Return the element of the output at which features begin; int64."""
    begin = tl.load(begins_ptr + f, mask=mask, other=0)
    return begin if MIXED else begin * batch


@triton.jit(do_not_specialize=["ids", "batch", "features"])
def _key_kernel(
    ids_ptr, bags_ptr, id_weights_ptr, keys_ptr, sources_ptr, scales_ptr, table_ptr, begins_ptr,
    ids, batch, features, grad_scale,
    MIXED: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    bags = batch * features
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first = last_sequence(bags_ptr, bags_ptr, start, bags, 0, False)
    i, in_i, bag, _, _ = rows_of_tile(
        bags_ptr, bags_ptr, start, first, ids, bags, False, BLOCK
    )  # fmt: skip
    f = bag // batch
    known = in_i & (bag < bags)
    row_offset = tl.load(table_ptr + features + f, mask=known, other=0)
    rows = tl.load(table_ptr + 2 * features + f, mask=known, other=0)
    width = tl.load(table_ptr + 3 * features + f, mask=known, other=0)
    pooling = tl.load(table_ptr + 4 * features + f, mask=known, other=0)
    row = tl.load(ids_ptr + i, mask=known, other=-1).to(tl.int64)
    inside = (row >= 0) & (row < rows)
    tl.store(keys_ptr + i, tl.where(inside, row_offset + row, LAST), mask=in_i)
    vector = bag - f * batch
    if MIXED:
        single = known & (pooling == 2)
        vector = tl.where(
            single, i - tl.load(bags_ptr + f * batch, mask=single, other=0).to(tl.int64), vector
        )
    source = begin_of_output(begins_ptr, f, known, batch, MIXED) + vector * width
    tl.store(sources_ptr + i, source | (f << FEATURE_BIT), mask=in_i)
    if SCALED:
        mean = known & (pooling == 1)
        length = tl.load(bags_ptr + bag + 1, mask=mean, other=1).to(tl.int64)
        length -= tl.load(bags_ptr + bag, mask=mean, other=0).to(tl.int64)
        scale = tl.div_rn(tl.full(length.shape, 1.0, tl.float32), length.to(tl.float32))
        if WEIGHTED:
            scale *= tl.load(id_weights_ptr + i, mask=known, other=0.0).to(tl.float32)
        tl.store(scales_ptr + i, scale * grad_scale, mask=in_i)


@triton.jit(do_not_specialize=["ids", "features"])
def _line_kernel(
    keys_ptr, order_ptr, sources_ptr, scales_ptr, table_ptr, rows_ptr, grads_ptr, lined_scales_ptr,
    ids, features,
    SCALED: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = p < ids
    key = tl.load(keys_ptr + p, mask=inside, other=LAST)
    before = tl.load(keys_ptr + p - 1, mask=inside & (p > 0), other=-1)
    after = tl.load(keys_ptr + p + 1, mask=p + 1 < ids, other=-1)
    i = tl.load(order_ptr + p, mask=inside, other=0)
    packed = tl.load(sources_ptr + i)
    f = packed >> FEATURE_BIT
    place, width = place_of(table_ptr, f, key, features, 0, 1)
    number = tl.load(table_ptr + 5 * features + f)
    ends = ((key != before).to(tl.int64) << FIRST_BIT) | ((key != after).to(tl.int64) << LAST_BIT)
    row = tl.where(key == LAST, NO_ROW, place | ends | (number << CLASS_BIT))
    tl.store(rows_ptr + p, row, mask=inside)
    tl.store(grads_ptr + p, (packed & PLACE) | (width << WIDTH_BIT), mask=inside)
    if SCALED:
        tl.store(lined_scales_ptr + p, tl.load(scales_ptr + i), mask=inside)


def begins_of(places, bags_O, batch):
    """Return where features begin in the output: elements, or elements of an example."""
    if not places.mixed:
        return places.table[6]
    begins = places.table.new_empty(places.features)
    with on_device(begins):
        _begins_kernel[(1,)](
            begins, bags_O, places.table, batch, places.features,
            BLOCK_F=triton.next_power_of_2(places.features),
        )  # fmt: skip
    return begins


def keys_of(ids_I, bags_O, id_weights_I, places, grad_scale):
    """Return key, source and scale of each id, in their order, and the key of ids outside.

    There are no scales where all would be ``grad_scale``.
    """
    ids = ids_I.shape[0]
    batch = (bags_O.shape[0] - 1) // max(1, places.features)
    ids_I, bags_O = in_a_row(ids_I, bags_O)
    is_scaled = places.averaged or id_weights_I is not None
    key_dtype = torch.int32 if places.rows < 2**31 - 1 else torch.int64
    last = torch.iinfo(key_dtype).max
    keys = torch.empty(ids, dtype=key_dtype, device=ids_I.device)
    sources = torch.empty(ids, dtype=torch.int64, device=ids_I.device)
    scales = torch.empty(ids if is_scaled else 0, dtype=torch.float32, device=ids_I.device)
    weights = scales if id_weights_I is None else id_weights_I.contiguous()
    with on_device(ids_I):
        _key_kernel[(triton.cdiv(ids, _BLOCK),)](
            ids_I, bags_O, weights, keys, sources, scales, places.table,
            begins_of(places, bags_O, batch), ids, batch, places.features, float(grad_scale),
            MIXED=places.mixed, WEIGHTED=id_weights_I is not None, SCALED=is_scaled, LAST=last,
            BLOCK=_BLOCK,
        )  # fmt: skip
    return keys, sources, scales, last


def lines_of(ids_I, bags_O, id_weights_I, places, grad_scale):
    """Return sorted keys, and the line of the row, that of the gradient and the scale of each."""
    keys, sources, scales, last = keys_of(ids_I, bags_O, id_weights_I, places, grad_scale)
    ids = ids_I.shape[0]
    with on_device(ids_I):
        keys, order = torch.sort(keys, stable=True)
        rows, grads, lined = (torch.empty_like(like) for like in (order, order, scales))
        _line_kernel[(triton.cdiv(ids, _BLOCK),)](
            keys, order, sources, scales, places.table, rows, grads, lined, ids, places.features,
            SCALED=scales.shape[0] > 0, LAST=last, BLOCK=_BLOCK,
        )  # fmt: skip
    return keys, rows, grads, lined

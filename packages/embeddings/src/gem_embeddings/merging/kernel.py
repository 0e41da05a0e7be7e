"""Kernels that merge the gradients of ids by row and move each row once. Private.

Every id gets a key, the number of its row over all tables, and the keys are sorted; equal rows then
lie side by side and form a run. A program takes a stretch of the sorted ids, whatever runs are in
it, so a row that half the batch names is as much work as the same ids with rows of their own. Runs
that end where they began in one program are merged and moved at once. What a program has of a run
that comes from before it, or goes on behind it, is written down, and a second kernel adds these
parts up in their order. No sum depends on which program came first.

A gradient is read where the output row of its id has it: nothing is spread out over ids.
"""

import torch
import triton
import triton.language as tl

from gem_jagged.device import last_sequence, rows_of_tile
from gem_jagged.launching import in_a_row, on_device
from gem_opkit.device import round_stochastically, words_of_columns

GRADIENT: tl.constexpr = tl.constexpr(0)
ROWWISE_ADAGRAD: tl.constexpr = tl.constexpr(1)
ADAGRAD: tl.constexpr = tl.constexpr(2)
SGD: tl.constexpr = tl.constexpr(3)
ADAM: tl.constexpr = tl.constexpr(4)
RULES = {"gradient": 0, "rowwise_adagrad": 1, "adagrad": 2, "sgd": 3, "adam": 4}

# A feature stands above the place of its gradient in one word.
_FEATURE_BIT: tl.constexpr = tl.constexpr(48)
_PLACE_BITS: tl.constexpr = tl.constexpr(2**48 - 1)
_KEY_BLOCK = 256
_TILE_ELEMENTS = 512  # of a warp
_CHANCE_ELEMENTS = 256  # where rows are rounded by chance, which takes registers
_SPAN_TILES = 16  # of _TILE_ELEMENTS, in a program
_PARTS = 4096
_FAN = 256


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
    tl.store(sources_ptr + i, source | (f << _FEATURE_BIT), mask=in_i)
    if SCALED:
        mean = known & (pooling == 1)
        length = tl.load(bags_ptr + bag + 1, mask=mean, other=1).to(tl.int64)
        length -= tl.load(bags_ptr + bag, mask=mean, other=0).to(tl.int64)
        scale = tl.div_rn(tl.full(length.shape, 1.0, tl.float32), length.to(tl.float32))
        if WEIGHTED:
            scale *= tl.load(id_weights_ptr + i, mask=known, other=0.0).to(tl.float32)
        tl.store(scales_ptr + i, scale * grad_scale, mask=in_i)


@triton.jit
def _place_of(table_ptr, f, key, features, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Return the element at which a row begins, and how wide it is; int64.

    What the place can be divided by is said here, at its operation: on the result of a call Triton
    forgets it. Loaded without masks, for there is always a feature: Triton 3.6 cannot compile a
    masked load here, whose mask comes from another load.
    """
    offset = tl.load(table_ptr + f)
    row_offset = tl.load(table_ptr + features + f)
    if WIDTH > 0:
        width = tl.full(key.shape, WIDTH, tl.int64)
    else:
        width = tl.load(table_ptr + 3 * features + f)
    place = offset + (key.to(tl.int64) - row_offset) * width
    return tl.multiple_of(place, (ALIGN,)), width


@triton.jit
def _sorted_tile(
    keys_ptr, order_ptr, sources_ptr, scales_ptr, table_ptr, p, ids, features, grad_scale,
    SCALED: tl.constexpr, LAST: tl.constexpr, CLASS: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Return what sorted ids need to know.

    Key, whether a run begins, whether it ends, which of them this launch merges, place and width
    of the row, place and scale of the gradient.
    """
    inside = p < ids
    key = tl.load(keys_ptr + p, mask=inside, other=LAST)
    before = tl.load(keys_ptr + p - 1, mask=inside & (p > 0), other=-1)
    after = tl.load(keys_ptr + p + 1, mask=p + 1 < ids, other=-1)
    i = tl.load(order_ptr + p, mask=inside, other=0)
    packed = tl.load(sources_ptr + i)
    f = packed >> _FEATURE_BIT
    mine = key != LAST
    if CLASS >= 0:
        mine = mine & (tl.load(table_ptr + 5 * features + f) == CLASS)
    place, width = _place_of(table_ptr, f, key, features, WIDTH, ALIGN)
    scale = tl.full(key.shape, 1.0, tl.float32) * grad_scale
    if SCALED:
        scale = tl.load(scales_ptr + i)
    source = tl.multiple_of(packed & _PLACE_BITS, (ALIGN,))
    return key, key != before, key != after, mine, place, width, source, scale


@triton.jit
def _read_tile(
    weights_ptr, state_a_ptr, state_b_ptr, grad_ptr, key, mine, moves, place, width, source,
    columns, RULE: tl.constexpr,
):  # fmt: skip
    """Return gradients of ids, and rows and states of those whose row moves.

    All at once, so that nothing that is read waits for anything else.
    """
    narrow = columns[None, :] < width[:, None]
    grad = tl.load(
        grad_ptr + source[:, None] + columns[None, :], mask=mine[:, None] & narrow, other=0.0
    )
    row, state_a, state_b = _read_rows(
        weights_ptr, state_a_ptr, state_b_ptr, key, moves, place, width, columns, RULE
    )
    return grad, row, state_a, state_b


@triton.jit
def _read_rows(
    weights_ptr, state_a_ptr, state_b_ptr, key, moves, place, width, columns,
    RULE: tl.constexpr,
):  # fmt: skip
    at = place[:, None] + columns[None, :]
    mask = moves[:, None] & (columns[None, :] < width[:, None])
    if RULE == GRADIENT:
        row = tl.zeros(mask.shape, weights_ptr.dtype.element_ty)
    else:
        row = tl.load(weights_ptr + at, mask=mask, other=0.0)
    state_a, state_b = moves, moves
    if RULE == ROWWISE_ADAGRAD:
        state_a = tl.load(state_a_ptr + key, mask=moves, other=0.0)
    elif (RULE == ADAGRAD) | (RULE == ADAM):
        state_a = tl.load(state_a_ptr + at, mask=mask, other=0.0)
        if RULE == ADAM:
            state_b = tl.load(state_b_ptr + at, mask=mask, other=0.0)
    return row, state_a, state_b


@triton.jit
def _move_rows(
    weights_ptr, state_a_ptr, state_b_ptr, total, row, state_a, state_b, key, moves, place, width,
    columns, lr, eps, beta1, beta2, correction, moment_scale, seed, step,
    RULE: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Move rows by a rule; ``total`` [rows, columns] is the gradient, fp32."""
    at = place[:, None] + columns[None, :]
    mask = moves[:, None] & (columns[None, :] < width[:, None])
    if RULE == GRADIENT:
        tl.store(weights_ptr + at, total, mask=mask)
    else:
        row = row.to(tl.float32)
        if RULE == ROWWISE_ADAGRAD:
            state_a += tl.div_rn(tl.sum(total * total, axis=1), width.to(tl.float32))
            tl.store(state_a_ptr + key, state_a, mask=moves)
            root = tl.sqrt_rn(tl.div_rn(state_a, tl.zeros_like(state_a) + moment_scale)) + eps
            new = row - total * tl.div_rn(tl.zeros_like(state_a) + lr, root)[:, None]
        elif RULE == ADAGRAD:
            state_a += total * total
            tl.store(state_a_ptr + at, state_a, mask=mask)
            new = row - lr * tl.div_rn(total, tl.sqrt_rn(state_a) + eps)
        elif RULE == SGD:
            new = row - lr * total
        else:
            # lr and correction carry what adam corrects the two moments by.
            state_a += (total - state_a) * (1.0 - beta1)
            state_b = state_b * beta2 + total * total * (1.0 - beta2)
            tl.store(state_a_ptr + at, state_a, mask=mask)
            tl.store(state_b_ptr + at, state_b, mask=mask)
            root = tl.sqrt_rn(tl.div_rn(state_b, tl.zeros_like(state_b) + correction)) + eps
            new = row - lr * tl.div_rn(state_a, root)
        if STOCHASTIC:
            number = key.to(tl.int64)
            words = words_of_columns(
                seed, number, number >> 32, number * 0 + step, total.shape[1]
            )  # fmt: skip
            new = round_stochastically(new, words, weights_ptr.dtype.element_ty)
        tl.store(weights_ptr + at, new, mask=mask)


@triton.jit
def _joined(a_begins, a_sum, b_begins, b_sum):
    return a_begins | b_begins, tl.where(b_begins != 0, b_sum, a_sum + b_sum)


@triton.jit(
    do_not_specialize=[
        "ids", "features", "lr", "eps", "beta1", "beta2", "correction", "moment_scale",
        "grad_scale", "seed", "step",
    ]
)  # fmt: skip
def _merge_kernel(
    weights_ptr, state_a_ptr, state_b_ptr, grad_ptr, keys_ptr, order_ptr, sources_ptr, scales_ptr,
    heads_ptr, tails_ptr, table_ptr, ids, features,
    lr, eps, beta1, beta2, correction, moment_scale, grad_scale, seed, step,
    RULE: tl.constexpr, STOCHASTIC: tl.constexpr, SCALED: tl.constexpr, LAST: tl.constexpr,
    CLASS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, T: tl.constexpr,
    TILES: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    begin = program * (T * TILES)
    t = tl.arange(0, T)
    columns = tl.arange(0, BLOCK_E)
    carry = tl.zeros((BLOCK_E,), dtype=tl.float32)
    is_left = tl.program_id(0) * 0
    # A run with this key has begun in a program before.
    entry = tl.load(keys_ptr + begin - 1, mask=begin > 0, other=-1)
    tiles = tl.minimum(TILES, tl.cdiv(ids - begin, T)).to(tl.int32)
    key, begins, ends, mine, place, width, source, scale = _sorted_tile(
        keys_ptr, order_ptr, sources_ptr, scales_ptr, table_ptr, begin + t, ids, features,
        grad_scale, SCALED, LAST, CLASS, WIDTH, ALIGN,
    )  # fmt: skip
    for tile in range(0, tiles):
        # What the next tile needs to know is on its way while this one is merged.
        p = tl.where(tile + 1 < tiles, begin + (tile + 1) * T + t, ids)
        n_key, n_begins, n_ends, n_mine, n_place, n_width, n_source, n_scale = _sorted_tile(
            keys_ptr, order_ptr, sources_ptr, scales_ptr, table_ptr, p, ids, features, grad_scale,
            SCALED, LAST, CLASS, WIDTH, ALIGN,
        )  # fmt: skip
        enters = key == entry
        moves = mine & ends & (enters == 0)
        grad, row, state_a, state_b = _read_tile(
            weights_ptr, state_a_ptr, state_b_ptr, grad_ptr, key, mine, moves, place, width, source,
            columns, RULE,
        )  # fmt: skip
        marks = tl.broadcast_to(begins.to(tl.int32)[:, None], (T, BLOCK_E))
        seen, total = tl.associative_scan((marks, grad.to(tl.float32) * scale[:, None]), 0, _joined)
        # Rows of the run that the tile before has left open.
        total += tl.where(seen == 0, carry[None, :], 0.0)
        # Random words take longer than all else, so tiles in which no row moves do without.
        wanted = tl.max(moves.to(tl.int32), axis=0) if STOCHASTIC else 1
        if wanted > 0:
            _move_rows(
                weights_ptr, state_a_ptr, state_b_ptr, total, row, state_a, state_b, key, moves,
                place, width, columns, lr, eps, beta1, beta2, correction, moment_scale, seed, step,
                RULE, STOCHASTIC,
            )  # fmt: skip
        head = mine & ends & enters
        if tl.sum(head.to(tl.int32), axis=0) > 0:
            tl.store(
                heads_ptr + (program * BLOCK_E + t * 0)[:, None] + columns[None, :],
                total,
                mask=head[:, None] & (columns >= 0)[None, :],
            )
        is_open = mine & (t == T - 1) & (ends == 0)
        carry = tl.sum(tl.where(is_open[:, None], total, 0.0), axis=0)
        # 1 where the run that is open began here, 2 where it began before.
        is_left = tl.sum(tl.where(is_open, 1 + enters.to(tl.int32), 0), axis=0)
        key, begins, ends, mine, place, width, source, scale = (
            n_key, n_begins, n_ends, n_mine, n_place, n_width, n_source, n_scale
        )  # fmt: skip
    at = program * BLOCK_E + columns
    tl.store(tails_ptr + at, carry, mask=(columns >= 0) & (is_left == 1))
    tl.store(heads_ptr + at, carry, mask=(columns >= 0) & (is_left == 2))


@triton.jit(
    do_not_specialize=[
        "ids", "features", "lr", "eps", "beta1", "beta2", "correction", "moment_scale", "seed",
        "step",
    ]
)  # fmt: skip
def _finish_kernel(
    weights_ptr, state_a_ptr, state_b_ptr, keys_ptr, order_ptr, sources_ptr, heads_ptr, tails_ptr,
    table_ptr, ids, features,
    lr, eps, beta1, beta2, correction, moment_scale, seed, step,
    RULE: tl.constexpr, STOCHASTIC: tl.constexpr, LAST: tl.constexpr, CLASS: tl.constexpr,
    WIDTH: tl.constexpr, ALIGN: tl.constexpr, SPAN: tl.constexpr, K: tl.constexpr,
    UNROLL: tl.constexpr, FAN: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a run that goes on behind the program in which it began."""
    program = tl.program_id(0).to(tl.int64)
    behind = (program + 1) * SPAN
    if behind >= ids:
        return
    key = tl.load(keys_ptr + behind - 1)
    before = tl.load(keys_ptr + program * SPAN - 1, mask=program > 0, other=-1)
    if (key != tl.load(keys_ptr + behind)) | (key == before) | (key == LAST):
        return
    f = tl.load(sources_ptr + tl.load(order_ptr + behind - 1)) >> _FEATURE_BIT
    if CLASS >= 0:  # noqa: SIM102 - a constant beside a value of the device
        if tl.load(table_ptr + 5 * features + f) != CLASS:
            return
    columns = tl.arange(0, BLOCK_E)
    total = tl.load(tails_ptr + program * BLOCK_E + columns)
    # How many programs after this one begin in the run: known first, so that no part waits for it.
    fan = tl.arange(0, FAN)
    parts = tl.program_id(0) * 0
    more = parts + FAN
    while more == FAN:
        at = (program + 1 + parts + fan) * SPAN
        goes_on = tl.load(keys_ptr + at, mask=at < ids, other=-1) == key
        more = tl.sum(goes_on.to(tl.int32), axis=0)
        parts += more
    k = tl.arange(0, K)
    for first in range(0, parts, K * UNROLL):
        for turn in tl.static_range(UNROLL):
            part = first + turn * K + k
            heads = tl.load(
                heads_ptr + ((program + 1 + part) * BLOCK_E)[:, None] + columns[None, :],
                mask=(part < parts)[:, None] & (columns >= 0)[None, :],
                other=0.0,
            )
            total += tl.sum(heads, axis=0)
    one = tl.arange(0, 1)
    key_1 = key + one.to(key.dtype)
    place, width = _place_of(table_ptr, f + one, key_1, features, WIDTH, ALIGN)
    row, state_a, state_b = _read_rows(
        weights_ptr, state_a_ptr, state_b_ptr, key_1, one == 0, place, width, columns, RULE
    )
    _move_rows(
        weights_ptr, state_a_ptr, state_b_ptr, total[None, :], row, state_a, state_b, key_1,
        one == 0, place, width, columns, lr, eps, beta1, beta2, correction, moment_scale, seed,
        step, RULE, STOCHASTIC,
    )  # fmt: skip


@triton.jit(do_not_specialize=["ids", "features"])
def _dot_kernel(
    weights_ptr, grad_ptr, keys_ptr, sources_ptr, scales_ptr, out_ptr, table_ptr, ids, features,
    SCALED: tl.constexpr, LAST: tl.constexpr, CLASS: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    mine = i < ids
    key = tl.load(keys_ptr + i, mask=mine, other=LAST)
    packed = tl.load(sources_ptr + i, mask=mine, other=0)
    f = packed >> _FEATURE_BIT
    if CLASS >= 0:
        mine = mine & (tl.load(table_ptr + 5 * features + f) == CLASS)
    inside = mine & (key != LAST)
    place, width = _place_of(table_ptr, f, key, features, WIDTH, ALIGN)
    source = tl.multiple_of(packed & _PLACE_BITS, (ALIGN,))
    columns = tl.arange(0, BLOCK_E)
    mask = inside[:, None] & (columns[None, :] < width[:, None])
    x = tl.load(weights_ptr + place[:, None] + columns[None, :], mask=mask, other=0.0)
    g = tl.load(grad_ptr + source[:, None] + columns[None, :], mask=mask, other=0.0)
    total = tl.sum(x.to(tl.float32) * g.to(tl.float32), axis=1)
    if SCALED:
        total *= tl.load(scales_ptr + i, mask=inside, other=0.0)
    tl.store(out_ptr + i, total, mask=mine)


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


def _keys_of(ids_I, bags_O, id_weights_I, places, grad_scale):
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
        _key_kernel[(triton.cdiv(ids, _KEY_BLOCK),)](
            ids_I, bags_O, weights, keys, sources, scales, places.table,
            begins_of(places, bags_O, batch), ids, batch, places.features, float(grad_scale),
            MIXED=places.mixed, WEIGHTED=id_weights_I is not None, SCALED=is_scaled, LAST=last,
            BLOCK=_KEY_BLOCK,
        )  # fmt: skip
    return keys, sources, scales, last


def launch_dot(weights_N, ids_I, bags_O, grad, places):
    """Return the product of the row of each id and of its gradient, summed over the columns."""
    ids = ids_I.shape[0]
    out = torch.empty(ids, dtype=torch.float32, device=weights_N.device)
    if ids == 0:
        return out
    keys, sources, scales, last = _keys_of(ids_I, bags_O, None, places, 1.0)
    with on_device(out):
        for of in places.classes:
            block_t = max(1, min(128, 2048 // of.columns))
            _dot_kernel[(triton.cdiv(ids, block_t),)](
                weights_N, grad, keys, sources, scales, out, places.table, ids, places.features,
                SCALED=scales.shape[0] > 0, LAST=last,
                CLASS=of.number if len(places.classes) > 1 else -1, WIDTH=of.width,
                ALIGN=places.align, T=block_t, BLOCK_E=of.columns,
            )  # fmt: skip
    return out


def launch_merge(
    weights_N, states, ids_I, bags_O, grad, id_weights_I, places, *,
    rule, lr=0.0, eps=0.0, beta1=0.0, beta2=0.0, correction=1.0, moment_scale=1.0, grad_scale=1.0,
    seed=None, step=1,
):  # fmt: skip
    """Merge gradients by row and move every row once; or write the sums, for ``"gradient"``."""
    if ids_I.shape[0] == 0:
        return
    ids = ids_I.shape[0]
    keys, sources, scales, last = _keys_of(ids_I, bags_O, id_weights_I, places, grad_scale)
    is_scaled = scales.shape[0] > 0
    state_a, state_b = (*states, weights_N, weights_N)[:2]
    stochastic = seed is not None and weights_N.element_size() == 2
    with on_device(ids_I):
        keys, order = torch.sort(keys, stable=True)
        for of in places.classes:
            number = of.number if len(places.classes) > 1 else -1
            elements = _CHANCE_ELEMENTS if stochastic else _TILE_ELEMENTS
            block_t = min(max(2, elements // of.columns), 128)
            tiles = _SPAN_TILES * _TILE_ELEMENTS // elements
            span = block_t * tiles
            programs = triton.cdiv(ids, span)
            heads, tails = (
                torch.empty((programs, of.columns), dtype=torch.float32, device=ids_I.device)
                for _ in range(2)
            )
            numbers = (
                float(lr), float(eps), float(beta1), float(beta2), float(correction),
                float(moment_scale),
            )  # fmt: skip
            constants = {
                "RULE": RULES[rule], "STOCHASTIC": stochastic, "LAST": last, "CLASS": number,
                "WIDTH": of.width, "ALIGN": places.align, "BLOCK_E": of.columns,
            }  # fmt: skip
            _merge_kernel[(programs,)](
                weights_N, state_a, state_b, grad, keys, order, sources, scales, heads, tails,
                places.table, ids, places.features, *numbers, float(grad_scale), seed or 0, step,
                SCALED=is_scaled, T=block_t, TILES=tiles, **constants,
                num_warps=max(1, block_t * of.columns // elements),
            )  # fmt: skip
            _finish_kernel[(programs,)](
                weights_N, state_a, state_b, keys, order, sources, heads, tails,
                places.table, ids, places.features, *numbers, seed or 0, step,
                SPAN=span, K=max(2, _PARTS // of.columns), UNROLL=4, FAN=_FAN, **constants,
            )  # fmt: skip

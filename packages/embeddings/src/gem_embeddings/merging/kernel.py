"""Kernels that merge the gradients of ids by row and move each row once. Private.

The ids are sorted by their rows (``gem_embeddings.merging.lines``); equal rows then lie side by
side and form a run. Stretches of equally many sorted ids are walked over, whatever runs are in
them, so a row that half the batch names is as much work as the same ids with rows of their own.
Runs that end where they began in one stretch are merged and moved at once, and so are those that
end in the stretch behind it, which leaves their ids to the one before. What a stretch has of a run
that is longer is written down, and a second kernel adds these parts up in their order. No sum
depends on which program came first.

A stretch is walked id after id: a row is one addition to the sum at hand, and where a run ends one
branch, which is not taken elsewhere. What waits for memory is asked for some ids ahead. A gradient
is read where the output row of its id has it: nothing is spread out over ids.
"""

import torch
import triton
import triton.language as tl

from gem_embeddings.merging.device import RULES, move_rows, read_rows
from gem_embeddings.merging.lines.kernel import (
    CLASS_BIT,
    FIRST_BIT,
    LAST_BIT,
    NO_CLASS,
    NO_ROW,
    PLACE,
    WIDTH_BIT,
    lines_of,
)
from gem_jagged.launching import on_device

_SPAN = 64  # ids of a stretch
_WARP_ELEMENTS = 128  # of an id, or of ids of several stretches; above it a lane has more columns
_WIDEST_WARP = 512
_AHEAD_ELEMENTS = 512  # columns of a warp that are asked for at once
_AHEAD = 4
_AHEAD_BY_CHANCE = 2  # where rounding takes the registers
_TURNS = 16  # stretches of a program that looks for runs over several
_PARTS = 4096  # columns of parts that are added at a time
_FAN = 256
_FINISH_WARPS = 4


@triton.jit
def _line(
    rows_ptr, grads_ptr, keys_ptr, scales_ptr, p, inside, grad_scale,
    SCALED: tl.constexpr, CLASS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the line of a row and of its gradient.

    The word of the row, whether this launch moves it, its width and its key; the place of the
    gradient and its scale.
    """
    word = tl.load(rows_ptr + p, mask=inside, other=NO_ROW)
    source = tl.load(grads_ptr + p, mask=inside, other=0)
    key = tl.load(keys_ptr + p, mask=inside, other=0)
    mine = ((word >> CLASS_BIT) & NO_CLASS) == CLASS
    width = tl.full(p.shape, WIDTH, tl.int64) if WIDTH > 0 else source >> WIDTH_BIT
    scale = tl.full(p.shape, 1.0, tl.float32) * grad_scale
    if SCALED:
        scale = tl.load(scales_ptr + p, mask=inside, other=0.0)
    return word, mine, width, key, source & PLACE, scale


@triton.jit
def _key(keys_ptr, p, ids):
    """Return keys of sorted ids; -1, which no id has, before the first and behind the last."""
    return tl.load(keys_ptr + p, mask=(p >= 0) & (p < ids), other=-1)


@triton.jit
def _ids_of_border(keys_ptr, border, ids, SPAN: tl.constexpr):
    """Return how many ids behind borders are left to the stretch before: those of a short run.

    Short is a run that has begun in the stretch before the border and ends in the one behind it.
    """
    key = _key(keys_ptr, border - 1, ids)
    is_short = (key != _key(keys_ptr, border - SPAN - 1, ids)) & (
        key != _key(keys_ptr, border + SPAN, ids)
    )
    j = tl.arange(0, SPAN)
    equal = _key(keys_ptr, border[:, None] + j[None, :], ids) == key[:, None]
    return tl.where(is_short & (border > 0), tl.sum(equal.to(tl.int32), axis=1), 0)


@triton.jit
def _borders(keys_ptr, begin, ids, SPAN: tl.constexpr):
    """Return the first id that a stretch walks over and the first behind it."""
    behind = tl.minimum(begin + SPAN, ids)
    return (
        begin + _ids_of_border(keys_ptr, begin, ids, SPAN),
        behind + _ids_of_border(keys_ptr, behind, ids, SPAN),
    )


@triton.jit(
    do_not_specialize=[
        "ids", "lr", "eps", "beta1", "beta2", "correction", "moment_scale", "grad_scale", "seed",
        "step",
    ]
)  # fmt: skip
def _merge_kernel(
    weights_ptr, state_a_ptr, state_b_ptr, grad_ptr, keys_ptr, rows_ptr, grads_ptr, scales_ptr,
    heads_ptr, tails_ptr, ids,
    lr, eps, beta1, beta2, correction, moment_scale, grad_scale, seed, step,
    RULE: tl.constexpr, STOCHASTIC: tl.constexpr, SCALED: tl.constexpr, CLASS: tl.constexpr,
    WIDTH: tl.constexpr, ALIGN: tl.constexpr, STRETCHES: tl.constexpr, SPAN: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    stretch = tl.program_id(0).to(tl.int64) * STRETCHES + tl.arange(0, STRETCHES)
    columns = tl.arange(0, BLOCK_E)
    total = tl.zeros((STRETCHES, BLOCK_E), dtype=tl.float32)
    begin, behind = _borders(keys_ptr, stretch * SPAN, ids, SPAN)
    # The run at hand has begun before its stretch; it goes on behind it.
    is_whole = begin == stretch * SPAN
    enters = is_whole & (_key(keys_ptr, begin - 1, ids) == _key(keys_ptr, begin, ids))
    is_open = begin < 0
    left = tl.max(behind - begin, axis=0).to(tl.int32)
    for first in range(0, left, AHEAD):
        # Nothing that is asked for here waits for anything but its line.
        words, mines, widths, keys, scales = (), (), (), (), ()
        grads, olds, states_a, states_b = (), (), (), ()
        for turn in tl.static_range(AHEAD):
            word, mine, width, key, source, scale = _line(
                rows_ptr, grads_ptr, keys_ptr, scales_ptr, begin + first + turn,
                begin + first + turn < behind, grad_scale, SCALED, CLASS, WIDTH,
            )  # fmt: skip
            source = tl.multiple_of(source, (ALIGN,))
            grad = tl.load(
                grad_ptr + source[:, None] + columns[None, :],
                mask=mine[:, None] & (columns[None, :] < width[:, None]),
                other=0.0,
            )
            ends = mine & (((word >> LAST_BIT) & 1) != 0)
            place = tl.multiple_of(word & PLACE, (ALIGN,))
            old, state_a, state_b = read_rows(
                weights_ptr, state_a_ptr, state_b_ptr, key, ends, place, width, columns, RULE
            )
            # Triton takes no stars.
            words, mines = words + (word,), mines + (mine,)  # noqa: RUF005
            widths, keys = widths + (width,), keys + (key,)  # noqa: RUF005
            scales, grads = scales + (scale,), grads + (grad,)  # noqa: RUF005
            olds, states_a = olds + (old,), states_a + (state_a,)  # noqa: RUF005
            states_b = states_b + (state_b,)  # noqa: RUF005
        for turn in tl.static_range(AHEAD):
            word, mine = words[turn], mines[turn]
            begins = ((word >> FIRST_BIT) & 1) != 0
            ends = mine & (((word >> LAST_BIT) & 1) != 0)
            part = grads[turn].to(tl.float32) * scales[turn][:, None]
            total = tl.where(begins[:, None], 0.0, total) + part
            enters = enters & (begins == 0)
            moves = ends & (enters == 0)
            if tl.max(moves.to(tl.int32), axis=0) > 0:
                place = tl.multiple_of(word & PLACE, (ALIGN,))
                move_rows(
                    weights_ptr, state_a_ptr, state_b_ptr, total, olds[turn], states_a[turn],
                    states_b[turn], keys[turn], moves, place, widths[turn], columns, lr, eps,
                    beta1, beta2, correction, moment_scale, seed, step, RULE, STOCHASTIC,
                )  # fmt: skip
            head = ends & enters
            at = (stretch * BLOCK_E)[:, None] + columns[None, :]
            if tl.max(head.to(tl.int32), axis=0) > 0:
                tl.store(heads_ptr + at, total, mask=head[:, None] & (columns >= 0)[None, :])
            is_open = tl.where(begin + first + turn < behind, mine & (ends == 0), is_open)
    at = (stretch * BLOCK_E)[:, None] + columns[None, :]
    every = (columns >= 0)[None, :]
    tl.store(tails_ptr + at, total, mask=(is_open & (enters == 0))[:, None] & every)
    tl.store(heads_ptr + at, total, mask=(is_open & enters)[:, None] & every)


@triton.jit
def _goes_on(keys_ptr, stretch, ids, SPAN: tl.constexpr):
    """Tell whether a run begins in stretches and goes on behind the stretch after each."""
    key = _key(keys_ptr, (stretch + 1) * SPAN - 1, ids)
    began = key != _key(keys_ptr, stretch * SPAN - 1, ids)
    return began & (key >= 0) & (key == _key(keys_ptr, (stretch + 2) * SPAN, ids))


@triton.jit
def _parts(
    keys_ptr, heads_ptr, tails_ptr, stretch, ids, columns,
    SPAN: tl.constexpr, K: tl.constexpr, UNROLL: tl.constexpr, FAN: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Return the sum of the run that goes on behind a stretch: its parts in their order."""
    key = _key(keys_ptr, (stretch + 1) * SPAN - 1, ids)
    # How many stretches after this one begin in the run: known first, so that no part waits for it.
    fan = tl.arange(0, FAN)
    parts = tl.program_id(0) * 0
    more = parts + FAN
    while more == FAN:
        equal = _key(keys_ptr, (stretch + 1 + parts + fan) * SPAN, ids) == key
        more = tl.sum(equal.to(tl.int32), axis=0)
        parts += more
    k = tl.arange(0, K)
    every = (columns >= 0)[None, :]
    sums = tl.zeros((K, BLOCK_E), dtype=tl.float32)
    for first in range(0, parts, K * UNROLL):
        for turn in tl.static_range(UNROLL):
            part = first + turn * K + k
            sums += tl.load(
                heads_ptr + ((stretch + 1 + part) * BLOCK_E)[:, None] + columns[None, :],
                mask=(part < parts)[:, None] & every,
                other=0.0,
            )
    return tl.load(tails_ptr + stretch * BLOCK_E + columns) + tl.sum(sums, axis=0)


@triton.jit(
    do_not_specialize=[
        "ids", "lr", "eps", "beta1", "beta2", "correction", "moment_scale", "seed", "step",
    ]
)  # fmt: skip
def _finish_kernel(
    weights_ptr, state_a_ptr, state_b_ptr, keys_ptr, rows_ptr, grads_ptr, heads_ptr, tails_ptr, ids,
    lr, eps, beta1, beta2, correction, moment_scale, seed, step,
    RULE: tl.constexpr, STOCHASTIC: tl.constexpr, CLASS: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, SPAN: tl.constexpr, TURNS: tl.constexpr, K: tl.constexpr,
    UNROLL: tl.constexpr, FAN: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add up the parts of runs that no stretch has whole, and move their rows."""
    first = tl.program_id(0).to(tl.int64) * TURNS
    # Most stretches have none, so many are looked at together.
    found = _goes_on(keys_ptr, first + tl.arange(0, TURNS), ids, SPAN)
    if tl.max(found.to(tl.int32), axis=0) == 0:
        return
    columns = tl.arange(0, BLOCK_E)
    one = tl.arange(0, 1)
    for turn in range(0, TURNS):
        stretch = first + turn
        last = (stretch + 1) * SPAN - 1 + one
        word = tl.load(rows_ptr + last, mask=last < ids, other=NO_ROW)
        mine = ((word >> CLASS_BIT) & NO_CLASS) == CLASS
        moves = mine & _goes_on(keys_ptr, stretch + one, ids, SPAN)
        if tl.max(moves.to(tl.int32), axis=0) > 0:
            total = _parts(
                keys_ptr, heads_ptr, tails_ptr, stretch, ids, columns, SPAN, K, UNROLL, FAN,
                BLOCK_E,
            )  # fmt: skip
            key = tl.load(keys_ptr + last)
            width = tl.full((1,), WIDTH, tl.int64)
            if WIDTH == 0:
                width = tl.load(grads_ptr + last) >> WIDTH_BIT
            place = tl.multiple_of(word & PLACE, (ALIGN,))
            row, state_a, state_b = read_rows(
                weights_ptr, state_a_ptr, state_b_ptr, key, moves, place, width, columns, RULE
            )
            move_rows(
                weights_ptr, state_a_ptr, state_b_ptr, total[None, :], row, state_a, state_b, key,
                moves, place, width, columns, lr, eps, beta1, beta2, correction, moment_scale, seed,
                step, RULE, STOCHASTIC,
            )  # fmt: skip


def launch_merge(
    weights_N, states, ids_I, bags_O, grad, id_weights_I, places, *,
    rule, lr=0.0, eps=0.0, beta1=0.0, beta2=0.0, correction=1.0, moment_scale=1.0, grad_scale=1.0,
    seed=None, step=1,
):  # fmt: skip
    """Merge gradients by row and move every row once; or write the sums, for ``"gradient"``."""
    ids = ids_I.shape[0]
    if ids == 0:
        return
    keys, rows, grads, scales = lines_of(ids_I, bags_O, id_weights_I, places, grad_scale)
    state_a, state_b = (*states, weights_N, weights_N)[:2]
    numbers = (
        float(lr), float(eps), float(beta1), float(beta2), float(correction), float(moment_scale),
    )  # fmt: skip
    stretches = triton.cdiv(ids, _SPAN)
    with on_device(ids_I):
        for of in places.classes:
            heads, tails = (
                torch.empty((stretches, of.columns), dtype=torch.float32, device=ids_I.device)
                for _ in range(2)
            )
            side_by_side = max(1, _WARP_ELEMENTS // of.columns)
            warps = max(1, of.columns // _WIDEST_WARP)
            of_warp = side_by_side * of.columns // warps
            by_chance = seed is not None and weights_N.itemsize == 2
            ahead = min(_AHEAD_BY_CHANCE if by_chance else _AHEAD, _AHEAD_ELEMENTS // of_warp)
            constants = {
                "RULE": RULES[rule], "STOCHASTIC": by_chance,
                "CLASS": of.number, "WIDTH": of.width, "ALIGN": places.align, "SPAN": _SPAN,
                "BLOCK_E": of.columns,
            }  # fmt: skip
            _merge_kernel[(triton.cdiv(stretches, side_by_side),)](
                weights_N, state_a, state_b, grad, keys, rows, grads, scales, heads, tails, ids,
                *numbers, float(grad_scale), seed or 0, step,
                SCALED=scales.shape[0] > 0, STRETCHES=side_by_side,
                AHEAD=max(1, ahead), num_warps=warps,
                **constants,
            )  # fmt: skip
            k = max(2, _PARTS // of.columns)
            _finish_kernel[(triton.cdiv(stretches, _TURNS),)](
                weights_N, state_a, state_b, keys, rows, grads, heads, tails, ids,
                *numbers, seed or 0, step,
                TURNS=_TURNS, K=k, UNROLL=4, FAN=_FAN,
                num_warps=max(_FINISH_WARPS, k * of.columns // 1024), **constants,
            )  # fmt: skip

"""Device functions: where a row stands, reading it with its state, and moving it by a rule."""

import triton
import triton.language as tl

from gem_opkit.device import round_stochastically, words_of_columns

GRADIENT: tl.constexpr = tl.constexpr(0)
ROWWISE_ADAGRAD: tl.constexpr = tl.constexpr(1)
ADAGRAD: tl.constexpr = tl.constexpr(2)
SGD: tl.constexpr = tl.constexpr(3)
ADAM: tl.constexpr = tl.constexpr(4)
RULES = {"gradient": 0, "rowwise_adagrad": 1, "adagrad": 2, "sgd": 3, "adam": 4}


@triton.jit
def place_of(table_ptr, f, key, features, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
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
def read_rows(
    weights_ptr, state_a_ptr, state_b_ptr, key, moves, place, width, columns,
    RULE: tl.constexpr,
):  # fmt: skip
    """Return rows and states as they are stored; zeros where ``moves`` is not."""
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
def move_rows(
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

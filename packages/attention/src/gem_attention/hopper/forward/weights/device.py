"""From scores to the weights P of the values: softmax with its running state, or an activation.

The state of a tile of queries is (peak, total) of each row: the largest score so far, in units of
log2 e, and the sum of the weights. An activation has none; its state stays as it began.

With FOLD an activation's weights leave out a common factor, which their sum with the values gets at
the end: one instruction a score less. Not in fp16, where such weights could pass the largest
number, and not under a window, where the assembler made products wait for relu without its factor.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_attention.hopper.activations.device import value, weight, weight_unit
from gem_attention.hopper.device import LOG2_E


@gluon.jit
def masked(
    x_tk,
    key,
    limits,
    KEYS: gl.constexpr,
    ROWS: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):
    """Set the scores of keys behind the end or outside the window to what weighs nothing.

    Keys behind the end and their values were read as zeros: f(0) · 0 = 0 needs no mask.
    """
    row, q_length, k_length, left, right = limits
    HIDDEN: gl.constexpr = float("-inf") if ACTIVATION == "softmax" else 0.0
    k = key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, S_LAYOUT))
    if ACTIVATION == "softmax":
        x_tk = gl.where((k < k_length)[None, :], x_tk, HIDDEN)
    if LEFT or RIGHT:
        place = row + k_length - q_length + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        if RIGHT:
            x_tk = gl.where(k[None, :] <= (place + right)[:, None], x_tk, HIDDEN)
        if LEFT:
            x_tk = gl.where(k[None, :] >= (place - left)[:, None], x_tk, HIDDEN)
    return x_tk


@triton.constexpr_function
def folds(dtype, left, right):
    """Whether weights leave out their common factor."""
    return str(dtype) == "bf16" and not left and not right


@gluon.jit
def _activated(x_tk, scale, ACTIVATION: gl.constexpr, FOLD: gl.constexpr):
    if FOLD:
        return weight(x_tk, scale, ACTIVATION)
    return value(x_tk, scale, 0, ACTIVATION)


@gluon.jit
def scaled_sum(acc_tv, scale, ACTIVATION: gl.constexpr, FOLD: gl.constexpr):
    """Return the sum of activations times values with the factor that the weights left out."""
    if FOLD:
        acc_tv = acc_tv * weight_unit(scale, ACTIVATION)
    return acc_tv


@gluon.jit
def first_weights(x_tk, scale, WINDOW: gl.constexpr, ACTIVATION: gl.constexpr, FOLD: gl.constexpr):
    """Return the weights of the first tile of keys, and the state after it."""
    if ACTIVATION == "softmax":
        factor = scale * LOG2_E
        peak = gl.max(x_tk, 1) * factor
        base = peak
        if WINDOW:
            # A row that has seen no key yet has a peak of -inf.
            base = gl.where(peak == float("-inf"), 0.0, peak)
        p_tk = gl.exp2(x_tk * factor - base[:, None])
        total = gl.sum(p_tk, 1)
    else:
        p_tk = _activated(x_tk, scale, ACTIVATION, FOLD)
        peak = gl.zeros([x_tk.shape[0]], gl.float32, gl.SliceLayout(1, x_tk.type.layout))
        total = peak
    return p_tk, peak, total


@gluon.jit
def next_weights(
    x_tk, peak, total, scale, EDGE: gl.constexpr, ACTIVATION: gl.constexpr, FOLD: gl.constexpr
):
    """Return the weights of a further tile, the state after it, and what P·V so far shrinks by."""
    shrink = peak
    if ACTIVATION == "softmax":
        factor = scale * LOG2_E
        higher = gl.maximum(peak, gl.max(x_tk, 1) * factor)
        base = higher
        if EDGE:
            base = gl.where(higher == float("-inf"), 0.0, higher)
        p_tk = gl.exp2(x_tk * factor - base[:, None])
        shrink = gl.exp2(peak - base)
        total = total * shrink + gl.sum(p_tk, 1)
        peak = higher
    else:
        p_tk = _activated(x_tk, scale, ACTIVATION, FOLD)
    return p_tk, peak, total, shrink

"""Softmax weights, or activations with their slopes, of a tile of scores whose keys come first."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_attention.hopper.activations.device import value_and_slope


@gluon.jit
def _seen(
    key,
    row,
    limits,
    KEYS: gl.constexpr,
    ROWS: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):
    """Return which pairs are neither behind the end of the keys nor outside the window."""
    q_length, k_length, left, right = limits
    k = key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))
    if LEFT or RIGHT:
        place = row + k_length - q_length + gl.arange(0, ROWS, layout=gl.SliceLayout(0, S_LAYOUT))
        if RIGHT:
            # A key behind the end stands right of every window.
            k = gl.where(k < k_length, k, 2**30)
        if LEFT and RIGHT:
            # One comparison for both sides: what is left of 0 is large without its sign.
            off = (place + right)[None, :] - k[:, None]
            seen = off.to(gl.uint32, bitcast=True) <= (left + right).to(gl.uint32)
        elif RIGHT:
            seen = k[:, None] <= (place + right)[None, :]
        else:
            seen = (k[:, None] >= (place - left)[None, :]) & (k < k_length)[:, None]
    else:
        seen = (k < k_length)[:, None]
    return seen


@gluon.jit
def on_edge(
    key,
    row,
    limits,
    KEYS: gl.constexpr,
    ROWS: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    """Whether some pair of a tile is behind the end or outside the window."""
    q_length, k_length, left, right = limits
    edge = key + KEYS > k_length
    if RIGHT:
        edge = edge | (key + KEYS - 1 > row + k_length - q_length + right)
    if LEFT:
        edge = edge | (key < row + ROWS - 1 + k_length - q_length - left)
    return edge


@gluon.jit
def softmax_weights(
    x_kt,
    key,
    row,
    limits,
    lse_tile,
    factor,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):
    """Turn scores into softmax weights; mask only tiles on an edge."""
    KEYS: gl.constexpr = x_kt.shape[0]
    ROWS: gl.constexpr = x_kt.shape[1]
    if on_edge(key, row, limits, KEYS, ROWS, LEFT, RIGHT):
        seen = _seen(key, row, limits, KEYS, ROWS, LEFT, RIGHT, S_LAYOUT)
        x_kt = gl.where(seen, x_kt, float("-inf"))
    return gl.exp2(x_kt * factor - lse_tile.load(gl.SliceLayout(0, S_LAYOUT))[None, :])


@gluon.jit
def activation_weights(
    x_kt,
    key,
    row,
    limits,
    head,
    scale,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    ACTIVATIONS: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):
    """Return f and f' of the scaled scores, both 0 outside the window.

    Behind the end of keys and queries K, V, Q and dO were read as zeros, and what meets them is
    finite: dP is 0 there, f(0) is multiplied by zeros of dO, and no mask is needed.
    """
    KEYS: gl.constexpr = x_kt.shape[0]
    ROWS: gl.constexpr = x_kt.shape[1]
    p_kt, slope_kt = value_and_slope(x_kt, scale, head, ACTIVATIONS)
    if LEFT or RIGHT:  # noqa: SIM102 - known when compiled; the other when it runs
        if on_edge(key, row, limits, KEYS, ROWS, LEFT, RIGHT):
            seen = _seen(key, row, limits, KEYS, ROWS, LEFT, RIGHT, S_LAYOUT)
            p_kt = gl.where(seen, p_kt, 0.0)
            slope_kt = gl.where(seen, slope_kt, 0.0)
    return p_kt, slope_kt

"""What the kernels of block attention share: tiles by columns, rotations, softmax of a block."""

import triton
import triton.language as tl

from gem_attention.portable.device import exponential
from gem_attention.portable.ragged.device import load_ragged, store_ragged


@triton.jit
def _places(stride, rows, c, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Return where a chunk of columns lies from the first row of a block, and which of it is."""
    r = tl.arange(0, BLOCK_T)
    w = tl.arange(0, CHUNK)
    used = (r < rows)[:, None]
    if WIDTH % CHUNK:
        used = used & (c * CHUNK + w < WIDTH)[None, :]
    # Offsets in int32: half the registers of pointers.
    return r[:, None] * stride + (c * CHUNK + w)[None, :], used


@triton.jit
def load_columns(
    x,
    stride,
    end,
    seen,
    column,
    c,
    RAGGED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Load columns [c·CHUNK, (c + 1)·CHUNK) of a block; rows from ``seen`` on are 0.

    Where RAGGED, ``x`` is a ragged descriptor, the block's seen rows end before token ``end`` and
    its head begins at ``column``; else ``x`` points at the first row of block and head.
    """
    if RAGGED:
        tile = load_ragged(x, end, seen, 0, column + c * CHUNK)
    else:
        at, used = _places(stride, seen, c, BLOCK_T, WIDTH, CHUNK)
        tile = tl.load(x + at, mask=used, other=0.0)
    return tile


@triton.jit
def store_columns(
    x,
    stride,
    end,
    rows,
    column,
    c,
    values,
    RAGGED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store columns [c·CHUNK, (c + 1)·CHUNK) of a block that ends before ``end``."""
    if RAGGED:
        store_ragged(x, end, rows, 0, column + c * CHUNK, values)
    else:
        at, used = _places(stride, rows, c, BLOCK_T, WIDTH, CHUNK)
        tl.store(x + at, values.to(x.dtype.element_ty), mask=used)


@triton.jit
def sine_and_cosine(angle, FAST: tl.constexpr):
    """Return both, of angles up to some thousand; FAST takes them from the special-function unit.

    A step that is added and taken away rounds to a whole number, and a period in parts, of which
    the first have few bits, keeps the rest exact. The polynomials are those of the Taylor series on
    an eighth of a turn to each side; of angles up to 90 both are right to 10⁻⁷.
    """
    if FAST:
        turns = (angle * 0.15915494309189535 + 12582912.0) - 12582912.0
        rest = angle - turns * 6.28125
        rest = rest - turns * 0.0019353071795864769
        sine = tl.inline_asm_elementwise(
            "sin.approx.f32 $0, $1;", "=f,f", [rest], dtype=tl.float32, is_pure=True, pack=1
        )
        cosine = tl.inline_asm_elementwise(
            "cos.approx.f32 $0, $1;", "=f,f", [rest], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        quarters = (angle * 0.6366197723675814 + 12582912.0) - 12582912.0
        rest = angle - quarters * 1.5703125
        rest = rest - quarters * 0.0004837512969970703
        rest = rest - quarters * 7.54978995489188e-08
        square = rest * rest
        s = -1.0 / 5040.0 + square * (1.0 / 362880.0)
        s = rest + rest * square * (-1.0 / 6.0 + square * (1.0 / 120.0 + square * s))
        c = -1.0 / 720.0 + square * (1.0 / 40320.0 - square * (1.0 / 3628800.0))
        c = 1.0 + square * (-0.5 + square * (1.0 / 24.0 + square * c))
        quarter = quarters.to(tl.int32) & 3
        swapped = (quarter & 1) == 1
        sine = tl.where(swapped, c, s)
        sine = tl.where(quarter >= 2, -sine, sine)
        cosine = tl.where(swapped, s, c)
        cosine = tl.where((quarter == 1) | (quarter == 2), -cosine, cosine)
    return sine, cosine


@triton.jit
def rotated(
    x_tk,
    gap_t,
    turns_ptr,
    c,
    BACK: tl.constexpr,
    HAS_GAP: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Turn pairs of columns by place in the block and by log gap, in fp32; BACK turns them back."""
    HALF: tl.constexpr = CHUNK // 2
    pair = c * HALF + tl.arange(0, HALF)
    used = pair < WIDTH // 2
    place = tl.arange(0, BLOCK_T).to(tl.float32)
    angle = place[:, None] * tl.load(turns_ptr + pair, mask=used, other=0.0)[None, :]
    if HAS_GAP:
        by_gap = tl.load(turns_ptr + WIDTH // 2 + pair, mask=used, other=0.0)
        angle += gap_t[:, None] * by_gap[None, :]
    sine, cosine = sine_and_cosine(angle, FAST)
    if BACK:
        sine = -sine
    even, odd = tl.split(tl.reshape(x_tk.to(tl.float32), (BLOCK_T, HALF, 2)))
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    return tl.reshape(turned, (BLOCK_T, CHUNK))


@triton.jit
def load_turned(
    x,
    stride,
    end,
    seen,
    column,
    gap_t,
    turns_ptr,
    c,
    ROTARY: tl.constexpr,
    HAS_GAP: tl.constexpr,
    FAST: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Load columns as ``load_columns`` and turn them where ROTARY; rounded like their tensor."""
    x_tk = load_columns(x, stride, end, seen, column, c, RAGGED, BLOCK_T, WIDTH, CHUNK)
    if ROTARY:
        turned = rotated(x_tk, gap_t, turns_ptr, c, False, HAS_GAP, FAST, BLOCK_T, WIDTH, CHUNK)
        x_tk = turned.to(x_tk.dtype)
    return x_tk


@triton.jit
def store_turned_back(
    x,
    stride,
    end,
    rows,
    column,
    c,
    values,
    gap_t,
    turns_ptr,
    ROTARY: tl.constexpr,
    HAS_GAP: tl.constexpr,
    FAST: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store columns as ``store_columns``, turned back in fp32 before they are rounded."""
    if ROTARY:
        values = rotated(values, gap_t, turns_ptr, c, True, HAS_GAP, FAST, BLOCK_T, WIDTH, CHUNK)
    store_columns(x, stride, end, rows, column, c, values, RAGGED, BLOCK_T, WIDTH, CHUNK)


@triton.jit
def weights(score_ts, factor, seen, NATURAL: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return exp of the scores less the largest of their row, and the sum of each row.

    Keys from ``seen`` on weigh 0. Where there is none the sum is 1, so that 0 divided by it is 0.
    """
    visible = (tl.arange(0, BLOCK_T) < seen)[None, :]
    score_ts = tl.where(visible, score_ts * factor, float("-inf"))
    largest_t = tl.max(score_ts, 1)
    weight_ts = tl.where(visible, exponential(score_ts - largest_t[:, None], NATURAL), 0.0)
    total_t = tl.sum(weight_ts, 1)
    return weight_ts, tl.where(seen > 0, total_t, 1.0)


@triton.jit
def probabilities_and_slopes(
    score_ts, grad_p_ts, factor, seen, NATURAL: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Return P and P ∘ (dP − rowsum(P ∘ dP)), both fp32."""
    p_ts, total_t = weights(score_ts, factor, seen, NATURAL, BLOCK_T)
    p_ts = p_ts / total_t[:, None]
    delta_t = tl.sum(p_ts * grad_p_ts, 1)
    return p_ts, p_ts * (grad_p_ts - delta_t[:, None])

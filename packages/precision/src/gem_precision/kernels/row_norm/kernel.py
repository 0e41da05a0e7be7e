"""Triton kernels of ``row_norm``: a tile of whole rows, read once and written once."""

import contextlib

import torch
import triton
import triton.language as tl

from gem_opkit.device import words_of_columns
from gem_precision.kernels.row_norm.reference import dropped_words, dtype_of, wide_dtype

_TILE_ELEMENTS = 1024  # 16 bytes of two rows for every lane, and no register short
_WARP_ELEMENTS = 512
# Of the backward of swish: rows that one warp holds need no word with another.
_SWISH_TILE_ELEMENTS = 512
_SWISH_WARP_ELEMENTS = 1024
# Rows that a program with a gain asks for ahead, where they are small enough to lie in shared
# memory, of which 8 programs take turns.
_AHEAD = 3
_AHEAD_BYTES = 65_536
# Programs that share out all rows where columns are summed over them; not of the device, so that
# sums have the same bits on every one.
_PROGRAMS = 1056


@triton.jit
def _sigmoid(x):
    """Return 1 / (1 + e^-x), in seven instructions an element less than by exp and a division."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _thinned(x, seed, r, DROP: tl.constexpr, KEPT_SCALE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Set to 0 where the word of row and column is below DROP, and scale what is left."""
    words = words_of_columns(seed, r, r >> 32, r * 0, BLOCK_D)
    return tl.where(words >= DROP, x * KEPT_SCALE, 0.0)


@triton.jit
def _sums(x, y):
    """Return the sums of the rows of two tiles, which warps exchange together."""
    return tl.split(tl.sum(tl.join(x, y), axis=1))


@triton.jit
def _rows(
    x_ptr, before_ptr, r, columns, mask, inner, x_outer, x_inner, before_outer, before_inner,
    BEFORE: tl.constexpr, STRIDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return x + before."""
    at = _at(r, inner, x_outer, x_inner, STRIDED)
    a = tl.load(x_ptr + at[:, None] + columns[None, :], mask=mask, other=0.0).to(WIDE)
    if BEFORE:
        at = _at(r, inner, before_outer, before_inner, STRIDED)
        a += tl.load(before_ptr + at[:, None] + columns[None, :], mask=mask, other=0.0).to(WIDE)
    return a


@triton.jit
def _at(r, inner, outer_stride, inner_stride, STRIDED: tl.constexpr):
    """Return the element at which rows begin."""
    if STRIDED:
        return (r // inner) * outer_stride + (r % inner) * inner_stride
    return r * outer_stride


@triton.jit(do_not_specialize=["rows", "seed"])
def _forward_kernel(
    x_ptr, before_ptr, after_ptr, gain_ptr, y_ptr, rows, width, inner,
    x_outer, x_inner, before_outer, before_inner, after_outer, after_inner, eps, seed,
    CENTRED: tl.constexpr, SWISH: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    GAIN: tl.constexpr, STRIDED: tl.constexpr, DOUBLE: tl.constexpr, R: tl.constexpr,
    BLOCK_D: tl.constexpr, DROP: tl.constexpr, KEPT_SCALE: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.arange(0, BLOCK_D)
    mask = (r < rows)[:, None] & (columns < width)[None, :]
    a = _rows(
        x_ptr, before_ptr, r, columns, mask, inner, x_outer, x_inner, before_outer, before_inner,
        BEFORE, STRIDED, WIDE,
    )  # fmt: skip
    n = a
    if CENTRED:
        n = tl.where(mask, a - (tl.sum(a, axis=1) / width)[:, None], 0.0)
    n *= tl.rsqrt(tl.sum(n * n, axis=1) / width + eps)[:, None]
    if GAIN:
        n *= tl.load(gain_ptr + columns, mask=columns < width, other=0.0).to(WIDE)[None, :]
    if SWISH:
        n = a * _sigmoid(n)
    if DROP:
        n = _thinned(n, seed, r, DROP, KEPT_SCALE, BLOCK_D)
    if AFTER:
        at = _at(r, inner, after_outer, after_inner, STRIDED)
        n += tl.load(after_ptr + at[:, None] + columns[None, :], mask=mask, other=0.0).to(WIDE)
    tl.store(y_ptr + (r * width)[:, None] + columns[None, :], n, mask=mask)


@triton.jit(do_not_specialize=["rows", "tiles", "seed"])
def _backward_kernel(
    grad_ptr, x_ptr, before_ptr, gain_ptr, added_ptr, grad_a_ptr, parts_ptr, rows, tiles, width,
    inner, grad_outer, grad_inner, x_outer, x_inner, before_outer, before_inner, added_outer,
    added_inner, eps, seed,
    CENTRED: tl.constexpr, SWISH: tl.constexpr, BEFORE: tl.constexpr, GAIN: tl.constexpr,
    ADDED: tl.constexpr, STRIDED: tl.constexpr, DOUBLE: tl.constexpr, R: tl.constexpr,
    BLOCK_D: tl.constexpr, DROP: tl.constexpr, KEPT_SCALE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    columns = tl.arange(0, BLOCK_D)
    if GAIN:
        gain = tl.load(gain_ptr + columns, mask=columns < width, other=0.0).to(WIDE)[None, :]
        part = tl.zeros((R, BLOCK_D), dtype=WIDE)
    of_tile = tl.full((R,), R, tl.int64)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=AHEAD):
        r = tile * of_tile + tl.arange(0, R)
        mask = (r < rows)[:, None] & (columns < width)[None, :]
        at = _at(r, inner, grad_outer, grad_inner, STRIDED)
        u = tl.load(grad_ptr + at[:, None] + columns[None, :], mask=mask, other=0.0).to(WIDE)
        if DROP:
            u = _thinned(u, seed, r, DROP, KEPT_SCALE, BLOCK_D)
        a = _rows(
            x_ptr, before_ptr, r, columns, mask, inner, x_outer, x_inner, before_outer,
            before_inner, BEFORE, STRIDED, WIDE,
        )  # fmt: skip
        if SWISH:
            n = a
            if CENTRED:
                n = tl.where(mask, a - (tl.sum(a, axis=1) / width)[:, None], 0.0)
            rstd = tl.rsqrt(tl.sum(n * n, axis=1) / width + eps)
            n *= rstd[:, None]
            gate = _sigmoid(n * gain if GAIN else n)
            direct = u * gate
            u = direct * a * (1.0 - gate)
            w = u * gain if GAIN else u
            if CENTRED:
                along, sum_w = _sums(w * n, w)
            else:
                along = tl.sum(w * n, axis=1)
        else:
            # What warps tell each other of a row is what takes long: as few times as can be.
            w = u * gain if GAIN else u
            n = a
            if CENTRED:
                sum_a, sum_w = _sums(a, w)
                n = tl.where(mask, a - (sum_a / width)[:, None], 0.0)
            square, along = _sums(n * n, w * n)
            rstd = tl.rsqrt(square / width + eps)
            n *= rstd[:, None]
            along *= rstd
        if GAIN:
            part += u * n
        new = w - n * (along / width)[:, None]
        if CENTRED:
            new -= (sum_w / width)[:, None]
        new *= rstd[:, None]
        if SWISH:
            new += direct
        if ADDED:
            at = _at(r, inner, added_outer, added_inner, STRIDED)
            new += tl.load(added_ptr + at[:, None] + columns[None, :], mask=mask, other=0.0).to(
                WIDE
            )
        tl.store(grad_a_ptr + (r * width)[:, None] + columns[None, :], new, mask=mask)
    if GAIN:
        at = tl.program_id(0).to(tl.int64) * width + columns
        tl.store(parts_ptr + at, tl.sum(part, axis=0), mask=columns < width)


def _rows_of(*tensors):
    """Return tensors as (outer, inner, D), each row whole, and how many rows are inner."""
    x = tensors[0]
    if all(t is None or t.is_contiguous() for t in tensors):
        shape = (-1, 1, x.shape[-1])
    else:
        shape = (-1, x.shape[-2] if x.ndim > 1 else 1, x.shape[-1])

    def as_rows(t):
        if t is None:
            return None
        if t.stride(-1) != 1:
            t = t.contiguous()
        # A view where there is one.
        return t.reshape(shape)

    return [as_rows(t) for t in tensors], shape[1]


def block_of(width):
    """Return the columns of a tile: a power of two, and four at least, which share random words."""
    return max(4, triton.next_power_of_2(width))


def tile_of(width, *, swish_backward=False):
    """Return the rows of a program and its warps.

    Args:
        width: elements of a row.
        swish_backward: of the backward of swish without a gain.

    Returns:
        so many rows as make up a thousand elements, or half of it, at least one, and warps.
    """
    least, of_warp = _TILE_ELEMENTS, _WARP_ELEMENTS
    if swish_backward:
        least, of_warp = _SWISH_TILE_ELEMENTS, _SWISH_WARP_ELEMENTS
    block = block_of(width)
    tile = max(block, least)
    return tile // block, max(1, min(16, tile // of_warp))


def _constants(x, *, centred, swish, before, gain_D, dropout, back=False):
    rows, warps = tile_of(x.shape[-1], swish_backward=back and swish and gain_D is None)
    is_double = dtype_of(x, before, gain_D) == torch.float64
    return {
        "CENTRED": centred, "SWISH": swish, "BEFORE": before is not None,
        "GAIN": gain_D is not None, "DOUBLE": is_double, "R": rows,
        "BLOCK_D": block_of(x.shape[-1]), "num_warps": warps,
        "DROP": dropped_words(dropout), "KEPT_SCALE": 1.0 / (1.0 - dropout),
    }  # fmt: skip


def _strides(t, like):
    """Return the strides of the rows; of one that is not read where there is no tensor."""
    t = like if t is None else t
    return t.stride(0), t.stride(1)


def launch_forward(
    x, before, after, gain_D, *, centred, swish, eps, out_dtype, dropout=0.0, seed=0
):
    """Normalise the last dim."""
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if x.numel() == 0:
        return y
    constants = _constants(
        x, centred=centred, swish=swish, before=before, gain_D=gain_D, dropout=dropout
    )
    (x, before, after), inner = _rows_of(x, before, after)
    rows, width = x.shape[0] * inner, x.shape[-1]
    with _on_device(x):
        _forward_kernel[(triton.cdiv(rows, constants["R"]),)](
            x, _or(before, x), _or(after, x), _or(gain_D, x), y, rows, width, inner,
            *_strides(x, x), *_strides(before, x), *_strides(after, x), eps, seed,
            AFTER=after is not None, STRIDED=inner > 1, **constants,
        )  # fmt: skip
    return y


def launch_backward(
    grad, x, before, gain_D, added=None, *, centred, swish, eps, dropout=0.0, seed=0
):
    """Return the gradient of the rows, with ``added``, and that of the gain."""
    grad_a = torch.empty(x.shape, dtype=dtype_of(x, before), device=x.device)
    constants = _constants(
        x, centred=centred, swish=swish, before=before, gain_D=gain_D, dropout=dropout, back=True
    )
    read = [t for t in (grad, x, before, added) if t is not None]
    held = _AHEAD * constants["R"] * constants["BLOCK_D"] * sum(t.element_size() for t in read)
    ahead = _AHEAD if gain_D is not None and held <= _AHEAD_BYTES else 1
    width = x.shape[-1]
    if x.numel() == 0:
        return grad_a, _sum_of_parts(x.new_zeros((1, width)), gain_D)
    (grad, x, before, added), inner = _rows_of(grad, x, before, added)
    rows = x.shape[0] * inner
    tiles = triton.cdiv(rows, constants["R"])
    programs = tiles if gain_D is None else min(tiles, _PROGRAMS)
    parts = torch.empty(
        (programs if gain_D is not None else 0, width),
        dtype=wide_dtype(dtype_of(x, before, gain_D)),
        device=x.device,
    )
    with _on_device(x):
        _backward_kernel[(programs,)](
            grad, x, _or(before, x), _or(gain_D, x), _or(added, x), grad_a, parts, rows, tiles,
            width, inner, *_strides(grad, x), *_strides(x, x), *_strides(before, x),
            *_strides(added, x), eps, seed, ADDED=added is not None, STRIDED=inner > 1,
            AHEAD=ahead, **constants,
        )  # fmt: skip
    return grad_a, _sum_of_parts(parts, gain_D)


def _sum_of_parts(parts, gain_D):
    if gain_D is None:
        return parts.new_empty(0)
    return parts.sum(dim=0).to(gain_D.dtype)


def _or(tensor, other):
    return other if tensor is None else tensor


def _on_device(tensor):
    """Make the tensor's device the current one: Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()

"""Triton kernels of ``row_norm``: a tile of whole rows, read once and written once."""

import contextlib

import torch
import triton
import triton.language as tl

from gem_precision.kernels.row_norm.reference import dtype_of, wide_dtype

_TILE_ELEMENTS = 1024  # of two warps: 16 bytes of two rows for every lane, and no register short
_WARP_ELEMENTS = 512
# Programs that share out all rows where columns are summed over them; not of the device, so that
# sums have the same bits on every one.
_PROGRAMS = 1056


@triton.jit
def _normalised(
    x_ptr, before_ptr, r, columns, mask, width, inner, x_outer, x_inner, before_outer, before_inner,
    eps,
    CENTRED: tl.constexpr, BEFORE: tl.constexpr, STRIDED: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """Return the rows, the normalised rows, and what they were multiplied by."""
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    at = _at(r, inner, x_outer, x_inner, STRIDED)
    a = tl.load(x_ptr + at[:, None] + columns[None, :], mask=mask, other=0.0).to(WIDE)
    if BEFORE:
        at = _at(r, inner, before_outer, before_inner, STRIDED)
        a += tl.load(before_ptr + at[:, None] + columns[None, :], mask=mask, other=0.0).to(WIDE)
    around = a
    if CENTRED:
        around = tl.where(mask, a - (tl.sum(a, axis=1) / width)[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(around * around, axis=1) / width + eps)
    return a, around * rstd[:, None], rstd


@triton.jit
def _at(r, inner, outer_stride, inner_stride, STRIDED: tl.constexpr):
    """Return the element at which rows begin."""
    if STRIDED:
        return (r // inner) * outer_stride + (r % inner) * inner_stride
    return r * outer_stride


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, before_ptr, after_ptr, gain_ptr, y_ptr, rows, width, inner,
    x_outer, x_inner, before_outer, before_inner, after_outer, after_inner, eps,
    CENTRED: tl.constexpr, SWISH: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    GAIN: tl.constexpr, STRIDED: tl.constexpr, DOUBLE: tl.constexpr, R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.arange(0, BLOCK_D)
    mask = (r < rows)[:, None] & (columns < width)[None, :]
    a, n, _ = _normalised(
        x_ptr, before_ptr, r, columns, mask, width, inner, x_outer, x_inner, before_outer,
        before_inner, eps, CENTRED, BEFORE, STRIDED, DOUBLE,
    )  # fmt: skip
    if GAIN:
        n *= tl.load(gain_ptr + columns, mask=columns < width, other=0.0).to(WIDE)[None, :]
    if SWISH:
        n = a / (1.0 + tl.exp(-n))
    if AFTER:
        at = _at(r, inner, after_outer, after_inner, STRIDED)
        n += tl.load(after_ptr + at[:, None] + columns[None, :], mask=mask, other=0.0).to(WIDE)
    tl.store(y_ptr + (r * width)[:, None] + columns[None, :], n, mask=mask)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _backward_kernel(
    grad_ptr, x_ptr, before_ptr, gain_ptr, grad_a_ptr, parts_ptr, rows, tiles, width, inner,
    grad_outer, grad_inner, x_outer, x_inner, before_outer, before_inner, eps,
    CENTRED: tl.constexpr, SWISH: tl.constexpr, BEFORE: tl.constexpr, GAIN: tl.constexpr,
    STRIDED: tl.constexpr, DOUBLE: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    columns = tl.arange(0, BLOCK_D)
    if GAIN:
        gain = tl.load(gain_ptr + columns, mask=columns < width, other=0.0).to(WIDE)[None, :]
        part = tl.zeros((R, BLOCK_D), dtype=WIDE)
    of_tile = tl.full((R,), R, tl.int64)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        r = tile * of_tile + tl.arange(0, R)
        mask = (r < rows)[:, None] & (columns < width)[None, :]
        at = _at(r, inner, grad_outer, grad_inner, STRIDED)
        u = tl.load(grad_ptr + at[:, None] + columns[None, :], mask=mask, other=0.0).to(WIDE)
        a, n, rstd = _normalised(
            x_ptr, before_ptr, r, columns, mask, width, inner, x_outer, x_inner, before_outer,
            before_inner, eps, CENTRED, BEFORE, STRIDED, DOUBLE,
        )  # fmt: skip
        direct = u
        if SWISH:
            gate = 1.0 / (1.0 + tl.exp(-(n * gain if GAIN else n)))
            direct = u * gate
            u = direct * a * (1.0 - gate)
        if GAIN:
            part += u * n
            u *= gain
        new = u - n * (tl.sum(u * n, axis=1) / width)[:, None]
        if CENTRED:
            new -= (tl.sum(u, axis=1) / width)[:, None]
        new *= rstd[:, None]
        if SWISH:
            new += direct
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


def _constants(x, *, centred, swish, before, gain_D):
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    tile = max(block, _TILE_ELEMENTS)
    is_double = dtype_of(x, before, gain_D) == torch.float64
    return {
        "CENTRED": centred, "SWISH": swish, "BEFORE": before is not None,
        "GAIN": gain_D is not None, "DOUBLE": is_double, "R": tile // block, "BLOCK_D": block,
        "num_warps": min(16, tile // _WARP_ELEMENTS),
    }  # fmt: skip


def _strides(t, like):
    """Return the strides of the rows; of one that is not read where there is no tensor."""
    t = like if t is None else t
    return t.stride(0), t.stride(1)


def launch_forward(x, before, after, gain_D, *, centred, swish, eps, out_dtype):
    """Normalise the last dim."""
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if x.numel() == 0:
        return y
    constants = _constants(x, centred=centred, swish=swish, before=before, gain_D=gain_D)
    (x, before, after), inner = _rows_of(x, before, after)
    rows, width = x.shape[0] * inner, x.shape[-1]
    with _on_device(x):
        _forward_kernel[(triton.cdiv(rows, constants["R"]),)](
            x, _or(before, x), _or(after, x), _or(gain_D, x), y, rows, width, inner,
            *_strides(x, x), *_strides(before, x), *_strides(after, x), eps,
            AFTER=after is not None, STRIDED=inner > 1, **constants,
        )  # fmt: skip
    return y


def launch_backward(grad, x, before, gain_D, *, centred, swish, eps):
    """Return the gradient of the rows and that of the gain."""
    grad_a = torch.empty(x.shape, dtype=dtype_of(x, before), device=x.device)
    constants = _constants(x, centred=centred, swish=swish, before=before, gain_D=gain_D)
    width = x.shape[-1]
    if x.numel() == 0:
        return grad_a, _sum_of_parts(x.new_zeros((1, width)), gain_D)
    (grad, x, before), inner = _rows_of(grad, x, before)
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
            grad, x, _or(before, x), _or(gain_D, x), grad_a, parts, rows, tiles, width, inner,
            *_strides(grad, x), *_strides(x, x), *_strides(before, x), eps,
            STRIDED=inner > 1, **constants,
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

"""Triton kernels of ``grouped_linear``: tiles of the rows of one expert each.

Where torch has a grouped product for the case it is taken, and what it leaves unwritten is cleared.

The host knows how many rows there are, and not how they are shared out. It launches as many
programs as there can be tiles; each reads the offsets and finds the expert and rows of its tile.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from gem_precision.device import on_device

_TILE = 128
_INNER = 64


@triton.jit
def _added(acc, a, b, known_later, PRECISION: tl.constexpr):
    """Return acc + a b; in fp32 the product is summed by itself first.

    On the ordinary units one chain of additions would run through all rows and round every term to
    the size of the whole. The factor of 1 keeps the compiler from joining the two.
    """
    if PRECISION == "ieee":
        return acc + tl.dot(a, b, input_precision=PRECISION) * (
            1.0 + 0.0 * known_later.to(tl.float32)
        )
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["rows"])
def _grouped_kernel(
    x_ptr, weight_ptr, offsets_ptr, y_ptr, rows, inner, columns, experts, tiles_f, stride_t,
    stride_x, stride_f, stride_d, GROUPS: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // tiles_f
    # The last group is what belongs to nobody.
    group = tl.arange(0, GROUPS)
    starts = tl.load(offsets_ptr + group, mask=group <= experts, other=rows)
    ends = tl.load(offsets_ptr + group + 1, mask=group < experts, other=rows)
    counts = tl.where(group <= experts, (ends - starts + TILE - 1) // TILE, 0)
    before = tl.cumsum(counts, 0) - counts
    is_mine = (before <= tile) & (tile < before + counts)
    expert = tl.sum(tl.where(is_mine, group, 0), 0)
    first = tl.sum(tl.where(is_mine, starts + (tile - before) * TILE, 0), 0)
    end = tl.sum(tl.where(is_mine, ends, 0), 0)
    t = first.to(tl.int64) + tl.arange(0, TILE)
    f = (tl.program_id(0) % tiles_f) * TILE + tl.arange(0, TILE)
    in_t, in_f = t < end, f < columns
    acc = tl.zeros((TILE, TILE), tl.float32)
    # Rows of nobody are not read: they may hold anything.
    to_sum = tl.where(expert < experts, inner, 0)
    of_expert = weight_ptr + expert.to(tl.int64) * stride_x
    for k in range(0, to_sum, INNER):
        d = k + tl.arange(0, INNER)
        in_d = d < inner
        at = (t * stride_t)[:, None] + d[None, :]
        x = tl.load(x_ptr + at, mask=in_t[:, None] & in_d[None, :], other=0.0)
        w = tl.load(
            of_expert + (f * stride_f)[None, :] + (d * stride_d)[:, None],
            mask=in_f[None, :] & in_d[:, None], other=0.0,
        )  # fmt: skip
        acc = _added(acc, x, w, end, PRECISION)
    to = (t * columns)[:, None] + f[None, :]
    tl.store(y_ptr + to, acc.to(y_ptr.dtype.element_ty), mask=in_t[:, None] & in_f[None, :])


@triton.jit(do_not_specialize=["rows"])
def _clear_rest_kernel(
    y_ptr, end_ptr, rows, columns, tiles_f, TILE: tl.constexpr
):  # fmt: skip
    t = (tl.program_id(0) // tiles_f).to(tl.int64) * TILE + tl.arange(0, TILE)
    end = tl.load(end_ptr)
    if (tl.program_id(0) // tiles_f + 1) * TILE <= end:
        return
    f = (tl.program_id(0) % tiles_f) * TILE + tl.arange(0, TILE)
    mask = ((t >= end) & (t < rows))[:, None] & (f < columns)[None, :]
    zeros = tl.zeros((TILE, TILE), y_ptr.dtype.element_ty)
    tl.store(y_ptr + (t * columns)[:, None] + f[None, :], zeros, mask=mask)


@triton.jit
def _grouped_weight_kernel(
    grad_ptr, x_ptr, offsets_ptr, grad_weight_ptr, width, columns, tiles_f, tiles_d, stride_grad_t,
    stride_x_t, TILE: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) // (tiles_f * tiles_d)
    within = tl.program_id(0) % (tiles_f * tiles_d)
    f = (within // tiles_d) * TILE + tl.arange(0, TILE)
    d = (within % tiles_d) * TILE + tl.arange(0, TILE)
    in_f, in_d = f < columns, d < width
    start, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    acc = tl.zeros((TILE, TILE), tl.float32)
    for first in range(start, end, INNER):
        t = (first + tl.arange(0, INNER)).to(tl.int64)
        in_t = t < end
        at_f, at_d = (
            (t * stride_grad_t)[None, :] + f[:, None],
            (t * stride_x_t)[:, None] + d[None, :],
        )
        grad = tl.load(grad_ptr + at_f, mask=in_t[None, :] & in_f[:, None], other=0.0)
        x = tl.load(x_ptr + at_d, mask=in_t[:, None] & in_d[None, :], other=0.0)
        acc = _added(acc, grad, x, end, PRECISION)
    to = (expert.to(tl.int64) * columns + f)[:, None] * width + d[None, :]
    tl.store(
        grad_weight_ptr + to, acc.to(grad_weight_ptr.dtype.element_ty),
        mask=in_f[:, None] & in_d[None, :],
    )  # fmt: skip


def launch_forward(x_TD, weight_XFD, offsets_O):
    """Return y_TF."""
    return _mapped(x_TD, weight_XFD, offsets_O)


def launch_backward(grad_TF, x_TD, weight_XFD, offsets_O):
    """Return the gradients of x and of the weights."""
    experts, columns, width = weight_XFD.shape
    grad_x_TD = _mapped(grad_TF, weight_XFD.transpose(1, 2), offsets_O)
    grad_weight_XFD = torch.empty(weight_XFD.shape, dtype=weight_XFD.dtype, device=x_TD.device)
    if grad_weight_XFD.numel() == 0:
        return grad_x_TD, grad_weight_XFD
    grad, x = _dense(grad_TF), _dense(x_TD)
    if _has_library(x, weight_XFD) and _has_library(grad, weight_XFD):
        return grad_x_TD, F.grouped_mm(grad.T, x, offs=offsets_O[1:])
    tiles_f, tiles_d = triton.cdiv(columns, _TILE), triton.cdiv(width, _TILE)
    with on_device(x):
        _grouped_weight_kernel[(experts * tiles_f * tiles_d,)](
            grad, x, offsets_O, grad_weight_XFD, width, columns, tiles_f, tiles_d, grad.stride(0),
            x.stride(0), TILE=_TILE, INNER=_INNER, PRECISION=_precision(x), num_warps=8,
            num_stages=3,
        )  # fmt: skip
    return grad_x_TD, grad_weight_XFD


def _mapped(x_TD, weight_XFD, offsets_O):
    (rows, inner), (experts, columns, _) = x_TD.shape, weight_XFD.shape
    y_TF = torch.empty((rows, columns), dtype=x_TD.dtype, device=x_TD.device)
    if y_TF.numel() == 0:
        return y_TF
    x = _dense(x_TD)
    tiles_f = triton.cdiv(columns, _TILE)
    if _has_library(x, weight_XFD):
        y_TF = F.grouped_mm(x, weight_XFD.transpose(1, 2), offs=offsets_O[1:])
        with on_device(x):
            _clear_rest_kernel[(triton.cdiv(rows, _TILE) * tiles_f,)](
                y_TF, offsets_O[experts:], rows, columns, tiles_f, TILE=_TILE, num_warps=4
            )
        return y_TF
    tiles_t = triton.cdiv(rows, _TILE) + experts
    with on_device(x):
        _grouped_kernel[(tiles_t * tiles_f,)](
            x, weight_XFD, offsets_O, y_TF, rows, inner, columns, experts, tiles_f, x.stride(0),
            *weight_XFD.stride(), GROUPS=triton.next_power_of_2(experts + 1), TILE=_TILE,
            INNER=_INNER, PRECISION=_precision(x), num_warps=8, num_stages=3,
        )  # fmt: skip
    return y_TF


def _has_library(x, weight_XFD):
    """Tell whether torch multiplies by groups here: bf16, Hopper or newer, whole 16 bytes.

    It was faster than the kernels above wherever it ran, and leaves unwritten what is nobody's.
    """
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and x.shape[0] > 0
        and x.stride(0) % 8 == 0
        and all(size % 8 == 0 for size in weight_XFD.shape[1:])
        and (weight_XFD.is_contiguous() or weight_XFD.transpose(1, 2).is_contiguous())
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x, weight_XFD))
    )


def _dense(x):
    return x if x.stride(1) == 1 else x.contiguous()


def _precision(x):
    return "ieee" if x.dtype == torch.float32 else "tf32"

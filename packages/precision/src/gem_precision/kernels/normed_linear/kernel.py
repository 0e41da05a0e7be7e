"""Triton kernel of ``normed_linear``: row statistics beside a matrix product, applied behind it.

A program makes a tile of results. Tiles of one range of tokens are neighbours, so that the tokens
come from memory once; each of these programs forms the sums of its rows again, on units that the
product leaves idle.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Of a product of float32 in the interpreter; 16-bit operands have one way alone.
_PRECISION = tl.constexpr("ieee")
_TILE_T, _TILE_F, _TILE_D = 128, 256, 64
_WARPS, _STAGES = 8, 3


@triton.jit(do_not_specialize=["rows"])
def normed_linear_kernel(
    x_ptr,
    weight_ptr,
    sums_ptr,
    y_ptr,
    first_ptr,
    rows,
    width,
    out_width,
    eps,
    stride_x_t,
    stride_w_f,
    CENTRED: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write a tile of y. Where TMA, tokens, weights and y come as descriptors.

    ``first_ptr`` is the first column of the tokens. Where CENTRED, sums are of differences from it:
    it lies at most √D standard deviations from the mean, which bounds what the squares cancel.
    """
    tiles_f = tl.cdiv(out_width, BLOCK_F)
    t0 = tl.program_id(0) // tiles_f * BLOCK_T
    f0 = tl.program_id(0) % tiles_f * BLOCK_F
    t = t0 + tl.arange(0, BLOCK_T)
    f = f0 + tl.arange(0, BLOCK_F)
    d = tl.arange(0, BLOCK_D)
    acc_tf = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    # Element by element: a sum across threads in every step would cost more than the product.
    square_td = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    sum_td = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if CENTRED:
        begin_t = t.to(tl.int64) * stride_x_t
        first_t = tl.load(first_ptr + begin_t, mask=t < rows, other=0.0).to(tl.float32)
    for d0 in tl.range(0, width, BLOCK_D, num_stages=STAGES):
        if TMA:
            x_td = x_ptr.load([t0, d0])
            w_fd = weight_ptr.load([f0, d0])
        else:
            in_row = d0 + d < width
            at = t.to(tl.int64)[:, None] * stride_x_t + (d0 + d)[None, :]
            x_td = tl.load(x_ptr + at, mask=(t < rows)[:, None] & in_row[None, :], other=0.0)
            at = f.to(tl.int64)[:, None] * stride_w_f + (d0 + d)[None, :]
            w_fd = tl.load(
                weight_ptr + at, mask=(f < out_width)[:, None] & in_row[None, :], other=0.0
            )
        acc_tf = tl.dot(x_td, tl.trans(w_fd), acc_tf, input_precision=_PRECISION)
        wide_td = x_td.to(tl.float32)
        if CENTRED:
            wide_td -= first_t[:, None]
            if not EVEN:
                wide_td = tl.where((d0 + d < width)[None, :], wide_td, 0.0)
        square_td += wide_td * wide_td
        if CENTRED:
            sum_td += wide_td
    variance_t = tl.sum(square_td, 1) / width
    if CENTRED:
        shift_t = tl.sum(sum_td, 1) / width
        variance_t = tl.maximum(variance_t - shift_t * shift_t, 0.0)
        mean_t = first_t + shift_t
        sums_f = tl.load(sums_ptr + f, mask=f < out_width, other=0.0)
        acc_tf -= mean_t[:, None] * sums_f[None, :]
    acc_tf *= (1.0 / tl.sqrt_rn(variance_t + eps))[:, None]
    if TMA:
        y_ptr.store([t0, f0], acc_tf.to(y_ptr.dtype))
    else:
        at = t.to(tl.int64)[:, None] * out_width + f[None, :]
        tl.store(y_ptr + at, acc_tf, mask=(t < rows)[:, None] & (f < out_width)[None, :])


def tile_constants(*, single: bool) -> dict[str, Any]:
    """Return the sizes of a program.

    Args:
        single: whether operands are float32, in the interpreter.

    Returns:
        constants by name, without CENTRED, TMA and EVEN.
    """
    if single:
        return {"BLOCK_T": 64, "BLOCK_F": 64, "BLOCK_D": 32, "STAGES": 1}
    return {"BLOCK_T": _TILE_T, "BLOCK_F": _TILE_F, "BLOCK_D": _TILE_D, "STAGES": _STAGES}


def launch_forward(x_TD: Tensor, weight_FD: Tensor, sums_F: Tensor | None, *, eps: float) -> Tensor:
    """Return y_TF in the dtype of x, every row written.

    Args:
        x_TD: tokens, contiguous rows.
        weight_FD: weights with their gain, dtype of x, contiguous rows.
        sums_F: float32, sum of each row of the weights: the norm takes off the mean. None for the
            root mean square.
        eps: added to the mean square.
    """
    (rows, width), out_width = x_TD.shape, weight_FD.shape[0]
    y_TF = x_TD.new_empty((rows, out_width))
    if y_TF.numel() == 0:
        return y_TF
    constants = tile_constants(single=x_TD.dtype == torch.float32)
    block_t, block_f, block_d = (constants[f"BLOCK_{dim}"] for dim in "TFD")
    operands = (x_TD, weight_FD, y_TF)
    by_tma = all(map(_describes, operands))
    if by_tma:
        blocks = ([block_t, block_d], [block_f, block_d], [block_t, block_f])
        operands = tuple(map(TensorDescriptor.from_tensor, operands, blocks))
    grid = (triton.cdiv(rows, block_t) * triton.cdiv(out_width, block_f),)
    with torch.cuda.device_of(x_TD):
        normed_linear_kernel[grid](
            *operands[:2],
            weight_FD if sums_F is None else sums_F,
            operands[2],
            x_TD,
            rows,
            width,
            out_width,
            eps,
            x_TD.stride(0),
            weight_FD.stride(0),
            CENTRED=sums_F is not None,
            TMA=by_tma,
            EVEN=width % block_d == 0,
            **constants,
            num_warps=_WARPS,
        )
    return y_TF


def _describes(x: Tensor) -> bool:
    """Say whether TMA reads and writes a matrix."""
    return (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and x.stride(1) == 1
        and x.stride(0) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
        and x.shape[0] < 2**31
    )

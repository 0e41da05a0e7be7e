"""The product of two MXFP8 matrices on GPUs of compute capability 10.x, by their own instruction.

``tl.dot_scaled`` becomes ``tcgen05.mma ... kind::mxf8f6f4.block_scale`` there: scales are applied
inside the tensor core, block of 32 by block of 32.
"""

import torch
import triton
import triton.language as tl

from gem_precision.device import on_device
from gem_precision.elements import BLOCK

_TILE = 128


@triton.jit(do_not_specialize=["rows"])
def _mx_product_kernel(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, y_ptr, rows, columns, inner, blocks_k, tiles_f,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) // tiles_f).to(tl.int64) * TILE + tl.arange(0, TILE)
    f = (tl.program_id(0) % tiles_f).to(tl.int64) * TILE + tl.arange(0, TILE)
    in_t, in_f = t < rows, f < columns
    acc = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, inner, TILE):
        d = k + tl.arange(0, TILE)
        m = k // BLOCK + tl.arange(0, TILE // BLOCK)
        in_d, in_m = (d < inner)[None, :], (m < blocks_k)[None, :]
        a = tl.load(a_ptr + (t * inner)[:, None] + d[None, :], mask=in_t[:, None] & in_d, other=0.0)
        b = tl.load(b_ptr + (f * inner)[:, None] + d[None, :], mask=in_f[:, None] & in_d, other=0.0)
        # A scale beyond the edge is 1: its elements are zeros.
        a_scale = tl.load(
            a_scales_ptr + (t * blocks_k)[:, None] + m[None, :],
            mask=in_t[:, None] & in_m,
            other=127,
        )
        b_scale = tl.load(
            b_scales_ptr + (f * blocks_k)[:, None] + m[None, :],
            mask=in_f[:, None] & in_m,
            other=127,
        )
        acc = tl.dot_scaled(a, a_scale, "e4m3", tl.trans(b), b_scale, "e4m3", acc)
    to = (t * columns)[:, None] + f[None, :]
    tl.store(y_ptr + to, acc.to(y_ptr.dtype.element_ty), mask=in_t[:, None] & in_f[None, :])


def launch_mx_product(a_elements, a_scales, b_elements, b_scales, dtype):
    """Return a bᵀ of two matrices in MXFP8 by rows."""
    (rows, inner), columns = a_elements.shape, b_elements.shape[0]
    y = torch.empty((rows, columns), dtype=dtype, device=a_elements.device)
    tiles_f = triton.cdiv(columns, _TILE)
    with on_device(y):
        _mx_product_kernel[(triton.cdiv(rows, _TILE) * tiles_f,)](
            a_elements.view(torch.float8_e4m3fn), a_scales, b_elements.view(torch.float8_e4m3fn),
            b_scales, y, rows, columns, inner, a_scales.shape[1], tiles_f,
            TILE=_TILE, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return y

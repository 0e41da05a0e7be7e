"""Triton kernels of ``block_quantize``: tiles of whole blocks, read once.

With ``CAST`` elements are rounded by the GPU's own instruction, without it by integers; the bytes
are the same (``gem_precision.device``).
"""

import torch
import triton
import triton.language as tl

from gem_precision.device import (
    BITS,
    bits_of,
    cast_code,
    element_code,
    has_cast,
    on_device,
    scale_code,
)
from gem_precision.elements import ELEMENTS, WIDE_BLOCK

_ROWS = 32  # of a tile of 1x128, and of what is widened: 4,096 elements, 32 a thread


@triton.jit
def _codes(
    bits, scale, MANTISSA_BITS: tl.constexpr, LEAST_EXPONENT: tl.constexpr,
    LARGEST_CODE: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    if CAST:
        code = cast_code(bits, scale, MANTISSA_BITS)
    else:
        code = element_code(bits, scale, MANTISSA_BITS, LEAST_EXPONENT, LARGEST_CODE)
    return code


@triton.jit
def _scale_bits(code):
    """The scale in fp32, of which a code is the exponent; NaN of code 255."""
    return tl.where(code == 255, 0x7FC00000, code << 23)


@triton.jit(do_not_specialize=["rows", "stored_rows"])
def _rows_kernel(
    x_ptr, elements_ptr, scales_ptr, rows, stored_rows, width, blocks_d, stride_t,
    MANTISSA_BITS: tl.constexpr, LEAST_EXPONENT: tl.constexpr, LARGEST_EXPONENT: tl.constexpr,
    LARGEST_CODE: tl.constexpr, CAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Blocks of a row are neighbours, so that programs that run together read whole rows.
    m = tl.program_id(0) % blocks_d
    t = (tl.program_id(0) // blocks_d).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = m * BLOCK + tl.arange(0, BLOCK)
    in_d = (d < width)[None, :]
    at = (t * stride_t)[:, None] + d[None, :]
    bits = bits_of(tl.load(x_ptr + at, mask=(t < rows)[:, None] & in_d, other=0))
    largest = tl.max(bits & 0x7FFFFFFF, axis=1)
    scale = tl.maximum(scale_code(largest, True, LARGEST_EXPONENT), 1)
    code = _codes(bits, scale[:, None], MANTISSA_BITS, LEAST_EXPONENT, LARGEST_CODE, CAST)
    # Rows beyond the matrix are zeros, which products ask for.
    in_t = t < stored_rows
    tl.store(elements_ptr + (t * width)[:, None] + d[None, :], code, mask=in_t[:, None] & in_d)
    tl.store(scales_ptr + m.to(tl.int64) * stored_rows + t, _scale_bits(scale), mask=in_t)


@triton.jit
def _squares_kernel(
    x_ptr, elements_ptr, turned_ptr, scales_ptr, rows, width, blocks_d, stride_t,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, MANTISSA_BITS: tl.constexpr,
    LEAST_EXPONENT: tl.constexpr, LARGEST_EXPONENT: tl.constexpr, LARGEST_CODE: tl.constexpr,
    CAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m, strip = tl.program_id(0) % blocks_d, tl.program_id(0) // blocks_d
    t = strip.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = m.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (t < rows)[:, None] & (d < width)[None, :]
    bits = bits_of(tl.load(x_ptr + (t * stride_t)[:, None] + d[None, :], mask=mask, other=0))
    largest = tl.max(tl.max(bits & 0x7FFFFFFF, axis=1), axis=0)
    scale = tl.maximum(scale_code(largest, True, LARGEST_EXPONENT), 1)
    code = _codes(bits, scale, MANTISSA_BITS, LEAST_EXPONENT, LARGEST_CODE, CAST)
    tl.store(scales_ptr + strip * blocks_d + m, _scale_bits(scale))
    if PLAIN:
        tl.store(elements_ptr + (t * width)[:, None] + d[None, :], code, mask=mask)
    if TURNED:
        turned_mask = (d < width)[:, None] & (t < rows)[None, :]
        tl.store(turned_ptr + (d * rows)[:, None] + t[None, :], tl.trans(code), mask=turned_mask)


@triton.jit
def _widen_kernel(
    elements_ptr, scales_ptr, out_ptr, rows, width, blocks_d, stride_t,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m, tile = tl.program_id(0) % blocks_d, tl.program_id(0) // blocks_d
    t = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = m.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (t < rows)[:, None] & (d < width)[None, :]
    code = tl.load(elements_ptr + (t * width)[:, None] + d[None, :], mask=mask, other=0)
    scale = tl.load(scales_ptr + (tile * ROWS // BLOCK).to(tl.int64) * blocks_d + m)
    # By integers, as in the interpreter: the kernel waits for memory anyway. The sign, too: Triton
    # subtracts from 0 where a minus stands, which loses that of 0.
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    small = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < 8, small, (magnitude << 20) + (120 << 23))
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits) | ((code & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * scale
    at = (t * stride_t)[:, None] + d[None, :]
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=mask)


def launch_widen(elements_TD, scales, out_TD):
    """Write the numbers of a matrix in blocks of 128x128 into another one with rows in place."""
    rows, width = elements_TD.shape
    if elements_TD.numel() == 0:
        return
    blocks_d = triton.cdiv(width, WIDE_BLOCK)
    with on_device(out_TD):
        _widen_kernel[(blocks_d * triton.cdiv(rows, _ROWS),)](
            elements_TD, scales, out_TD, rows, width, blocks_d, out_TD.stride(0),
            ROWS=_ROWS, BLOCK=WIDE_BLOCK, num_warps=4,
        )  # fmt: skip


def launch_rows(x_TD, *, row_multiple=1):
    """Return elements and scales in blocks of 1x128, with rows of zeros up to a multiple."""
    rows, width = x_TD.shape
    stored = triton.cdiv(rows, row_multiple) * row_multiple
    blocks_d = triton.cdiv(width, WIDE_BLOCK)
    elements_TD = torch.empty((stored, width), dtype=torch.uint8, device=x_TD.device)
    scales_MT = torch.empty((blocks_d, stored), dtype=torch.float32, device=x_TD.device)
    if stored == 0 or width == 0:
        return elements_TD, scales_MT
    x = (x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()).view(BITS[x_TD.dtype])
    with on_device(x):
        _rows_kernel[(blocks_d * triton.cdiv(stored, _ROWS),)](
            x, elements_TD, scales_MT.view(torch.int32), rows, stored, width, blocks_d, x.stride(0),
            **_form(x), ROWS=_ROWS, BLOCK=WIDE_BLOCK, num_warps=4,
        )  # fmt: skip
    return elements_TD, scales_MT


def launch_squares(x_TD, *, turned):
    """Return elements, scales and elements of the transposed matrix, in blocks of 128x128."""
    rows, width = x_TD.shape
    strips, blocks_d = triton.cdiv(rows, WIDE_BLOCK), triton.cdiv(width, WIDE_BLOCK)

    def empty(is_asked, *shape):
        return torch.empty(shape if is_asked else (0, 0), dtype=torch.uint8, device=x_TD.device)

    plain, both = turned != "only", turned != "no"
    elements_TD, turned_DT = empty(plain, rows, width), empty(both, width, rows)
    scales = torch.empty((strips, blocks_d), dtype=torch.float32, device=x_TD.device)
    if x_TD.numel() == 0:
        return elements_TD, scales, turned_DT
    x = (x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()).view(BITS[x_TD.dtype])
    with on_device(x):
        _squares_kernel[(blocks_d * strips,)](
            x, elements_TD, turned_DT, scales.view(torch.int32), rows, width, blocks_d,
            x.stride(0), PLAIN=plain, TURNED=both, **_form(x), BLOCK=WIDE_BLOCK, num_warps=8,
        )  # fmt: skip
    return elements_TD, scales, turned_DT


def _form(x):
    form = ELEMENTS["e4m3"]
    return {
        "MANTISSA_BITS": form.mantissa_bits,
        "LEAST_EXPONENT": form.least_exponent,
        "LARGEST_EXPONENT": form.largest_exponent,
        "LARGEST_CODE": form.largest_code,
        "CAST": has_cast(x),
    }

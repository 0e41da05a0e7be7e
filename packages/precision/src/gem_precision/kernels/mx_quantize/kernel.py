"""Triton kernels of ``mx_quantize``: a strip of 32 rows, read once, in one orientation or both.

Everything is done on the bits, as integers of 32 bits: neither the rounding of a cast nor the
flushing of subnormals can then differ between a GPU, its interpreter and a CPU.
"""

import contextlib

import torch
import triton
import triton.language as tl

from gem_precision.elements import BLOCK, ELEMENTS

_BLOCKS = 4  # blocks of a tile along a row: 128 elements, a full line of memory of each output
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.float16}


@triton.jit
def _bits_of(x):
    """Return the bits of fp32 numbers, given them, bits of bf16, or fp16."""
    if x.dtype == tl.int16:
        bits = x.to(tl.int32) << 16
    elif x.dtype == tl.float16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    else:
        bits = x
    return bits


@triton.jit
def _scale_code(largest, RCEIL: tl.constexpr, LARGEST_EXPONENT: tl.constexpr):
    code = (largest >> 23) - LARGEST_EXPONENT
    if RCEIL:
        # At 2^-127 the quotient in fp32 rounds down onto the power of two once.
        limit = tl.where(code == 0, 0x600001, 0x600000)
        code += ((largest & 0x7FFFFF) > limit).to(tl.int32)
    return tl.where(largest >= 0x7F800000, 255, tl.maximum(code, 0))


@triton.jit
def _element_code(
    bits, scale, MANTISSA_BITS: tl.constexpr, LEAST_EXPONENT: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
):  # fmt: skip
    magnitude = bits & 0x7FFFFFFF
    # A subnormal is a whole number of 2^-149; as a float that number shows its leading bit.
    is_subnormal = magnitude < 0x800000
    as_float = magnitude.to(tl.float32).to(tl.int32, bitcast=True)
    leading = tl.where(is_subnormal, as_float, magnitude)
    exponent = (leading >> 23) - tl.where(is_subnormal, 149, 0)
    significand = (leading & 0x7FFFFF) | 0x800000
    # |x| over the scale is significand · 2^power.
    power = exponent - scale - 23
    step = tl.maximum(power + (23 - MANTISSA_BITS - LEAST_EXPONENT), 0)
    shift = tl.minimum(step + LEAST_EXPONENT - power, 25)
    half_less_one = (1 << (shift - 1)) - 1
    whole = (significand + half_less_one + ((significand >> shift) & 1)) >> shift
    code = tl.minimum((step << MANTISSA_BITS) + whole, LARGEST_CODE) | ((bits >> 24) & 0x80)
    return tl.where(scale == 255, 0x7F, code).to(tl.uint8)


@triton.jit(do_not_specialize=["rows"])
def _mx_quantize_kernel(
    x_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, rows, width, blocks_d,
    tiles_d, stride_t,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARE: tl.constexpr, RCEIL: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, LEAST_EXPONENT: tl.constexpr, LARGEST_EXPONENT: tl.constexpr,
    LARGEST_CODE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    strip = (tl.program_id(0) // tiles_d).to(tl.int64)
    t = strip * BLOCK + tl.arange(0, BLOCK)
    m = (tl.program_id(0) % tiles_d) * BLOCKS + tl.arange(0, BLOCKS)
    d = m[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_t, in_m, in_d = t < rows, m < blocks_d, d < width
    mask = in_t[:, None, None] & in_d[None, :, :]
    at = (t * stride_t)[:, None, None] + d[None, :, :]
    bits = _bits_of(tl.load(x_ptr + at, mask=mask, other=0))
    magnitude = bits & 0x7FFFFFFF
    to = (t * width)[:, None, None] + d[None, :, :]
    if ROWS or SQUARE:
        largest = tl.max(magnitude, axis=2)
        if SQUARE:
            scale = _scale_code(tl.max(largest, axis=0), RCEIL, LARGEST_EXPONENT)
            tl.store(row_scales_ptr + strip * blocks_d + m, scale.to(tl.uint8), mask=in_m)
            spread = scale[None, :, None]
        else:
            scale = _scale_code(largest, RCEIL, LARGEST_EXPONENT)
            tl.store(
                row_scales_ptr + (t * blocks_d)[:, None] + m[None, :], scale.to(tl.uint8),
                mask=in_t[:, None] & in_m[None, :],
            )  # fmt: skip
            spread = scale[:, :, None]
        code = _element_code(bits, spread, MANTISSA_BITS, LEAST_EXPONENT, LARGEST_CODE)
        tl.store(rows_ptr + to, code, mask=mask)
    if COLUMNS:
        scale = _scale_code(tl.max(magnitude, axis=0), RCEIL, LARGEST_EXPONENT)
        tl.store(column_scales_ptr + strip * width + d, scale.to(tl.uint8), mask=in_d)
        code = _element_code(
            bits, scale[None, :, :], MANTISSA_BITS, LEAST_EXPONENT, LARGEST_CODE
        )  # fmt: skip
        tl.store(columns_ptr + to, code, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _mx_dequantize_kernel(
    elements_ptr, scales_ptr, y_ptr, rows, width, blocks_d, tiles_d, stride_t,
    COLUMNS: tl.constexpr, SQUARE: tl.constexpr, MANTISSA_BITS: tl.constexpr,
    LEAST_EXPONENT: tl.constexpr, LARGEST_CODE: tl.constexpr, INFINITE_CODE: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    strip = (tl.program_id(0) // tiles_d).to(tl.int64)
    t = strip * BLOCK + tl.arange(0, BLOCK)
    m = (tl.program_id(0) % tiles_d) * BLOCKS + tl.arange(0, BLOCKS)
    d = m[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_t, in_m, in_d = t < rows, m < blocks_d, d < width
    mask = in_t[:, None, None] & in_d[None, :, :]
    at = (t * stride_t)[:, None, None] + d[None, :, :]
    byte = tl.load(elements_ptr + at, mask=mask, other=0).to(tl.int32)
    if SQUARE:
        scale = tl.load(scales_ptr + strip * blocks_d + m, mask=in_m, other=0)[None, :, None]
    elif COLUMNS:
        scale = tl.load(scales_ptr + strip * width + d, mask=in_d, other=0)[None, :, :]
    else:
        scale = tl.load(
            scales_ptr + (t * blocks_d)[:, None] + m[None, :],
            mask=in_t[:, None] & in_m[None, :], other=0,
        )[:, :, None]  # fmt: skip
    scale = scale.to(tl.int32)
    magnitude = byte & 0x7F
    step = tl.maximum(magnitude >> MANTISSA_BITS, 1) - 1
    whole = magnitude - (step << MANTISSA_BITS)
    power = step + scale + (LEAST_EXPONENT - 127)
    as_float = whole.to(tl.float32).to(tl.int32, bitcast=True)
    exponent = (as_float >> 23) + power
    subnormal = whole << tl.minimum(tl.maximum(power + 149, 0), 24)
    bits = tl.where(exponent >= 1, as_float + (power << 23), subnormal)
    bits = tl.where(exponent >= 255, 0x7F7FFFFF, bits)
    bits = tl.where(whole == 0, 0, bits)
    bits = tl.where(magnitude == INFINITE_CODE, 0x7F800000, bits)
    bits |= (byte & 0x80) << 24
    is_nan = (magnitude > LARGEST_CODE) & (magnitude != INFINITE_CODE) | (scale == 255)
    bits = tl.where(is_nan, 0x7FC00000, bits)
    to = (t * width)[:, None, None] + d[None, :, :]
    tl.store(y_ptr + to, bits.to(tl.float32, bitcast=True), mask=mask)


def launch_quantize(x_TD, *, scaling, element, along):
    """Return elements and scales by rows, then by columns; what is not asked for is empty."""
    (rows, width), form = x_TD.shape, ELEMENTS[element]
    strips, blocks_d = triton.cdiv(rows, BLOCK), triton.cdiv(width, BLOCK)
    shapes = {"rows": (rows, blocks_d), "both": (rows, blocks_d), "square": (strips, blocks_d)}

    def empty(*shape):
        return torch.empty(shape, dtype=torch.uint8, device=x_TD.device)

    by_rows = along in shapes
    by_columns = along in ("columns", "both")
    outputs = (
        empty(*(x_TD.shape if by_rows else (0, 0))),
        empty(*shapes.get(along, (0, 0))),
        empty(*(x_TD.shape if by_columns else (0, 0))),
        empty(*((strips, width) if by_columns else (0, 0))),
    )
    if x_TD.numel() == 0:
        return outputs
    x = (x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()).view(_BITS[x_TD.dtype])
    tiles_d = triton.cdiv(blocks_d, _BLOCKS)
    with _on_device(x):
        _mx_quantize_kernel[(strips * tiles_d,)](
            x, *outputs, rows, width, blocks_d, tiles_d, x.stride(0),
            ROWS=along in ("rows", "both"), COLUMNS=by_columns, SQUARE=along == "square",
            RCEIL=scaling == "mxfp8_rceil", MANTISSA_BITS=form.mantissa_bits,
            LEAST_EXPONENT=form.least_exponent, LARGEST_EXPONENT=form.largest_exponent,
            LARGEST_CODE=form.largest_code, BLOCKS=_BLOCKS, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return outputs


def launch_dequantize(elements_TD, scales, *, element, along):
    """Return the numbers in fp32."""
    (rows, width), form = elements_TD.shape, ELEMENTS[element]
    y_TD = torch.empty(elements_TD.shape, dtype=torch.float32, device=elements_TD.device)
    if elements_TD.numel() == 0:
        return y_TD
    if elements_TD.stride(1) != 1:
        elements_TD = elements_TD.contiguous()
    strips, blocks_d = triton.cdiv(rows, BLOCK), triton.cdiv(width, BLOCK)
    tiles_d = triton.cdiv(blocks_d, _BLOCKS)
    with _on_device(elements_TD):
        _mx_dequantize_kernel[(strips * tiles_d,)](
            elements_TD, scales.contiguous(), y_TD, rows, width, blocks_d, tiles_d,
            elements_TD.stride(0), COLUMNS=along == "columns", SQUARE=along == "square",
            MANTISSA_BITS=form.mantissa_bits, LEAST_EXPONENT=form.least_exponent,
            LARGEST_CODE=form.largest_code, INFINITE_CODE=form.infinite_code, BLOCKS=_BLOCKS,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return y_TD


def _on_device(tensor):
    """Make the tensor's device the current one: Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()

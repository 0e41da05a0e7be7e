"""Triton kernels of ``mx_quantize``: a strip of 32 rows, read once, in one orientation or both.

With ``CAST`` elements are rounded by the GPU's own instruction, without it by integers; the bytes
are the same (``gem_precision.device``).
"""

import torch
import triton
import triton.language as tl

from gem_opkit.device import words_of_columns
from gem_precision.device import (
    BITS,
    bits_of,
    cast_code,
    chance_code,
    element_code,
    has_cast,
    on_device,
    scale_code,
)
from gem_precision.elements import BLOCK, CHANCE_BLOCKS, ELEMENTS

# Blocks of a tile along a row, and warps, by what is asked for. Two warps write full lines of
# memory; a single one holds whole columns of a narrow tile, and shuffles least for their largest
# magnitudes. Integers need more registers, so that their tiles have four warps.
_TILES = {"rows": (4, 2), "columns": (2, 1), "both": (4, 2), "square": (4, 4)}
_BLOCKS = 4  # of a tile of the inverse
# Its result: word of the kernel, and the integers of the same bits. The interpreter rounds to bf16
# in a way of its own, and a GPU's cast makes another NaN.
_OUTPUTS = {
    torch.float32: ("fp32", torch.int32),
    torch.bfloat16: ("bf16", torch.int16),
    torch.float16: ("fp16", torch.int16),
}


@triton.jit
def element_codes(
    bits, spread, t, first, orientation, seed, MANTISSA_BITS: tl.constexpr,
    LEAST_EXPONENT: tl.constexpr, LARGEST_CODE: tl.constexpr, CAST: tl.constexpr,
    CHANCE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return bytes of elements, given the code of each one's scale."""
    if CHANCE:
        words = words_of_columns(
            seed, t, t * 0 + first // BLOCKS, t * 0 + orientation, BLOCKS * BLOCK
        )
        code = chance_code(bits, spread, words, MANTISSA_BITS, LEAST_EXPONENT, LARGEST_CODE)
    elif CAST:
        code = cast_code(bits, spread, MANTISSA_BITS)
    else:
        code = element_code(bits, spread, MANTISSA_BITS, LEAST_EXPONENT, LARGEST_CODE)
    return code


@triton.jit
def store_tile(
    bits, t, d, first, strip, mask, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, rows,
    width, blocks_d, seed,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARE: tl.constexpr, RCEIL: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, LEAST_EXPONENT: tl.constexpr, LARGEST_EXPONENT: tl.constexpr,
    LARGEST_CODE: tl.constexpr, CAST: tl.constexpr, CHANCE: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantise a tile of 32 rows, given as the bits of fp32 numbers, 0 outside of the matrix."""
    m = first + tl.arange(0, BLOCKS)
    in_t, in_m, in_d = t < rows, m < blocks_d, d < width
    magnitude = bits & 0x7FFFFFFF
    to = (t * width)[:, None] + d[None, :]
    if ROWS or SQUARE:
        largest = tl.max(tl.reshape(magnitude, (BLOCK, BLOCKS, BLOCK)), axis=2)
        if SQUARE:
            largest = tl.max(largest, axis=0, keep_dims=True)
        scale = scale_code(largest, RCEIL, LARGEST_EXPONENT)
        if SQUARE:
            at = tl.full((1, 1), 0, tl.int64) + strip * blocks_d + m[None, :]
            tl.store(row_scales_ptr + at, scale.to(tl.uint8), mask=in_m[None, :])
        else:
            at = (t * blocks_d)[:, None] + m[None, :]
            tl.store(row_scales_ptr + at, scale.to(tl.uint8), mask=in_t[:, None] & in_m[None, :])
        spread = tl.broadcast_to(scale[:, :, None], (BLOCK, BLOCKS, BLOCK))
        spread = tl.reshape(spread, (BLOCK, BLOCKS * BLOCK))
        code = element_codes(
            bits, spread, t, first, 0, seed, MANTISSA_BITS, LEAST_EXPONENT, LARGEST_CODE, CAST,
            CHANCE, BLOCKS, BLOCK,
        )  # fmt: skip
        tl.store(rows_ptr + to, code, mask=mask)
    if COLUMNS:
        scale = scale_code(tl.max(magnitude, axis=0), RCEIL, LARGEST_EXPONENT)
        tl.store(column_scales_ptr + strip * width + d, scale.to(tl.uint8), mask=in_d)
        code = element_codes(
            bits, scale[None, :], t, first, 1, seed, MANTISSA_BITS, LEAST_EXPONENT, LARGEST_CODE,
            CAST, CHANCE, BLOCKS, BLOCK,
        )  # fmt: skip
        tl.store(columns_ptr + to, code, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _mx_quantize_kernel(
    x_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, rows, width, blocks_d,
    tiles_d, stride_t, seed,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARE: tl.constexpr, RCEIL: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, LEAST_EXPONENT: tl.constexpr, LARGEST_EXPONENT: tl.constexpr,
    LARGEST_CODE: tl.constexpr, CAST: tl.constexpr, CHANCE: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    strip = (tl.program_id(0) // tiles_d).to(tl.int64)
    first = (tl.program_id(0) % tiles_d) * BLOCKS
    t = strip * BLOCK + tl.arange(0, BLOCK)
    # Two dims: with blocks as a third a thread would hold few rows of a column, and shuffle for it.
    d = first * BLOCK + tl.arange(0, BLOCKS * BLOCK)
    mask = (t < rows)[:, None] & (d < width)[None, :]
    bits = bits_of(tl.load(x_ptr + (t * stride_t)[:, None] + d[None, :], mask=mask, other=0))
    store_tile(
        bits, t, d, first, strip, mask, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr,
        rows, width, blocks_d, seed, ROWS, COLUMNS, SQUARE, RCEIL, MANTISSA_BITS, LEAST_EXPONENT,
        LARGEST_EXPONENT, LARGEST_CODE, CAST, CHANCE, BLOCKS, BLOCK,
    )  # fmt: skip


@triton.jit
def decoded_bits(
    byte, scale, TO: tl.constexpr, MANTISSA_BITS: tl.constexpr, LEAST_EXPONENT: tl.constexpr,
    LARGEST_CODE: tl.constexpr, INFINITE_CODE: tl.constexpr,
):  # fmt: skip
    """Return the bits of a number, of 32 or the last 16, given its byte and its scale's code.

    A byte's exponent and mantissa, moved to where fp32 has them, are the number over a power of
    two, subnormal or not. Two multiplications, both exact, take about half of the instructions of
    the same in integers, by which 8 bits would not be decoded as fast as memory gives them.
    """
    magnitude = byte & 0x7F
    bias: tl.constexpr = 1 - LEAST_EXPONENT - MANTISSA_BITS
    up = tl.full((1, 1, 1), (254 - bias) << 23, tl.int32).to(tl.float32, bitcast=True)
    number = (magnitude << (23 - MANTISSA_BITS)).to(tl.float32, bitcast=True) * up
    factor = tl.where(scale == 0, 0x400000, scale << 23).to(tl.float32, bitcast=True)
    bits = (number * factor).to(tl.int32, bitcast=True)
    if TO == "bf16":
        # Four digits at most: only a number below the normal ones is rounded.
        bits = tl.minimum(bits, 0x7F7F0000)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        infinite: tl.constexpr = 0x7F80
        nan: tl.constexpr = 0x7FC0
        sign = (byte & 0x80) << 8
    elif TO == "fp16":
        narrow = tl.minimum(bits, 0x477FE000).to(tl.float32, bitcast=True).to(tl.float16)
        bits = narrow.to(tl.int16, bitcast=True).to(tl.int32)
        infinite: tl.constexpr = 0x7C00
        nan: tl.constexpr = 0x7E00
        sign = (byte & 0x80) << 8
    else:
        bits = tl.minimum(bits, 0x7F7FFFFF)
        infinite: tl.constexpr = 0x7F800000
        nan: tl.constexpr = 0x7FC00000
        sign = (byte & 0x80) << 24
    if INFINITE_CODE < 0x80:
        bits = tl.where(magnitude == INFINITE_CODE, infinite, bits)
        is_nan = (magnitude > INFINITE_CODE) | (scale == 255)
    else:
        is_nan = (magnitude > LARGEST_CODE) | (scale == 255)
    return tl.where(is_nan, nan, bits | sign)


@triton.jit(do_not_specialize=["rows"])
def _mx_dequantize_kernel(
    elements_ptr, scales_ptr, y_ptr, rows, width, blocks_d, tiles_d, stride_t,
    TO: tl.constexpr, COLUMNS: tl.constexpr, SQUARE: tl.constexpr, MANTISSA_BITS: tl.constexpr,
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
    bits = decoded_bits(
        byte, scale.to(tl.int32), TO, MANTISSA_BITS, LEAST_EXPONENT, LARGEST_CODE, INFINITE_CODE
    )
    to = (t * width)[:, None, None] + d[None, :, :]
    if TO == "fp32":
        tl.store(y_ptr + to, bits, mask=mask)
    else:
        tl.store(y_ptr + to, bits.to(tl.int16), mask=mask)


def empty_outputs(x_TD, along):
    """Return room for elements and scales by rows, then by columns; none for what is not asked."""
    rows, width = x_TD.shape
    strips, blocks_d = triton.cdiv(rows, BLOCK), triton.cdiv(width, BLOCK)
    shapes = {"rows": (rows, blocks_d), "both": (rows, blocks_d), "square": (strips, blocks_d)}

    def empty(*shape):
        return torch.empty(shape, dtype=torch.uint8, device=x_TD.device)

    by_columns = along in ("columns", "both")
    return (
        empty(*(x_TD.shape if along in shapes else (0, 0))),
        empty(*shapes.get(along, (0, 0))),
        empty(*(x_TD.shape if by_columns else (0, 0))),
        empty(*((strips, width) if by_columns else (0, 0))),
    )


def constants_of(scaling, element, along):
    """Return the constants of a kernel that say which bytes come out."""
    form = ELEMENTS[element]
    return {
        "ROWS": along in ("rows", "both"),
        "COLUMNS": along in ("columns", "both"),
        "SQUARE": along == "square",
        "RCEIL": scaling == "mxfp8_rceil",
        "MANTISSA_BITS": form.mantissa_bits,
        "LEAST_EXPONENT": form.least_exponent,
        "LARGEST_EXPONENT": form.largest_exponent,
        "LARGEST_CODE": form.largest_code,
        "BLOCK": BLOCK,
    }


def launch_quantize(x_TD, *, scaling, element, along, seed=None):
    """Return elements and scales by rows, then by columns; what is not asked for is empty."""
    rows, width = x_TD.shape
    strips, blocks_d = triton.cdiv(rows, BLOCK), triton.cdiv(width, BLOCK)
    outputs = empty_outputs(x_TD, along)
    if x_TD.numel() == 0:
        return outputs
    x = (x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()).view(BITS[x_TD.dtype])
    # Random words are drawn for tiles of one width, whatever is best for time.
    cast = has_cast(x)
    blocks, warps = _TILES[along] if cast and seed is None else (CHANCE_BLOCKS, 4)
    tiles_d = triton.cdiv(blocks_d, blocks)
    with on_device(x):
        _mx_quantize_kernel[(strips * tiles_d,)](
            x, *outputs, rows, width, blocks_d, tiles_d, x.stride(0), seed or 0,
            **constants_of(scaling, element, along), CAST=cast, CHANCE=seed is not None,
            BLOCKS=blocks, num_warps=warps,
        )  # fmt: skip
    return outputs


def launch_dequantize(elements_TD, scales, *, element, along, dtype):
    """Return the numbers in fp32, bf16 or fp16."""
    (rows, width), form = elements_TD.shape, ELEMENTS[element]
    y_TD = torch.empty(elements_TD.shape, dtype=dtype, device=elements_TD.device)
    if elements_TD.numel() == 0:
        return y_TD
    if elements_TD.stride(1) != 1:
        elements_TD = elements_TD.contiguous()
    strips, blocks_d = triton.cdiv(rows, BLOCK), triton.cdiv(width, BLOCK)
    tiles_d = triton.cdiv(blocks_d, _BLOCKS)
    to, bits = _OUTPUTS[dtype]
    with on_device(elements_TD):
        _mx_dequantize_kernel[(strips * tiles_d,)](
            elements_TD, scales.contiguous(), y_TD.view(bits), rows, width, blocks_d, tiles_d,
            elements_TD.stride(0), TO=to, COLUMNS=along == "columns", SQUARE=along == "square",
            MANTISSA_BITS=form.mantissa_bits, LEAST_EXPONENT=form.least_exponent,
            LARGEST_CODE=form.largest_code, INFINITE_CODE=form.infinite_code, BLOCKS=_BLOCKS,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return y_TD

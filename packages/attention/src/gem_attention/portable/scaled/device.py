"""Triton functions of attention in MXFP8: rounding a tile in blocks of 32, and scaled products.

NATIVE tiles are bytes of E4M3 with the codes of their scales, for the block-scaled instruction of
compute capability 10.x. Otherwise a tile holds the numbers that these bytes mean, which products
of a wider format take: the same numbers, at no gain of speed. ``gem_precision.device`` has the
scales and the rounding.
"""

import triton
import triton.language as tl

from gem_opkit.device import philox_words
from gem_precision.device import cast_code, chance_code, element_code, scale_code

# E4M3: bits of the mantissa, exponent of the smallest magnitude, that of the largest, its code.
_MANTISSA_BITS: tl.constexpr = tl.constexpr(3)
_LEAST: tl.constexpr = tl.constexpr(-9)
_LARGEST: tl.constexpr = tl.constexpr(8)
_LARGEST_CODE: tl.constexpr = tl.constexpr(0x7E)
BLOCK: tl.constexpr = tl.constexpr(32)


@triton.jit
def codes_of(bits, scale, words, CAST: tl.constexpr, CHANCE: tl.constexpr):
    """Return bytes of E4M3, given the bits of fp32 numbers and the code of each one's scale."""
    if CHANCE:
        code = chance_code(bits, scale, words, _MANTISSA_BITS, _LEAST, _LARGEST_CODE)
    elif CAST:
        code = cast_code(bits, scale, _MANTISSA_BITS)
    else:
        code = element_code(bits, scale, _MANTISSA_BITS, _LEAST, _LARGEST_CODE)
    return code


@triton.jit
def scale_of(largest, RCEIL: tl.constexpr):
    """Return the codes of scales, given the bits of largest magnitudes."""
    return scale_code(largest, RCEIL, _LARGEST)


@triton.jit
def numbers_of(code, scale):
    """Return the fp32 numbers that bytes under scales mean, exactly; ``gem_precision`` says so."""
    byte = code.to(tl.int32)
    magnitude = byte & 0x7F
    step = tl.maximum(magnitude >> _MANTISSA_BITS, 1) - 1
    whole = magnitude - (step << _MANTISSA_BITS)
    power = step + scale + (_LEAST - 127)
    as_float = whole.to(tl.float32).to(tl.int32, bitcast=True)
    exponent = (as_float >> 23) + power
    subnormal = whole << tl.minimum(tl.maximum(power + 149, 0), 24)
    bits = tl.where(exponent >= 1, as_float + (power << 23), subnormal)
    bits = tl.where(exponent >= 255, 0x7F7FFFFF, bits)
    bits = tl.where(whole == 0, 0, bits) | ((byte & 0x80) << 24)
    bits = tl.where((magnitude > _LARGEST_CODE) | (scale == 255), 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def words_of_tile(seed, r, first, h, orientation, COLUMNS: tl.constexpr):
    """Draw a random word for each element of a tile, of its row, column, head and orientation.

    The column counts from 0 within the sequence, ``first`` is a multiple of 4; whatever tile an
    element lies in, its word is the same.
    """
    zero = tl.zeros((r.shape[0], COLUMNS // 4), tl.int32)
    group = (first // 4 + tl.arange(0, COLUMNS // 4))[None, :]
    a, b, c, d = philox_words(
        seed,
        (r[:, None] + zero).to(tl.uint32),
        (zero + h).to(tl.uint32),
        (zero + group).to(tl.uint32),
        (zero + orientation).to(tl.uint32),
    )
    pairs = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(pairs, (r.shape[0], COLUMNS))


@triton.jit
def rounded_rows(
    x, words, RCEIL: tl.constexpr, CAST: tl.constexpr, CHANCE: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Return bytes and codes of scales of a tile of fp32, [R, C] and [R, C / 32]."""
    bits = x.to(tl.int32, bitcast=True)
    # All bits but the sign order magnitudes, NaN above all.
    magnitude = tl.reshape(bits & 0x7FFFFFFF, (R, C // BLOCK, BLOCK))
    scale = scale_of(tl.max(magnitude, axis=2), RCEIL)
    spread = tl.broadcast_to(scale[:, :, None], (R, C // BLOCK, BLOCK))
    spread = tl.reshape(spread, (R, C))
    return codes_of(bits, spread, words, CAST, CHANCE), scale, spread


@triton.jit
def rounded_product(
    x, words, b, b_scale, acc, RCEIL: tl.constexpr, CAST: tl.constexpr, CHANCE: tl.constexpr,
    NATIVE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return acc + Q(x) b, with x [R, C] of fp32 rounded in blocks along the dim of the sum."""
    code, scale, spread = rounded_rows(x, words, RCEIL, CAST, CHANCE, R, C)
    if NATIVE:
        a = code.to(tl.float8e4nv, bitcast=True)
        acc = tl.dot_scaled(a, scale.to(tl.uint8), "e4m3", b, b_scale, "e4m3", acc)
    else:
        acc = tl.dot(numbers_of(code, spread).to(b.dtype), b, acc, input_precision="ieee")
    return acc


@triton.jit
def scaled_scores(a, a_scale, b, b_scale, factor, NATIVE: tl.constexpr):
    """Return a bᵀ of two tiles in blocks along their rows; ``factor`` is any finite number."""
    if NATIVE:
        # Not a constant: of zeros that it knows Triton 3.8 makes an accumulator that it refuses.
        zeros = tl.zeros((a.shape[0], b.shape[0]), tl.float32) + 0.0 * factor
        made = tl.dot_scaled(a, a_scale, "e4m3", tl.trans(b), b_scale, "e4m3", zeros)
    else:
        made = tl.dot(a, tl.trans(b), input_precision="ieee")
    return made


@triton.jit
def load_row_scales(
    ptr, stride, row, rows, NATIVE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Load the scales of a tile in blocks along rows, [ROWS, BLOCK_WIDTH / 32]; 1 outside."""
    scales = 0
    if NATIVE:
        r = row + tl.arange(0, ROWS)
        m = tl.arange(0, BLOCK_WIDTH // BLOCK)
        mask = (r < rows)[:, None] & (m * BLOCK < WIDTH)[None, :]
        at = r.to(tl.int64)[:, None] * stride + m[None, :]
        scales = tl.load(ptr + at, mask=mask, other=127)
    return scales


@triton.jit
def load_column_scales(
    ptr, stride, row, rows, NATIVE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Load the scales of a tile in blocks along columns, [BLOCK_WIDTH, ROWS / 32]; 1 outside."""
    scales = 0
    if NATIVE:
        m = row // BLOCK + tl.arange(0, ROWS // BLOCK)
        w = tl.arange(0, BLOCK_WIDTH)
        mask = (w < WIDTH)[:, None] & (m * BLOCK < rows)[None, :]
        at = m.to(tl.int64)[None, :] * stride + w[:, None]
        scales = tl.load(ptr + at, mask=mask, other=127)
    return scales

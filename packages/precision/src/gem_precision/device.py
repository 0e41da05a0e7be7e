"""Device functions of the 8-bit formats, for Triton kernels of several operators.

Imports triton, so kernels import it and nothing else does. Scales come from the bits of the
numbers. Elements have two ways to the same bytes: ``cast_code`` moves the exponent by one
multiplication, exact wherever it matters, and leaves the rounding to the instruction of GPUs since
8.9, which rounds to nearest even and cuts at the largest element; it costs a few operations an
element, where memory is the limit. ``element_code`` is integers of 32 bits alone: the casts of
Triton's interpreter saturate in a way of their own, and older GPUs have none.
"""

import contextlib

import torch
import triton
import triton.language as tl

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.float16}


@triton.jit
def bits_of(x):
    """Return the bits of fp32 numbers, given them, bits of bf16, or fp16."""
    if x.dtype == tl.int16:
        bits = x.to(tl.int32) << 16
    elif x.dtype == tl.float16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    else:
        bits = x
    return bits


@triton.jit
def scale_code(largest, RCEIL: tl.constexpr, LARGEST_EXPONENT: tl.constexpr):
    """Return the E8M0 code of a block's scale, given the bits of its largest magnitude."""
    code = (largest >> 23) - LARGEST_EXPONENT
    if RCEIL:
        # At 2^-127 the quotient in fp32 rounds down onto the power of two once.
        limit = tl.where(code == 0, 0x600001, 0x600000)
        code += ((largest & 0x7FFFFF) > limit).to(tl.int32)
    return tl.where(largest >= 0x7F800000, 255, tl.maximum(code, 0))


@triton.jit
def element_code(
    bits, scale, MANTISSA_BITS: tl.constexpr, LEAST_EXPONENT: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
):  # fmt: skip
    """Return bytes of elements, by integers alone: the interpreter's way, and older GPUs'."""
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


@triton.jit
def chance_code(
    bits, scale, words, MANTISSA_BITS: tl.constexpr, LEAST_EXPONENT: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
):  # fmt: skip
    """Return bytes of elements that are rounded up or down by chance; ``words`` are uint32."""
    magnitude = bits & 0x7FFFFFFF
    is_subnormal = magnitude < 0x800000
    as_float = magnitude.to(tl.float32).to(tl.int32, bitcast=True)
    leading = tl.where(is_subnormal, as_float, magnitude)
    exponent = (leading >> 23) - tl.where(is_subnormal, 149, 0)
    significand = (leading & 0x7FFFFF) | 0x800000
    power = exponent - scale - 23
    step = tl.maximum(power + (23 - MANTISSA_BITS - LEAST_EXPONENT), 0)
    shift = step + LEAST_EXPONENT - power
    # 30 random bits at most; of a chance below that the last bits are lost.
    significand = significand >> tl.minimum(tl.maximum(shift - 30, 0), 31)
    shift = tl.minimum(shift, 30)
    chance = words.to(tl.int32, bitcast=True) & ((1 << shift) - 1)
    whole = tl.where(magnitude == 0, 0, (significand + chance) >> shift)
    code = tl.minimum((step << MANTISSA_BITS) + whole, LARGEST_CODE) | ((bits >> 24) & 0x80)
    return tl.where(scale == 255, 0x7F, code).to(tl.uint8)


@triton.jit
def cast_code(bits, scale, MANTISSA_BITS: tl.constexpr):
    """Return the same bytes by the cast of GPUs since 8.9."""
    # 2^(127 - scale) is a normal number: no scale but that of a NaN is above 247. A product below
    # the normal numbers is far below the half of the smallest element, and keeps its sign. Of a
    # block with NaN the factor is NaN, so that all of its elements are the one NaN of the cast.
    inverse = tl.where(scale == 255, 0x7FC00000, (254 - scale) << 23).to(tl.float32, bitcast=True)
    scaled = bits.to(tl.float32, bitcast=True) * inverse
    if MANTISSA_BITS == 3:
        code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return code


def has_cast(x):
    """Tell whether the device's cast to 8 bits is the one that kernels may use."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


def on_device(tensor):
    """Make the tensor's device the current one: Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()

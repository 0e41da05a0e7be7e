"""The 8-bit formats in plain torch, on the bits of the numbers: scales and elements of blocks.

Integers throughout: no logarithm, and no cast to an 8-bit type, whose saturation differs between
versions of torch. ``gem_precision.device`` holds the same functions for Triton kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_precision.elements import ELEMENTS, NAN_CODE, NAN_SCALE, WIDE_BLOCK

INFINITE = 0x7F80_0000  # bits of the infinity of fp32
MAGNITUDE = 0x7FFF_FFFF  # all bits but the sign


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of the fp32 numbers; not by a cast, which may flush subnormals."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).to(torch.int32) << 16
    return x.to(torch.float32).view(torch.int32)


def largest_of_blocks(magnitude_TD: Tensor, rows: int, columns: int) -> Tensor:
    """Return the largest magnitude of each block; bits order magnitudes, NaN above all."""
    t, d = magnitude_TD.shape
    filled = F.pad(magnitude_TD, (0, -d % columns, 0, -t % rows))
    blocks = filled.reshape(-(-t // rows), rows, -(-d // columns), columns)
    return blocks.amax(dim=(1, 3))


def spread(codes: Tensor, like_TD: Tensor, rows: int, columns: int) -> Tensor:
    """Return the code of each element's block."""
    t, d = like_TD.shape
    tall = codes.repeat_interleave(rows, dim=0)[:t]
    return tall.repeat_interleave(columns, dim=1)[:, :d]


def scale_codes(largest: Tensor, scaling: str, element: str) -> Tensor:
    """Return the E8M0 codes of scales, given the bits of the largest magnitude of each block."""
    code = (largest >> 23) - ELEMENTS[element].largest_exponent
    if scaling == "mxfp8_rceil":
        code = code + ((largest & 0x7F_FFFF) > 0x60_0000 + (code == 0).to(torch.int32))
    return torch.where(largest >= INFINITE, NAN_SCALE, code.clamp(min=0))


def element_codes(
    bits: Tensor, scales: Tensor, element: str, words: Tensor | None = None
) -> Tensor:
    """Return the bytes of elements under the code of each one's scale.

    They are rounded to the nearest; with random words (int64, 32 bits) up or down by chance.
    """
    form = ELEMENTS[element]
    magnitude = bits & MAGNITUDE
    # A subnormal is a whole number of 2^-149; as a float that number shows its leading bit.
    is_subnormal = magnitude < 0x80_0000
    leading = torch.where(
        is_subnormal, magnitude.to(torch.float32).view(torch.int32), magnitude
    )  # fmt: skip
    exponent = (leading >> 23) - torch.where(is_subnormal, 149, 0)
    significand = (leading & 0x7F_FFFF) | 0x80_0000
    # |x| over the scale is significand · 2^power.
    power = exponent - scales - 23
    step = (power + 23 - form.mantissa_bits - form.least_exponent).clamp(min=0)
    shift = step + form.least_exponent - power
    if words is None:
        # 25 bits less leave less than a half of what 24 bits can hold.
        shift = shift.clamp(max=25)
        half_less_one = (1 << (shift - 1)) - 1
        whole = (significand + half_less_one + ((significand >> shift) & 1)) >> shift
    else:
        # 30 random bits at most; of a chance below that the last bits are lost.
        significand = significand >> (shift - 30).clamp(0, 31)
        shift = shift.clamp(max=30)
        chance = words.to(torch.int64) & ((1 << shift.to(torch.int64)) - 1)
        whole = (significand + chance.to(torch.int32)) >> shift
        whole = torch.where(magnitude == 0, 0, whole)
    code = ((step << form.mantissa_bits) + whole).clamp(max=form.largest_code)
    code = code | ((bits >> 24) & 0x80)
    return torch.where(scales == NAN_SCALE, NAN_CODE, code)


def widened(elements_TD: Tensor, scales: Tensor, rows: int) -> Tensor:
    """Return the numbers of block FP8 in fp32; a scale for each ``rows`` x 128 elements."""
    return elements_TD.view(torch.float8_e4m3fn).float() * spread(
        scales, elements_TD, rows, WIDE_BLOCK
    )

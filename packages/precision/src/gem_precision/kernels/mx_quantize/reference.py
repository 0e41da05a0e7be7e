"""The mathematics of ``mx_quantize`` in plain torch, on the bits of the numbers.

A block is 32 elements of a row, 32 of a column, or a square of 32 x 32; at a ragged edge it is what
is left, filled up with zeros. Let a be its largest magnitude and m = 1.75 · 2^k the largest finite
magnitude of an element. The scale is 2^(s − 127), with the code s of

    rceil    the smallest power of two that is not below a / m in fp32
    floor    the largest power of two that is not above a, over 2^k

and s ≥ 0. With a = 2^e (1 + f) both need only e and f: a / m is at most 2^(e − k) exactly where
f ≤ 0.75. fp32 rounds only one quotient onto a power of two from above: at 2^-127, where its numbers
lie wider, that of the first f after 0.75. It counts as 0.75 there.

An element is x / 2^(s − 127), rounded to nearest even and cut to ±m. The division moves the
exponent, so that one rounding is left: the 24 bits of x lose all that lies under the element's
spacing. Decoding is exact, but for what is beyond fp32, which becomes its largest finite number.

A block with NaN or an infinity has s = 255, and all of its elements are NaN.

There is no backward: bytes have no derivative. A layer that computes on them writes its own.

Source: OCP Microscaling Formats 1.0 for the format and ``floor``; Mishra et al. 2025
(arXiv:2506.08027) for ``rceil``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_precision.elements import BLOCK, ELEMENTS, NAN_CODE, NAN_SCALE

_INFINITE = 0x7F80_0000  # bits of the infinity of fp32
_LARGEST = 0x7F7F_FFFF  # of its largest finite number
_NAN = 0x7FC0_0000
_MAGNITUDE = 0x7FFF_FFFF  # all bits but the sign


def mx_quantize_reference(
    x_TD: Tensor, *, scaling: str, element: str, along: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return elements and scales by rows, then by columns; arguments as in the operator.

    What is not asked for is empty. Square blocks are returned as if they were rows.
    """
    nothing = x_TD.new_empty((0, 0), dtype=torch.uint8)
    bits_TD = _bits(x_TD)
    found = []
    for is_asked, block in (
        (along in ("rows", "both"), (1, BLOCK)),
        (along == "square", (BLOCK, BLOCK)),
        (along in ("columns", "both"), (BLOCK, 1)),
    ):
        if is_asked:
            scales = _scale_codes(_largest(bits_TD & _MAGNITUDE, *block), scaling, element)
            elements_TD = _element_codes(bits_TD, _spread(scales, x_TD, *block), element)
            found += [elements_TD.to(torch.uint8), scales.to(torch.uint8)]
    if along == "both":
        return found[0], found[1], found[2], found[3]
    if along == "columns":
        return nothing, nothing.clone(), found[0], found[1]
    return found[0], found[1], nothing, nothing.clone()


def mx_dequantize_reference(
    elements_TD: Tensor, scales: Tensor, *, element: str, along: str
) -> Tensor:
    """Return the numbers in fp32; arguments as in the operator."""
    form = ELEMENTS[element]
    block = {"rows": (1, BLOCK), "columns": (BLOCK, 1), "square": (BLOCK, BLOCK)}[along]
    codes_TD = elements_TD.to(torch.int32)
    scales_TD = _spread(scales.to(torch.int32), elements_TD, *block)
    magnitude = codes_TD & 0x7F
    step = (magnitude >> form.mantissa_bits).clamp(min=1) - 1
    whole = magnitude - (step << form.mantissa_bits)
    power = step + form.least_exponent + scales_TD - 127
    as_float = whole.to(torch.float32).view(torch.int32)
    exponent = (as_float >> 23) + power
    normal = as_float + (power << 23)
    subnormal = whole << (power + 149).clamp(0, 24)
    bits = torch.where(exponent >= 1, normal, subnormal)
    bits = torch.where(exponent >= 255, _LARGEST, bits)
    bits = torch.where(whole == 0, 0, bits)
    bits = torch.where(magnitude == form.infinite_code, _INFINITE, bits)
    bits = bits | ((codes_TD & 0x80) << 24)
    is_nan = (magnitude > form.largest_code) & (magnitude != form.infinite_code)
    is_nan = is_nan | (scales_TD == NAN_SCALE)
    return torch.where(is_nan, _NAN, bits).view(torch.float32)


def _bits(x: Tensor) -> Tensor:
    """Return the bits of the fp32 numbers; not by a cast, which may flush subnormals."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).to(torch.int32) << 16
    return x.to(torch.float32).view(torch.int32)


def _largest(magnitude_TD: Tensor, rows: int, columns: int) -> Tensor:
    """Return the largest magnitude of each block; bits order magnitudes, NaN above all."""
    t, d = magnitude_TD.shape
    filled = F.pad(magnitude_TD, (0, -d % columns, 0, -t % rows))
    blocks = filled.reshape(-(-t // rows), rows, -(-d // columns), columns)
    return blocks.amax(dim=(1, 3))


def _spread(codes: Tensor, like_TD: Tensor, rows: int, columns: int) -> Tensor:
    """Return the code of each element's block."""
    t, d = like_TD.shape
    tall = codes.repeat_interleave(rows, dim=0)[:t]
    return tall.repeat_interleave(columns, dim=1)[:, :d]


def _scale_codes(largest: Tensor, scaling: str, element: str) -> Tensor:
    code = (largest >> 23) - ELEMENTS[element].largest_exponent
    if scaling == "mxfp8_rceil":
        code = code + ((largest & 0x7F_FFFF) > 0x60_0000 + (code == 0).to(torch.int32))
    return torch.where(largest >= _INFINITE, NAN_SCALE, code.clamp(min=0))


def _element_codes(bits: Tensor, scales: Tensor, element: str) -> Tensor:
    form = ELEMENTS[element]
    magnitude = bits & _MAGNITUDE
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
    # 25 bits less leave less than a half of what 24 bits can hold.
    shift = (step + form.least_exponent - power).clamp(max=25)
    half_less_one = (1 << (shift - 1)) - 1
    whole = (significand + half_less_one + ((significand >> shift) & 1)) >> shift
    code = ((step << form.mantissa_bits) + whole).clamp(max=form.largest_code)
    code = code | ((bits >> 24) & 0x80)
    return torch.where(scales == NAN_SCALE, NAN_CODE, code)

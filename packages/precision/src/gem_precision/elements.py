"""What the bits of an MXFP8 element mean, as plain integers; imports no torch.

An element is a sign bit and seven bits that count upwards with the magnitude. They are
``(step << mantissa_bits) + whole``, and the magnitude is ``whole · 2^(step + least_exponent)``:
subnormals are the step 0, and in every other the whole number has its leading bit set.
"""

from dataclasses import dataclass

BLOCK = 32  # elements along a side of a block of MXFP8
WIDE_BLOCK = 128  # and of block FP8
CHANCE_BLOCKS = 4  # blocks of a row that share a counter of random words
NAN_SCALE = 255  # of a block that holds NaN or an infinity
NAN_CODE = 0x7F  # a NaN in both formats of an element


@dataclass(frozen=True, slots=True)
class Element:
    """One format of an element.

    Attributes:
        mantissa_bits: stored bits of the mantissa.
        least_exponent: of the smallest magnitude above zero, a power of two.
        largest_exponent: of the largest finite magnitude, which is 1.75 · 2^largest_exponent.
        largest_code: its seven bits.
        infinite_code: seven bits of the infinity; above every code where there is none.
    """

    mantissa_bits: int
    least_exponent: int
    largest_exponent: int
    largest_code: int
    infinite_code: int


ELEMENTS: dict[str, Element] = {
    "e4m3": Element(3, -9, 8, 0x7E, 0x80),
    "e5m2": Element(2, -16, 15, 0x7B, 0x7C),
}

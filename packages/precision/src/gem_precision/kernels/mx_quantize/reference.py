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
spacing. Decoding to fp32 is exact, but for what is beyond it, which becomes its largest finite
number; to bf16 and fp16 it is the same, rounded to the nearest even and cut at their largest.

A block with NaN or an infinity has s = 255, and all of its elements are NaN.

With a seed an element is rounded to one of its two neighbours by chance: with 2^n values of fp32 in
the gap between them, an n-bit random word is added below the last bit that stays. The expectation
of the element is then x over the scale. A word is Philox of the element's row and column, and of
the direction of its block.

There is no backward: bytes have no derivative. A layer that computes on them writes its own.

Source: OCP Microscaling Formats 1.0 for the format and ``floor``; Mishra et al. 2025
(arXiv:2506.08027) for ``rceil``.
"""

import torch
from torch import Tensor

from gem_opkit.stochastic import philox_words
from gem_precision.codes import (
    INFINITE,
    MAGNITUDE,
    bits_of,
    element_codes,
    largest_of_blocks,
    scale_codes,
    spread,
)
from gem_precision.elements import BLOCK, CHANCE_BLOCKS, ELEMENTS, NAN_SCALE

_LARGEST = 0x7F7F_FFFF  # bits of the largest finite number of fp32
_NAN = 0x7FC0_0000
_NAN_OF_16_BITS = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def mx_quantize_reference(
    x_TD: Tensor, *, scaling: str, element: str, along: str, seed: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return elements and scales by rows, then by columns; arguments as in the operator.

    What is not asked for is empty. Square blocks are returned as if they were rows.
    """
    nothing = x_TD.new_empty((0, 0), dtype=torch.uint8)
    bits_TD = bits_of(x_TD)
    found = []
    for is_asked, block in (
        (along in ("rows", "both"), (1, BLOCK)),
        (along == "square", (BLOCK, BLOCK)),
        (along in ("columns", "both"), (BLOCK, 1)),
    ):
        if is_asked:
            scales = scale_codes(largest_of_blocks(bits_TD & MAGNITUDE, *block), scaling, element)
            words_TD = None if seed is None else _words(seed, x_TD, int(block == (BLOCK, 1)))
            elements_TD = element_codes(bits_TD, spread(scales, x_TD, *block), element, words_TD)
            found += [elements_TD.to(torch.uint8), scales.to(torch.uint8)]
    if along == "both":
        return found[0], found[1], found[2], found[3]
    if along == "columns":
        return nothing, nothing.clone(), found[0], found[1]
    return found[0], found[1], nothing, nothing.clone()


def _words(seed: int, like_TD: Tensor, orientation: int) -> Tensor:
    """Draw a random word for each element, from its row and column alone."""
    rows, width = like_TD.shape
    t = torch.arange(rows, device=like_TD.device)[:, None]
    d = torch.arange(width, device=like_TD.device)[None, :]
    tile = CHANCE_BLOCKS * BLOCK
    four = philox_words(seed, t, d // tile, d % tile // 4, torch.full_like(t, orientation))
    return torch.stack(four).gather(0, (d % 4).expand(rows, width)[None])[0]


def mx_dequantize_reference(
    elements_TD: Tensor,
    scales: Tensor,
    *,
    element: str,
    along: str,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the numbers; arguments as in the operator."""
    form = ELEMENTS[element]
    block = {"rows": (1, BLOCK), "columns": (BLOCK, 1), "square": (BLOCK, BLOCK)}[along]
    codes_TD = elements_TD.to(torch.int32)
    scales_TD = spread(scales.to(torch.int32), elements_TD, *block)
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
    bits = torch.where(magnitude == form.infinite_code, INFINITE, bits)
    bits = bits | ((codes_TD & 0x80) << 24)
    is_nan = (magnitude > form.largest_code) & (magnitude != form.infinite_code)
    is_nan = is_nan | (scales_TD == NAN_SCALE)
    y_TD = torch.where(is_nan, _NAN, bits).view(torch.float32)
    if dtype == torch.float32:
        return y_TD
    most = torch.finfo(dtype).max
    narrow_TD = torch.where(y_TD.isinf(), y_TD, y_TD.clamp(-most, most)).to(dtype)
    # Which NaN a cast makes depends on the processor.
    nan = _NAN_OF_16_BITS[dtype]
    return torch.where(y_TD.isnan(), nan, narrow_TD.view(torch.int16)).view(dtype)

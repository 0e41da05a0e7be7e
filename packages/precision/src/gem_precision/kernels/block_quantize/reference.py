"""The mathematics of ``block_quantize`` in plain torch, on the bits of the numbers.

A block is 128 elements of a row, or a square of 128 x 128; at a ragged edge it is what is left.
With a its largest magnitude, the scale is the smallest power of two that is not below a / 448 in
fp32, and at least 2^-126, so that it is a normal number. An element is x over the scale in E4M3,
rounded to nearest even; nothing is cut, because no quotient is above 448.

Scales are powers of two although their format is fp32: the division is then exact, so that every
element is rounded once, and the bytes are the same on every device. E4M3 is a floating-point
format, so that up to a factor of two of unused range costs no precision but in its subnormals.

A block with NaN or an infinity has the scale NaN and elements NaN.

Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3, for the blocks.
"""

import torch
from torch import Tensor

from gem_precision.codes import (
    MAGNITUDE,
    bits_of,
    element_codes,
    largest_of_blocks,
    scale_codes,
    spread,
)
from gem_precision.elements import NAN_SCALE, WIDE_BLOCK


def block_quantize_reference(
    x_TD: Tensor, *, block: str, turned: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return elements, scales and elements of the transposed matrix; arguments as in the op."""
    tall = WIDE_BLOCK if block == "128x128" else 1
    bits_TD = bits_of(x_TD)
    codes = scale_codes(
        largest_of_blocks(bits_TD & MAGNITUDE, tall, WIDE_BLOCK), "mxfp8_rceil", "e4m3"
    ).clamp(min=1)
    elements_TD = element_codes(bits_TD, spread(codes, x_TD, tall, WIDE_BLOCK), "e4m3")
    elements_TD = elements_TD.to(torch.uint8)
    scales = torch.where(codes == NAN_SCALE, 0x7FC0_0000, codes << 23).view(torch.float32)
    nothing = elements_TD.new_empty((0, 0))
    return (
        nothing if turned == "only" else elements_TD,
        scales if tall > 1 else scales.T.contiguous(),
        nothing.clone()
        if turned == "no"
        else elements_TD.T.clone(memory_format=torch.contiguous_format),
    )

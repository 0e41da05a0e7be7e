"""What the plain attention kernels share: precision, exponentials, and what is not specialised."""

import triton
import triton.language as tl

# Products of float32 on the ordinary units. Three TF32 products take less than half the time, but a
# tensor core cuts off every partial sum: a score near -50 came out 6 units in the last place wrong.
PRECISION = tl.constexpr("ieee")
# Each would otherwise be a constant where it is 1 or a multiple of 16, and new lengths new code.
COUNTS = ["q_tokens", "k_tokens", "batch", "left", "right"]


@triton.jit
def exponential(x, NATURAL: tl.constexpr):
    """Return e^x where NATURAL, else 2^x."""
    return tl.exp(x) if NATURAL else tl.exp2(x)


@triton.jit
def add_product(acc, a, b, factor, APART: tl.constexpr):
    """Return acc + a @ b; where APART the product is summed by itself first.

    On the ordinary units one chain of additions would run through all tiles and round every term to
    the size of the whole: of 513 unnormalised weights that was three times the error of a blocked
    sum. The factor of 1 keeps the compiler from joining the two.
    """
    if APART:
        return acc + tl.dot(a, b, input_precision=PRECISION) * (1.0 + 0.0 * factor)
    return tl.dot(a, b, acc, input_precision=PRECISION)

"""Device functions for Triton kernels of several packages: stochastic rounding.

Imports triton, so kernels import it and nothing else does. ``gem_opkit.stochastic`` holds the same
functions in plain torch, with equal bits.
"""

import triton
import triton.language as tl


@triton.jit
def round_stochastically(x, words, DTYPE: tl.constexpr):
    """Round fp32 to fp16 or bf16, up or down by chance; ``words`` are uint32.

    Infinity and NaN stay what they are. The result has the dtype DTYPE.
    """
    bits = x.to(tl.uint32, bitcast=True)
    if tl.bfloat16 == DTYPE:
        rounded = ((bits + (words & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(tl.float16 == DTYPE)
        rounded = ((bits + (words & 0x1FFF)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        # Below 2^-14 the neighbours lie 2^-24 apart, whatever the exponent is.
        size = tl.abs(x)
        steps = tl.floor(size * 16777216.0 + (words >> 8).to(tl.float32) * 5.9604644775390625e-08)
        small = steps * 5.9604644775390625e-08
        small = tl.where((bits >> 31) == 1, -small, small)
        rounded = tl.where(size < 6.103515625e-05, small, rounded)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, rounded, x).to(DTYPE)


@triton.jit
def words_of_columns(seed, c0, c1, c3, COLUMNS: tl.constexpr):
    """Draw a random word for each of COLUMNS columns of each row: uint32 [rows, COLUMNS].

    ``c0``, ``c1`` and ``c3`` are blocks of rows; the third counter is the column divided by four,
    and the column's place in the four words of Philox the rest. COLUMNS is a power of two, at
    least 4.
    """
    group = tl.arange(0, COLUMNS // 4)[None, :].to(tl.uint32)
    zero = group * 0
    a, b, c, d = tl.philox(
        seed,
        c0.to(tl.uint32)[:, None] + zero,
        c1.to(tl.uint32)[:, None] + zero,
        c0.to(tl.uint32)[:, None] * 0 + group,
        c3.to(tl.uint32)[:, None] + zero,
    )
    # join puts the last dim in order: ((a, c), (b, d)) read along the two new dims is a, b, c, d.
    pairs = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(pairs, (c0.shape[0], COLUMNS))

"""Device functions for Triton kernels of several packages: stochastic rounding.

Imports triton, so kernels import it and nothing else does. ``gem_opkit.stochastic`` holds the same
functions in plain torch, with equal bits.
"""

import triton
import triton.language as tl

from gem_opkit.stochastic import ROUNDS

_ROUNDS: tl.constexpr = tl.constexpr(ROUNDS)


@triton.jit
def round_stochastically(x, words, DTYPE: tl.constexpr):
    """Round fp32 to fp16 or bf16, up or down by chance; ``words`` are uint32.

    Infinity and NaN stay what they are. The result has the dtype DTYPE.
    """
    if tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True) + (words & 0xFFFF)
        rounded = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(tl.float16 == DTYPE)
        # Below 2^-14 the neighbours lie 2^-24 apart, whatever the exponent is; with 2^-14 added,
        # they differ in the bits in which those of larger values do.
        size = tl.abs(x)
        lift = tl.where(size < 6.103515625e-05, 6.103515625e-05, 0.0)
        bits = (size + lift).to(tl.uint32, bitcast=True) + (words & 0x1FFF)
        rounded = (bits & 0xFFFFE000).to(tl.float32, bitcast=True) - lift
        sign = x.to(tl.uint32, bitcast=True) & 0x80000000
        rounded = (rounded.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    # Infinity has no bits to add to; those of a NaN may overflow.
    return tl.where(x == x, rounded, x).to(DTYPE)


@triton.jit
def philox_words(seed, c0, c1, c2, c3):
    """Draw four random words, uint32, for each counter of four: Philox 4x32.

    ``seed`` is the key, 64 bits. Both halves of a product come from one multiplication, where
    ``tl.philox`` takes two.
    """
    key = (tl.full((), 0, tl.int64) + seed).to(tl.uint64)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def words_of_columns(seed, c0, c1, c3, COLUMNS: tl.constexpr):
    """Draw a random word for each of COLUMNS columns of each row: uint32 [rows, COLUMNS].

    ``c0``, ``c1`` and ``c3`` are blocks of rows; the third counter is the column divided by four,
    and the column's place in the four words of Philox the rest. COLUMNS is a power of two, at
    least 4.
    """
    group = tl.arange(0, COLUMNS // 4)[None, :].to(tl.uint32)
    zero = group * 0
    a, b, c, d = philox_words(
        seed,
        c0.to(tl.uint32)[:, None] + zero,
        c1.to(tl.uint32)[:, None] + zero,
        c0.to(tl.uint32)[:, None] * 0 + group,
        c3.to(tl.uint32)[:, None] + zero,
    )
    # join puts the last dim in order: ((a, c), (b, d)) read along the two new dims is a, b, c, d.
    pairs = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(pairs, (c0.shape[0], COLUMNS))

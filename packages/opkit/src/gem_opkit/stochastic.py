"""Stochastic rounding to 16 bits, and the random words for it, in plain torch.

A value between two neighbours of a narrow format becomes the upper one with the chance of its
distance from the lower one, so that its expectation is the value itself and small updates are not
lost. The words come from a counter, not from a state: whoever computes an element, in whatever
order, draws the same word. ``gem_opkit.device`` holds the same two functions for Triton kernels,
with equal bits.
"""

import torch
from torch import Tensor

from gem_opkit.errors import DtypeError, refusal

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
# With seven rounds or more the generator passes every test of BigCrush, says its source.
ROUNDS = 7


def philox_words(
    seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, *, rounds: int = ROUNDS
) -> tuple[Tensor, ...]:
    """Draw four random words for each counter: Philox 4x32.

    Args:
        seed: the key, 64 bits.
        c0: first 32 bits of the counters, int64; higher bits are ignored.
        c1: second 32 bits.
        c2: third 32 bits.
        c3: last 32 bits.
        rounds: of mixing; kernels know no other number than the default.

    Returns:
        four tensors of words in [0, 2³²), int64, in the shape that the counters broadcast to.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    c0, c1, c2, c3 = (c & _MASK for c in torch.broadcast_tensors(c0, c1, c2, c3))
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(rounds):
        # The products wrap in 64 bits, whose upper half is what the shift and the mask leave.
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((b >> 32) & _MASK) ^ c1 ^ k0, ((a >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = b & _MASK, a & _MASK
        k0, k1 = (k0 + _INCREMENTS[0]) & _MASK, (k1 + _INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def round_stochastically(x: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to fp16 or bf16, up or down by chance.

    Args:
        x: fp32.
        words: a random word in [0, 2³²) for each element, int64.
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Returns:
        x in ``dtype``: one of the two neighbours of each value, and the value itself where the
        format holds it. Infinity and NaN stay what they are; beyond the largest value it is
        infinity, as in rounding to the nearest.

    Raises:
        DtypeError: x is not fp32, or another ``dtype``.

    Numerics: the chance is exact; only of fp16 values below 2^-14, bits below 2^-37 are first
        rounded to the nearest. fp16 uses the low 13 bits of a word, bf16 the low 16.
    """
    if x.dtype != torch.float32:
        raise DtypeError(
            refusal("round_stochastically", "x", must="be fp32", got=x.dtype, fix="convert it")
        )
    lift = torch.zeros_like(x)
    if dtype == torch.bfloat16:
        bits, chance = 16, x
    elif dtype == torch.float16:
        # Below 2^-14 the neighbours lie 2^-24 apart, whatever the exponent is; with 2^-14 added,
        # they differ in the bits in which those of larger values do.
        lift = torch.where(x.abs() < 2.0**-14, 2.0**-14, lift)
        bits, chance = 13, x.abs() + lift
    else:
        raise DtypeError(
            refusal(
                "round_stochastically",
                "dtype",
                must="be torch.float16 or torch.bfloat16",
                got=dtype,
                fix="other formats are not rounded by chance",
            )
        )
    moved = (chance.view(torch.int32).to(torch.int64) & _MASK) + (words & (2**bits - 1))
    moved &= _MASK - (2**bits - 1)
    # As a signed word, which int32 holds.
    rounded = (moved - ((moved >> 31) << 32)).to(torch.int32).view(torch.float32)
    # Infinity has no bits to add to; those of a NaN may overflow.
    return torch.where(x.isnan(), x, torch.copysign(rounded - lift, x)).to(dtype)

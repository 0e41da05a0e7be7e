"""The random Hadamard transform: a rotation that spreads an outlier over its neighbours.

Signs are drawn for the columns, then blocks of each row are multiplied by a Hadamard matrix. Both
are rotations: a product of two matrices that were transformed along the dim that it sums over, with
one seed, is what it was, while a format with one scale a block holds both factors better where one
column is much larger than the others. Plain torch, differentiable.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_opkit.errors import ConfigError, ShapeError, refusal
from gem_opkit.stochastic import philox_words

_OP = "random_hadamard"
_ROTATED = 32  # the block of MXFP8


def random_hadamard(x: Tensor, *, seed: int, block: int = 32, inverse: bool = False) -> Tensor:
    """Rotate blocks of the last dim.

        y = (x · s) H / sqrt(block),   s = ±1 a column, drawn from the seed

    Args:
        x: floats of any shape whose last dim is a multiple of the block.
        seed: of the signs, 64 bits.
        block: a power of two.
        inverse: undo it, for the same seed.

    Returns:
        y of the same shape and dtype.

    Raises:
        ShapeError: a last dim that is no multiple of the block.
        ConfigError: a block that is no power of two.

    Numerics: in fp32 inside, or wider where x is.
    Cost: 2 · block FLOPs an element.
    Source: Halko et al. 2011 (arXiv:0909.4061), section 4.6; Chee et al. 2023 (arXiv:2307.13304)
        for its use before rounding.
    """
    if block < 1 or block & (block - 1):
        raise ConfigError(refusal(_OP, "block", must="be a power of two", got=block, fix="take 32"))
    if x.ndim == 0 or x.shape[-1] % block:
        raise ShapeError(
            refusal(_OP, "x", must=f"end in a multiple of {block}", got=tuple(x.shape),
                    fix="take a smaller block, or fill it up with zeros")
        )  # fmt: skip
    width = x.shape[-1]
    wide = x.float() if x.element_size() < 4 else x
    signs = _signs(seed, width, x.device).to(wide.dtype)
    matrix = _hadamard(block, x.device).to(wide.dtype) * block**-0.5
    wide = wide if inverse else wide * signs
    with torch.autocast(x.device.type, enabled=False):  # its products would round the rotation
        turned = (wide.unflatten(-1, (width // block, block)) @ matrix).flatten(-2)
    return (turned * signs if inverse else turned).to(x.dtype)


def rotated_factor(x_TD: Tensor, seed: int) -> Tensor:
    """Rotate a factor of a product along the dim that the product sums over, its last.

    Args:
        x_TD: fp32, bf16 or fp16; a width that is no multiple of 32 is filled up with zeros, which
            add nothing to a product.
        seed: of the signs; both factors of a product take the same.

    Returns:
        the rotated factor in fp32, contiguous, its width a multiple of 32.

    Source: as ``random_hadamard``.
    """
    short = -x_TD.shape[1] % _ROTATED
    wide = x_TD.float()
    return random_hadamard(F.pad(wide, (0, short)) if short else wide, seed=seed, block=_ROTATED)


def _signs(seed: int, width: int, device: torch.device) -> Tensor:
    column = torch.arange(width, device=device)
    zero = torch.zeros_like(column)
    return 1 - 2 * (philox_words(seed, column, zero, zero, zero)[0] & 1)


def _hadamard(size: int, device: torch.device) -> Tensor:
    """Sylvester's matrix: +1 where an even number of bits stands in both indices."""
    index = torch.arange(size, device=device)
    both = index[:, None] & index[None, :]
    odd = torch.zeros_like(both)
    for bit in range(size.bit_length()):
        odd = odd ^ (both >> bit)
    return 1 - 2 * (odd & 1)

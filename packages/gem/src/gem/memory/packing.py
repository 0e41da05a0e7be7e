"""Activations in 8 or 4 bits: what a recipe's ``memory.kept`` packs them as.

Blocks of 32 numbers share a power of two. 8 bits are MXFP8 (E4M3) by `gem_precision.ops`; 4 bits
are E2M1, the element of MXFP4, packed here in plain torch, in pieces, as a product never reads it.
"""

import torch
from torch import Tensor

from gem_parallel.recompute.packing import Packing
from gem_precision.ops import MxMatrix, mx_dequantize, mx_quantize

BLOCK = 32
# Magnitudes of E2M1, and the middles between them.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# Numbers that are packed at a time, so that the wide ones between take little memory.
_PIECE = 2**22


class Fp8Packing:
    """A byte a number, and one for each 32: 52 % of bf16."""

    def bytes_of(self, elements: int) -> int:
        """Memory of packed numbers.

        Args:
            elements: how many, a multiple of 32.

        Returns:
            bytes.
        """
        return elements + elements // BLOCK

    def pack(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """Shorten a matrix.

        Args:
            x_TD: fp32, bf16 or fp16, contiguous, its width a multiple of 32.

        Returns:
            elements and scales, uint8.

        Numerics: the scale is rounded up, so that nothing is cut; each number then differs by at
            most 2^-4 of itself, or 2^-10 of its block's largest where it is far below it.
        """
        matrix = mx_quantize(x_TD)
        return matrix.elements_TD, matrix.scales

    def unpack(self, packed: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Give a matrix back.

        Args:
            packed: from `pack`.
            dtype: that it had.

        Returns:
            the matrix; in bf16 and fp32 exactly the packed numbers, in fp16 rounded once; cut at
            the largest of its dtype.
        """
        elements_TD, scales = packed
        return mx_dequantize(MxMatrix(elements_TD, scales, "e4m3", "rows"), dtype=dtype)


class Fp4Packing:
    """Half a byte a number, and one for each 32: 27 % of bf16. Slow: no kernel computes it."""

    def bytes_of(self, elements: int) -> int:
        """Memory of packed numbers.

        Args:
            elements: how many, a multiple of 32.

        Returns:
            bytes.
        """
        return elements // 2 + elements // BLOCK

    def pack(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """Shorten a matrix.

        Args:
            x_TD: fp32, bf16 or fp16, contiguous, its width a multiple of 32.

        Returns:
            elements, two in a byte, (rows, width / 2), and scales, (rows, width / 32), uint8.

        Numerics: the scale is rounded up, so that nothing is cut; each number differs by at most
            1/5 of its block's largest, which is reached where that lies midway from 4 to 6.
        """
        rows, width = x_TD.shape
        flat = x_TD.reshape(-1, BLOCK)
        pairs = x_TD.new_empty((flat.shape[0], BLOCK // 2), dtype=torch.uint8)
        scales = x_TD.new_empty(flat.shape[0], dtype=torch.uint8)
        middles = torch.tensor(_MIDDLES, device=x_TD.device)
        for piece in _pieces(flat.shape[0]):
            x = flat[piece].float()
            own = _scales_up(x.abs().amax(dim=1) / _MAGNITUDES[-1])
            scaled = x / _powers(own, torch.float32)[:, None]
            # Halves go to the even neighbour by half of the middles, away from 0 by the others:
            # which one matters to nobody who multiplies by a gradient.
            codes = torch.bucketize(scaled.abs(), middles, out_int32=True).to(torch.uint8)
            codes |= torch.signbit(x).to(torch.uint8) << 3
            pairs[piece] = codes[:, ::2] | (codes[:, 1::2] << 4)
            # Not a number in, not a number out.
            scales[piece] = torch.where(x.isfinite().all(dim=1), own, 255)
        return pairs.view(rows, width // 2), scales.view(rows, width // BLOCK)

    def unpack(self, packed: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Give a matrix back.

        Args:
            packed: from `pack`.
            dtype: that it had.

        Returns:
            the matrix; blocks that held no number are NaN.
        """
        pairs_TD, scales = packed
        rows, width = pairs_TD.shape[0], 2 * pairs_TD.shape[1]
        table = torch.tensor(
            [*_MAGNITUDES, *(-x for x in _MAGNITUDES)], dtype=torch.float32, device=pairs_TD.device
        )
        flat, own = pairs_TD.reshape(-1, BLOCK // 2), scales.flatten()
        out = torch.empty((flat.shape[0], BLOCK), dtype=dtype, device=pairs_TD.device)
        for piece in _pieces(flat.shape[0]):
            codes = torch.stack([flat[piece] & 15, flat[piece] >> 4], dim=2).flatten(1)
            scale = _powers(own[piece], torch.float32)
            scale = torch.where(own[piece] == 255, torch.nan, scale)
            out[piece] = (table[codes.int()] * scale[:, None]).to(dtype)
        return out.view(rows, width)


PACKINGS: dict[str, type[Fp8Packing] | type[Fp4Packing]] = {"fp8": Fp8Packing, "fp4": Fp4Packing}


def packing_of(kept: str) -> Packing | None:
    """Choose a packing by the recipe's word.

    Args:
        kept: ``as_is``, ``fp8`` or ``fp4``.

    Returns:
        the packing; None for ``as_is``.
    """
    return PACKINGS[kept]() if kept in PACKINGS else None


def _pieces(blocks: int) -> list[slice]:
    each = _PIECE // BLOCK
    return [slice(low, low + each) for low in range(0, blocks, each)]


def _powers(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(s - 127), exactly: s is the exponent of a float, and 0 is one below the least of them."""
    bits = scales.int() << 23
    return (bits | ((scales == 0).int() << 22)).view(torch.float32).to(dtype)


def _scales_up(x: Tensor) -> Tensor:
    """The least s with 2^(s - 127) >= x, for finite x at least 0; uint8."""
    mantissa, exponent = torch.frexp(x)
    # x is mantissa * 2^exponent with a mantissa from 1/2 up to 1.
    power = exponent - (mantissa == 0.5).int()
    return torch.where(x > 0, power + 127, 0).clamp(0, 254).to(torch.uint8)

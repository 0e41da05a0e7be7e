"""Tiles of one sequence of a packed batch through TMA, in plain Triton.

The descriptor (``gem_attention.portable.ragged.descriptor`` makes it) has two dims more than the
tensor. Their strides cancel by the wrap-around of 64-bit addresses, so that the coordinates
(2³⁰, end, 2³⁰ - length + row, column) point at a row of the sequence that ends before token ``end``
and has ``length`` rows, and everything from ``length`` on lies outside: it is read as 0 and never
written. That holds for any sequence of the batch with one descriptor and without a mask.
"""

import triton
import triton.language as tl

_MIDDLE = tl.constexpr(2**30)


@triton.jit
def load_ragged(descriptor, end, length, row, column):
    """Load rows from ``row`` on; those from ``length`` on are 0."""
    tile = descriptor.load([_MIDDLE, end, _MIDDLE - length + row, column])
    return tl.reshape(tile, descriptor.block_shape[2:])


@triton.jit
def store_ragged(descriptor, end, length, row, column, values):
    """Store rows from ``row`` on, but none from ``length`` on."""
    tile = tl.reshape(values.to(descriptor.dtype), descriptor.block_shape)
    descriptor.store([_MIDDLE, end, _MIDDLE - length + row, column], tile)

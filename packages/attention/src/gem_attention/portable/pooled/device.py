"""Rows of the seeds of several heads in one tile: where they are, loading and storing them."""

import triton
import triton.language as tl

# Each would otherwise be a constant where it is 1 or a multiple of 16, and new lengths new code.
COUNTS = ["k_tokens", "batch", "seeds", "split"]


@triton.jit
def row_offsets(r, stride_p, stride_h, GROUP: tl.constexpr):
    """Return where rows r of a group begin, seen from the group's first head."""
    if GROUP == 1:
        return r * stride_p
    return r // GROUP * stride_p + r % GROUP * stride_h


@triton.jit
def load_tile(ptr, at, held, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Load whole rows at offsets; those that are not held are 0."""
    w = tl.arange(0, BLOCK_WIDTH)
    mask = held[:, None]
    if WIDTH != BLOCK_WIDTH:
        mask = mask & (w < WIDTH)[None, :]
    return tl.load(ptr + (at[:, None] + w[None, :]), mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, at, held, values, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Store whole rows at offsets where they are held."""
    w = tl.arange(0, BLOCK_WIDTH)
    stored = held[:, None] & (w < WIDTH)[None, :]
    tl.store(ptr + (at[:, None] + w[None, :]), values.to(ptr.dtype.element_ty), mask=stored)

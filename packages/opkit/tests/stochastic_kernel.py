"""A kernel that draws words and rounds by them, for the test of ``gem_opkit.device``."""

import triton
import triton.language as tl

from gem_opkit.device import round_stochastically, words_of_columns


@triton.jit
def rounding_kernel(x_ptr, words_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    drawn = words_of_columns(7, row, row + 3, row * 0 + 9, COLUMNS)
    at = row[:, None] * COLUMNS + column[None, :]
    tl.store(words_ptr + at, drawn.to(tl.int64))
    out = round_stochastically(tl.load(x_ptr + at), drawn, out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out)

"""Moves packed rows into the padded chunks of a plan and back, in the dtype to compute in.

Packed tensors are handled as rows (tokens, heads · width): reading and writing whole rows costs a
third of moving each head by itself. Inside a chunk a head is a strided slice, which a batched
product reads as it is; what a product writes must be contiguous, so results come by head and are
merged when they are written back.

Private to the reference implementations.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_attention.chunked.plan import Chunk, Rows


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def token_rows(x: Tensor) -> Tensor:
    """Return tokens (T, heads, width) as contiguous wide rows (T, heads · width)."""
    wide = x.to(wide_dtype(x.dtype))
    return wide.reshape(x.shape[0], x.shape[1] * x.shape[2]).contiguous()


def result_rows(rows: int, width: int, like: Tensor) -> Tensor:
    """Return zeroed rows to write results to, and one more, where padding goes."""
    return torch.zeros(rows + 1, width, dtype=wide_dtype(like.dtype), device=like.device)


def read(packed: Tensor, rows: Rows, heads: int, *, zero_padding: bool = False) -> Tensor:
    """Return the rows of a chunk.

    Args:
        packed: rows (T, heads · width).
        rows: which to read; at least one task, with at least one row.
        heads: heads of a row.
        zero_padding: fill padding with 0; otherwise it repeats a row of its own task.

    Returns:
        (tasks, rows a task, heads, width), memory of its own.
    """
    got = packed.index_select(0, rows.gather)
    if zero_padding and rows.padding is not None:
        got.index_fill_(0, rows.padding, 0.0)
    return got.view(rows.tasks, -1, heads, packed.shape[1] // heads)


def write(packed: Tensor, rows: Rows, by_head: Tensor) -> None:
    """Write the results (heads, tasks, rows a task, width) of a chunk; no two have one place."""
    packed.index_copy_(0, rows.scatter, _merge_heads(by_head))


def add(packed: Tensor, rows: Rows, by_head: Tensor) -> None:
    """Add the results (heads, tasks, rows a task, width) of a chunk to their rows."""
    packed.index_add_(0, rows.scatter, _merge_heads(by_head))


def _merge_heads(x: Tensor) -> Tensor:
    heads, tasks, count, width = x.shape
    return x.permute(1, 2, 0, 3).reshape(tasks * count, heads * width)


def score_buffer(chunks: Sequence[Chunk], like: Tensor) -> Tensor:
    """Return flat wide memory for the scores of the largest chunk and one head.

    Fresh memory for each product would cost more, in page faults, than the product.
    """
    largest = max((chunk.tasks * chunk.queries * chunk.keys for chunk in chunks), default=0)
    return torch.empty(largest, dtype=wide_dtype(like.dtype), device=like.device)


def product(
    buffer: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    scale: float = 1.0,
    shift: Tensor | None = None,
) -> Tensor:
    """Compute scale · left rightᵀ + shift into a buffer.

    Args:
        buffer: flat memory, from ``score_buffer``.
        left: (tasks, queries, width).
        right: (tasks, keys, width).
        scale: factor of the product.
        shift: broadcast over the result; None for 0.

    Returns:
        (tasks, queries, keys), a view of the buffer.
    """
    shape = (left.shape[0], left.shape[1], right.shape[1])
    out = buffer[: shape[0] * shape[1] * shape[2]].view(shape)
    if shift is None:
        return out.baddbmm_(left, right.transpose(1, 2), beta=0.0, alpha=scale)
    return torch.baddbmm(shift, left, right.transpose(1, 2), alpha=scale, out=out)


def first_of_group(head: int, heads: int, groups: int) -> bool:
    """Whether no head before this one reads the same key head."""
    return head % (heads // groups) == 0

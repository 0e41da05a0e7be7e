"""The collectives that data-parallel training needs, each a no-op on one rank.

Left out until it is built: overlap, copy-engine collectives.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from gem_opkit.errors import ShapeError
from gem_parallel.launch import World

# Torch 2.13 has new names for these two and warns of the old ones, which 2.11 has alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_single(
    out: Tensor, own: Tensor, *, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Put equal parts of all ranks of a group side by side, in rank order.

    Args:
        out: is overwritten; first dim that of ``own`` times the ranks.
        own: this rank's part, contiguous, the same shape and dtype on every rank.
        group: ranks that take part; None for all.
        async_op: return before it has ended.

    Returns:
        what to wait for with ``async_op``; else None.
    """
    return _all_gather(out, own, group=group, async_op=async_op)


def reduce_scatter_single(
    out: Tensor, parts: Tensor, *, group: dist.ProcessGroup | None = None
) -> None:
    """Sum equal parts over the ranks of a group, each rank its own part.

    Args:
        out: is overwritten with the sum of the ranks' parts of this rank.
        parts: one part for each rank, side by side along the first dim, contiguous.
        group: ranks that take part; None for all.
    """
    _reduce_scatter(out, parts, op=dist.ReduceOp.SUM, group=group)


def all_reduce_sum(value: Tensor, world: World) -> Tensor:
    """Sum a tensor over all ranks, in place.

    Args:
        value: the same shape and dtype on every rank, contiguous, on the world's device.
        world: the ranks.

    Returns:
        ``value``, which now holds the sum.
    """
    if world.grouped:
        dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return value


def all_gather_rows(rows: Tensor, world: World) -> Tensor:
    """Join tensors whose number of rows may differ from rank to rank.

    Args:
        rows: shape (n, ...) with the same trailing shape and dtype on every rank; n may be 0.
        world: the ranks.

    Returns:
        The rows of rank 0, then those of rank 1 and so on; the same on every rank. No gradient
        goes back through it on several ranks.

    Raises:
        ShapeError: ``rows`` is a scalar.
    """
    if rows.ndim == 0:
        raise ShapeError(
            "all_gather_rows: rows must have a first dim; got a scalar; reshape it to (1,)"
        )
    if world.size == 1:
        return rows
    count = torch.tensor([rows.shape[0]], dtype=torch.int64, device=rows.device)
    counts = [torch.empty_like(count) for _ in range(world.size)]
    dist.all_gather(counts, count)
    lengths = [int(n) for n in counts]
    # Every rank sends the longest length: gloo has no all-gather of unequal parts.
    longest = max(lengths)
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(parts, padded)
    return torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)])


def broadcast_tensors(tensors: Iterable[Tensor], world: World) -> None:
    """Overwrite every rank's tensors with those of rank 0, so that replicas start equal.

    Args:
        tensors: the same shapes, dtypes and order on every rank.
        world: the ranks.
    """
    if world.size > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


def barrier(world: World) -> None:
    """Wait until every rank has come here.

    Args:
        world: the ranks.
    """
    if world.size > 1:
        dist.barrier()

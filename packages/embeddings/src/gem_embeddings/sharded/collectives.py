"""The collectives of an engine, over one of its two axes, each counted.

Without a group nothing is sent and a result is a copy of the input, so callers need no cases.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renames the two below and warns of the old names; torch 2.11 has only those.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Done:
    """A collective that has ended already."""

    def wait(self) -> None:
        """Return at once."""


class Collectives:
    """Collectives over the ranks of one axis.

    Args:
        group: of the axis; None for one rank.
        size: its number of ranks.

    Attributes:
        group: as given.
        calls: name of the collective -> calls so far.
        sent_bytes: name of the collective -> bytes that this rank gave to it so far, its own share
            included.
        received_bytes: the same of what came back.
        talks: whether anything is sent.
        in_order: a collective begins after the one before has ended, as on the stream of NCCL, also
            where nobody has waited for that.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int) -> None:
        self.group = group
        self.in_order = group is not None and dist.get_backend(group) == "nccl"
        self.size, self.talks = size, group is not None
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self.received_bytes: Counter[str] = Counter()

    @classmethod
    def over(cls, mesh: DeviceMesh | None, axis: str, size: int, *, alone: bool = False) -> Self:
        """Make those of an axis of a mesh.

        Args:
            mesh: of all ranks; None for one.
            axis: its name.
            size: its number of ranks.
            alone: make a group of one rank too, which then talks to itself.
        """
        group = mesh.get_group(axis) if mesh is not None and (size > 1 or alone) else None
        return cls(group, size)

    def count(self, name: str, sent: Tensor, out: Tensor) -> None:
        """Note a collective, such as one that runs elsewhere.

        Args:
            name: of it.
            sent: what this rank gives.
            out: what comes back.
        """
        self.calls[name] += 1
        self.sent_bytes[name] += sent.numel() * sent.element_size()
        self.received_bytes[name] += out.numel() * out.element_size()

    def all_to_all(
        self,
        sent: Tensor,
        heard_splits: Sequence[int],
        sent_splits: Sequence[int],
        *,
        later: bool = False,
    ) -> tuple[Tensor, Any]:
        """Give each rank its part of a flat tensor.

        Args:
            sent: the parts for all ranks, in their order.
            heard_splits: elements from each rank.
            sent_splits: elements for each rank.
            later: return before it has ended.

        Returns:
            the parts of all ranks, in their order, and something to ``wait`` for before they are
            read. ``sent`` itself on one rank.
        """
        if self.group is None:
            return sent, Done()
        heard = sent.new_empty(sum(heard_splits))
        self.count("all_to_all", sent, heard)
        work = dist.all_to_all_single(
            heard, sent, list(heard_splits), list(sent_splits), group=self.group, async_op=later
        )
        return heard, work if later else Done()

    def all_gather(self, out: Tensor, sent: Tensor) -> Any:
        """Join equal parts of all ranks, in their order; returns something to ``wait`` for."""
        if self.group is None:
            out.copy_(sent)
            return Done()
        self.count("all_gather", sent, out)
        return _all_gather(out, sent, group=self.group, async_op=True)

    def all_gather_uneven(self, sent: Tensor, sizes: Sequence[int]) -> Tensor:
        """Join parts of different sizes.

        Args:
            sent: flat.
            sizes: of the parts of all ranks.

        Returns:
            the parts, in the order of the ranks.
        """
        if self.group is None:
            return sent
        # Padded to the longest: gloo has no gathering of unequal parts.
        longest = max(sizes)
        padded = sent.new_zeros(longest)
        padded[: sent.shape[0]] = sent
        joined = sent.new_empty(longest * self.size)
        self.all_gather(joined, padded).wait()
        parts = joined.split(longest) if longest else [joined]
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=False)])

    def all_reduce_sum(self, value: Tensor) -> None:
        """Replace a tensor by its sum over the ranks."""
        if self.group is None:
            return
        self.count("all_reduce", value, value)
        dist.all_reduce(value, op=dist.ReduceOp.SUM, group=self.group)

    def reduce_scatter_mean(self, out: Tensor, sent: Tensor) -> Any:
        """Give each rank the mean of its part; returns something to ``wait`` for."""
        if self.group is None:
            out.copy_(sent)
            return Done()
        self.count("reduce_scatter", sent, out)
        return _reduce_scatter(out, sent, op=dist.ReduceOp.AVG, group=self.group, async_op=True)

    def all_reduce_mean(self, value: Tensor) -> None:
        """Replace a tensor by its mean over the ranks."""
        if self.group is None:
            return
        self.count("all_reduce", value, value)
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=self.group)

"""All-gather by the copy engines of a host's GPUs, so that the multiprocessors compute meanwhile.

Each rank puts its part into a buffer that the others can read, and fetches theirs:

    meet    every rank's part lies in its buffer
    copy    for each peer: its part of its buffer -> the same place of the own one
    meet    nobody reads a buffer any more, so its owner may write it

A copy between peers is a ``cudaMemcpyAsync`` that no multiprocessor takes part in; the meetings
are one block of one kernel. NCCL gathers what is below the size from which this is faster.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from gem_opkit.errors import ShapeError, refusal
from gem_parallel.collectives import all_gather_single
from gem_parallel.copy_engine.buffers import BufferPool, SharedBuffer

_log = logging.getLogger(__name__)


def fetch_parts(buffer: SharedBuffer, part_bytes: int, *, rank: int, ranks: int) -> None:
    """Fill a buffer with the parts of all ranks, in rank order; the own one lies there already.

    Runs on the current stream. Each rank begins with another peer, so that no one is asked by all.

    Args:
        buffer: of the group; its first ``ranks * part_bytes`` bytes are written.
        part_bytes: of one rank.
        rank: this rank in the group.
        ranks: of the group.
    """
    buffer.meet()
    for step in range(1, ranks):
        peer = (rank + step) % ranks
        first = peer * part_bytes
        buffer.own[first : first + part_bytes].copy_(
            buffer.of(peer, first, part_bytes), non_blocking=True
        )
    buffer.meet()


class CopyEngineGather:
    """All-gathers of large tensors over one group of ranks.

    Args:
        group: ranks of one host that may read each other's memory; see
            `gem_parallel.copy_engine.reach.why_not`.
        pool: shared buffers of this group.
        at_least_bytes: of one rank, from which the copy engines are used.
    """

    def __init__(self, group: dist.ProcessGroup, pool: BufferPool, at_least_bytes: int) -> None:
        self.group, self.pool, self.at_least_bytes = group, pool, at_least_bytes

    def takes(self, part_bytes: int) -> bool:
        """Whether a part of so many bytes a rank is gathered by the copy engines."""
        return part_bytes >= self.at_least_bytes

    def gather(self, own: Tensor) -> Tensor:
        """Put equal parts of all ranks side by side, in rank order.

        Args:
            own: this rank's part, contiguous, of one shape and dtype on every rank.

        Returns:
            one dim, the parts of all ranks. Of a large part it is lent: let go of it soon, at the
            same place of the program on every rank.

        Raises:
            ShapeError: ``own`` is not contiguous.
        """
        if not own.is_contiguous():
            raise ShapeError(
                refusal("CopyEngineGather", "own", must="be contiguous", got=tuple(own.stride()),
                        fix="call contiguous() on it")
            )  # fmt: skip
        ranks, rank = self.group.size(), self.group.rank()
        part_bytes = own.numel() * own.element_size()
        if not self.takes(part_bytes) or not part_bytes:
            out = own.new_empty(own.numel() * ranks)
            all_gather_single(out, own.flatten(), group=self.group)
            return out
        out = self.pool.lend(own.numel() * ranks, own.dtype)
        out.narrow(0, rank * own.numel(), own.numel()).copy_(own.flatten())
        self.fetch(out)
        return out

    def fetch(self, out: Tensor) -> bool:
        """Fetch the peers' parts into a lent tensor that holds this rank's.

        Args:
            out: from this pool, or any other tensor.

        Returns:
            whether it was lent from this pool; nothing is done otherwise.
        """
        buffer = self.pool.buffer_of(out)
        if buffer is None:
            return False
        ranks = self.group.size()
        part_bytes = out.numel() * out.element_size() // ranks
        fetch_parts(buffer, part_bytes, rank=self.group.rank(), ranks=ranks)
        return True


class UnitGather(AllGather):
    """How one unit of torch's fully sharded data parallelism gathers its parameters.

    The first gather of a unit goes through NCCL and tells the size; by the time that a second one
    comes, in the backward pass, all units have told theirs, and buffers are made for the largest.

    Args:
        name: of the unit, for the log.
        gathers: of the unit's group.
    """

    def __init__(self, name: str, gathers: CopyEngineGather) -> None:
        self.name, self._gathers = name, gathers
        self._known = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Give the memory that parameters are gathered into.

        Args:
            size: one dim, elements of all ranks together.
            dtype: of the elements.
            device: of this rank.

        Returns:
            lent memory where the copy engines gather into it, else new memory.
        """
        (elements,) = (int(each) for each in size)
        gathers = self._gathers
        part_bytes = elements * dtype.itemsize // gathers.group.size()
        if not gathers.takes(part_bytes):
            if not self._known:
                self._known = True
                _log.info(
                    "%s: %.1f MiB a rank are gathered by NCCL, below %.1f MiB",
                    self.name, part_bytes / 2**20, gathers.at_least_bytes / 2**20,
                )  # fmt: skip
        elif self._known:
            return gathers.pool.lend(elements, dtype)
        else:
            self._known = True
            gathers.pool.expect(elements * dtype.itemsize)
            _log.info(
                "%s: %.1f MiB a rank are gathered by the copy engines",
                self.name, part_bytes / 2**20,
            )  # fmt: skip
        return torch.empty((elements,), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's protocol
    ) -> Any:
        """Gather.

        Args:
            output_tensor: from `allocate`; ``input_tensor`` is this rank's part of it.
            input_tensor: this rank's part.
            group: ranks that take part.
            async_op: return before it has ended.

        Returns:
            something to wait for where NCCL gathers with ``async_op``; None where the work lies
            on the current stream.
        """
        if self._gathers.fetch(output_tensor):
            return None
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class DefaultGather(AllGather):
    """Torch's own gathering, to put it back in the place of `UnitGather`."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Give new memory.

        Args:
            size: elements of all ranks together.
            dtype: of the elements.
            device: of this rank.
        """
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's protocol
    ) -> Any:
        """Gather by the group's own backend.

        Args:
            output_tensor: parts of all ranks.
            input_tensor: this rank's part.
            group: ranks that take part.
            async_op: return before it has ended.
        """
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)

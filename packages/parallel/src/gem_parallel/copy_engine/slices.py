"""Slices that ranks keep for long, fetched side by side by the copy engines when they are needed.

Unlike the parameters of a layer, which are written into a lent buffer each time, a slice lies where
its peers see it all the time: nothing is copied before a gathering, and the whole goes into memory
of the caller's own, which may come and go.

    meet    every rank's slice is written
    copy    each peer's slice -> its place in the whole
    meet    nobody reads a slice any more, so its owner may write it
"""

import logging
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gem_opkit.errors import ShapeError, refusal
from gem_parallel.copy_engine.buffers import SharedBuffer
from gem_parallel.copy_engine.choose import GatherChoice

_log = logging.getLogger(__name__)


class Waitable(Protocol):
    """What runs beside the current stream."""

    def wait(self) -> object:
        """Let the current stream wait for its end."""
        ...


class _OnStream:
    """Work that was given to a stream of its own."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait()


class SharedSlice:
    """One rank's slice, in memory that the ranks of its group read from each other.

    Args:
        group: the ranks.
        buffer: of the group, at least as large as a slice.
        elements: of a slice.
        dtype: of its elements.
        stream: that copies run on, beside whatever else the device does; None on a CPU.

    Attributes:
        own: (elements,), this rank's.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        buffer: SharedBuffer,
        elements: int,
        dtype: torch.dtype,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._group, self._buffer, self._stream = group, buffer, stream
        self._bytes = elements * dtype.itemsize
        self.own: Tensor = buffer.own[: self._bytes].view(dtype)

    def gather(self, whole: Tensor, *, after: Waitable | None = None) -> Waitable:
        """Begin to put the slices of all ranks side by side. Collective over the group.

        Args:
            whole: (ranks * elements,), contiguous, of the slice's dtype; overwritten. Its memory
                has to stay until what is returned was waited for.
            after: work that has to end before, such as one that still reads ``whole`` or writes a
                slice; besides, all that the current stream has been given by now ends before.

        Returns:
            something to ``wait`` for before the whole is read, and before the own slice is written.

        Raises:
            ShapeError: ``whole`` has another size or dtype, or is not contiguous.
        """
        ranks = self._group.size()
        fits = whole.dtype == self.own.dtype and whole.shape == (ranks * self.own.shape[0],)
        if not fits or not whole.is_contiguous():
            raise ShapeError(
                refusal(
                    "SharedSlice.gather",
                    "whole",
                    must=f"hold {ranks} slices of {self.own.shape[0]} x {self.own.dtype}",
                    got=f"{tuple(whole.shape)} x {whole.dtype}",
                    fix="pass one flat contiguous tensor for all ranks",
                )
            )
        if self._stream is None:
            self._fetch(whole, after)
            return _OnStream(None)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._fetch(whole, after)
            event = torch.cuda.Event()
            event.record()
        return _OnStream(event)

    def _fetch(self, whole: Tensor, after: Waitable | None) -> None:
        if after is not None:
            after.wait()
        ranks, rank = self._group.size(), self._group.rank()
        parts: Any = whole.view(torch.uint8).split(self._bytes)
        self._buffer.meet()
        # Each rank begins with another peer, so that no one is asked by all.
        for step in range(ranks):
            peer = (rank + step) % ranks
            if peer == rank:
                parts[rank].copy_(self._buffer.own[: self._bytes])
            else:
                parts[peer].copy_(self._buffer.of(peer, 0, self._bytes), non_blocking=True)
        self._buffer.meet()


class SliceGathers:
    """Gives a group's ranks slices that the copy engines gather, where that is faster.

    Every rank of the group makes it, and asks for slices, at the same places of its program.

    Args:
        group: ranks that keep a slice each.
        device: of this rank.
        choice: from which size on copies are taken.

    Attributes:
        at_least_bytes: of a slice, from which copies are taken; None for never.

    Raises:
        UnsupportedError: as `GatherChoice.from_bytes`.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, choice: GatherChoice
    ) -> None:
        self._group, self._device, self._choice = group, device, choice
        self.at_least_bytes = choice.from_bytes(group, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def slice(self, elements: int, dtype: torch.dtype) -> SharedSlice | None:
        """Make a slice; its content is undefined.

        Args:
            elements: of it, the same on every rank.
            dtype: of its elements.

        Returns:
            the slice; None where NCCL is to gather slices of that size.
        """
        if self.at_least_bytes is None:
            return None
        bytes_ = elements * dtype.itemsize
        by_copies = bytes_ >= self.at_least_bytes and bytes_ > 0
        _log.info(
            "%s: slices of %.1f MiB are gathered by %s",
            self._choice.what,
            bytes_ / 2**20,
            "the copy engines" if by_copies else f"NCCL, below {self.at_least_bytes / 2**20:.1f}",
        )
        if not by_copies:
            return None
        buffer = self._choice.buffer(self._group, bytes_, self._device)
        return SharedSlice(self._group, buffer, elements, dtype, self._stream)

"""A buffer that several sharding groups hold, kept whole or a slice each, and its mean over them.

Kept whole, it is averaged when asked for. Kept as slices (fully sharded), each replica holds
``1 / replicas`` of it between steps: it is gathered before it is read or written, and after it was
written its mean is scattered back into the slices. The memory of the whole copy exists only in
between.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from gem_embeddings.sharded.collectives import Collectives
from gem_parallel.copy_engine.slices import SharedSlice, SliceGathers

# Slices begin at multiples of this many elements: 128 bytes of the narrowest format.
ALIGNMENT = 64
# Elements of a slice that are averaged at a time.
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that hold the same rows.

    Attributes:
        collectives: over these ranks.
        index: of this rank among them.
        size: their number.
        sliced: whether each keeps only a slice between steps.
        copies: makes slices that copy engines gather; None where the backend gathers all.
    """

    collectives: Collectives
    index: int
    size: int
    sliced: bool
    copies: SliceGathers | None = None


class ReplicaBuffer:
    """One flat buffer on this rank.

    Args:
        elements: that are used; the buffer is padded to equal slices.
        dtype: of the elements.
        device: of the buffer.
        replicas: who else holds it.

    Attributes:
        whole: (padded elements,), zeros at first. Its memory is gone while only slices are kept.
        part: the slice of this rank where slices are kept, otherwise None.
    """

    def __init__(
        self, elements: int, dtype: torch.dtype, device: torch.device, replicas: Replicas
    ) -> None:
        step = ALIGNMENT * replicas.size
        padded = -(-elements // step) * step
        self.elements = elements
        self._replicas = replicas
        self._gathering: list[Any] = []
        self._averaging: Any = None
        # Whether the whole has, or is getting, the content of the slices.
        self._there = False
        self.whole = torch.zeros(padded, dtype=dtype, device=device)
        self._bytes = self.whole.untyped_storage().nbytes()
        # Filled by the first ``keep``: initial rows are written into the whole.
        self.part: Tensor | None = None
        # Where the slice lies if the copy engines gather it.
        self._shared: SharedSlice | None = None

    @property
    def slice_start(self) -> int:
        """First element of this rank's slice; 0 where the buffer is kept whole."""
        return 0 if self.part is None else self._replicas.index * self.part.shape[0]

    @property
    def resident_bytes(self) -> int:
        """Bytes that the buffer takes now; waits for a mean that is still being formed."""
        self._settle()
        part = 0 if self.part is None else self.part.untyped_storage().nbytes()
        return self.whole.untyped_storage().nbytes() + part

    def keep(self) -> None:
        """Begin to keep slices, where that is asked for: take this rank's and free the whole."""
        if not self._replicas.sliced or self.part is not None:
            return
        size = self.whole.shape[0] // self._replicas.size
        begin = self._replicas.index * size
        initial = self.whole[begin : begin + size]
        if self._replicas.copies is not None:
            self._shared = self._replicas.copies.slice(size, self.whole.dtype)
        self.part = initial.clone() if self._shared is None else self._shared.own.copy_(initial)
        self.whole.untyped_storage().resize_(0)

    def gather(self) -> None:
        """Begin to make the whole from the slices; ``wait`` ends it. Nothing where it is there."""
        if self.part is None or self._there:
            return
        collectives = self._replicas.collectives
        before, self._averaging, self._there = self._averaging, None, True
        if before is None:
            self.whole.untyped_storage().resize_(self._bytes)
        if self._shared is not None:
            collectives.count("copy_engine_gather", self.part, self.whole)
            self._gathering.append(self._shared.gather(self.whole, after=before))
            return
        if before is not None and collectives.in_order:
            # Into the memory that the mean is read from, once it has been.
            self._gathering.append(before)
        elif before is not None:
            before.wait()
        self._gathering.append(collectives.all_gather(self.whole, self.part))

    def wait(self) -> None:
        """Wait for ``gather``."""
        for work in self._gathering:
            work.wait()
        self._gathering.clear()

    def free(self) -> None:
        """Give the memory of the whole back where slices are kept; once an average has read it."""
        if self.part is None:
            return
        self.wait()
        self._there = False
        if self._averaging is None:
            self.whole.untyped_storage().resize_(0)

    def forget(self) -> None:
        """Forget a whole that was gathered, where slices are kept and have been overwritten."""
        if self._there:
            self.free()

    def _settle(self) -> None:
        """Wait for a mean that is still being formed, and for what follows it."""
        self.wait()
        if self._averaging is not None:
            self._averaging.wait()
            self._averaging = None
            if not self._there:
                self.whole.untyped_storage().resize_(0)

    def average(self, rounding: Any = None) -> None:
        """Replace the content by its mean over the replicas; the whole must be there.

        Where slices are kept in fp32 this returns before it has ended, so that it runs beside what
        follows the backward pass; whoever needs the content next waits for it.

        Args:
            rounding: for formats below fp32: a function (fp32 values, first element) -> values of
                the buffer's dtype.

        Numerics: fp32 through the backend's own mean, which adds in an order of its own; formats
            below are added in fp32 in the order of the replicas and rounded once, so that
            movements smaller than half a unit in the last place are not lost on the way.
        """
        replicas = self._replicas
        if replicas.size == 1:
            return
        collectives = replicas.collectives
        if self.whole.dtype == torch.float32:
            if self.part is None:
                collectives.all_reduce_mean(self.whole)
            else:
                self._averaging = collectives.reduce_scatter_mean(self.part, self.whole)
            return
        size = self.whole.shape[0] // replicas.size
        slices = self.whole.view(replicas.size, size)
        mean = self.whole.new_empty(size) if self.part is None else self.part
        # A part of the slices at a time: the message would be as large as the table.
        for begin in range(0, size, _CHUNK):
            end = min(size, begin + _CHUNK)
            sent = slices[:, begin:end].reshape(-1)
            equal = [end - begin] * replicas.size
            heard, _ = collectives.all_to_all(sent, equal, equal)
            total = torch.zeros(end - begin, dtype=torch.float32, device=sent.device)
            for other in heard.view(replicas.size, -1):
                total += other
            mean[begin:end] = rounding(total.div_(replicas.size), replicas.index * size + begin)
        if self.part is None:
            collectives.all_gather(self.whole, mean).wait()

    def take_slice(self) -> None:
        """Take this rank's slice of the whole, which must be there; nothing where all is kept."""
        if self.part is not None:
            begin = self.slice_start
            self.part.copy_(self.whole[begin : begin + self.part.shape[0]])

    def filled(self) -> Tensor:
        """Return what this rank keeps: its slice, or the whole."""
        self._settle()
        return self.whole if self.part is None else self.part


class Gathered:
    """Buffers that are whole for the length of a ``with`` block.

    Args:
        buffers: of any stores. Gathering begins with the block; ``wait`` ends it.
    """

    def __init__(self, buffers: Iterable[ReplicaBuffer]) -> None:
        self.buffers = tuple(buffers)

    def __enter__(self) -> Self:
        for buffer in self.buffers:
            buffer.gather()
        return self

    def wait(self) -> None:
        """Wait until they are there."""
        for buffer in self.buffers:
            buffer.wait()

    def __exit__(self, *_: object) -> None:
        for buffer in self.buffers:
            buffer.free()

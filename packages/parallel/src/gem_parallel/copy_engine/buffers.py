"""Memory that the ranks of a host read from each other, and what is lent out of it.

A buffer is made by all ranks of a group together, which takes milliseconds, so buffers are kept
and lent again. A part that was lent is free once nobody holds its tensor any more.
"""

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Torch reads it once, when the first symmetric buffer of the process is made.
_MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class SharedBuffer(Protocol):
    """A buffer of equal size on every rank of a group, which every rank can read.

    Attributes:
        own: this rank's memory, uint8.
    """

    own: Tensor

    def meet(self) -> None:
        """Order what follows on this rank behind what every rank has asked for until here."""
        ...

    def of(self, rank: int, first_byte: int, bytes_: int) -> Tensor:
        """Give a part of another rank's memory.

        Args:
            rank: in the group.
            first_byte: at which it begins.
            bytes_: its size.

        Returns:
            uint8 on this rank's device; the memory is the other rank's.
        """
        ...


class SymmetricBuffer:
    """Torch's symmetric memory on GPUs of one host: peers are read by the copy engines.

    NVLink multicast is never used, and is switched off for the process.

    Args:
        group: ranks; each of them makes the buffer at the same place of its program.
        bytes_: size on every rank.
        device: of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, bytes_: int, device: torch.device) -> None:
        os.environ[_MULTICAST_OFF] = "1"
        # Here: the module registers operators, which takes a second.
        import torch.distributed._symmetric_memory as symmetric

        self.own: Tensor = symmetric.empty(bytes_, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(self.own, group)

    def meet(self) -> None:
        """Let the current stream wait until every rank's has come here; one block of one kernel."""
        self._handle.barrier(channel=0)

    def of(self, rank: int, first_byte: int, bytes_: int) -> Tensor:
        """Give a part of another rank's memory.

        Args:
            rank: in the group.
            first_byte: at which it begins.
            bytes_: its size.

        Returns:
            uint8 on this rank's device; the memory is the other rank's.
        """
        return self._handle.get_buffer(rank, (bytes_,), torch.uint8, first_byte)


class _Slot:
    def __init__(self, buffer: SharedBuffer) -> None:
        self.buffer = buffer
        self.lent: weakref.ref[Tensor] | None = None

    @property
    def is_free(self) -> bool:
        return self.lent is None or self.lent() is None


class BufferPool:
    """Shared buffers, lent for the lifetime of a tensor.

    Every rank of the group has to lend in the same order and to let go at the same places of its
    program, as a buffer that is missing is made by all of them together.

    Args:
        make: makes a buffer of a number of bytes, on all ranks together.
    """

    def __init__(self, make: Callable[[int], SharedBuffer]) -> None:
        self._make = make
        self._slots: list[_Slot] = []
        self._largest = 0

    @property
    def held_bytes(self) -> int:
        """Memory of all buffers on this rank."""
        return sum(slot.buffer.own.numel() for slot in self._slots)

    def expect(self, bytes_: int) -> None:
        """Say that a part of so many bytes will be asked for.

        Args:
            bytes_: of the part. Buffers are made as large as the largest, so that each fits all.
        """
        self._largest = max(self._largest, bytes_)

    def lend(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Lend the beginning of a buffer.

        Args:
            elements: wanted, above 0.
            dtype: of the elements.

        Returns:
            one dim; the buffer is lent again once this tensor and all views of it are gone. What
            reads it by then has to lie before what writes it next, in the order of streams.
        """
        bytes_ = elements * dtype.itemsize
        fitting = [s for s in self._slots if s.is_free and s.buffer.own.numel() >= bytes_]
        if fitting:
            slot = fitting[0]
        else:
            self.expect(bytes_)
            slot = _Slot(self._make(self._largest))
            self._slots.append(slot)
        # No view of the buffer: a view of this part keeps this very tensor.
        part = torch.empty(0, dtype=dtype, device=slot.buffer.own.device)
        part.set_(slot.buffer.own.untyped_storage(), 0, (elements,), (1,))  # pyright: ignore[reportArgumentType, reportCallIssue]
        slot.lent = weakref.ref(part)
        return part

    def buffer_of(self, part: Tensor) -> SharedBuffer | None:
        """Tell which buffer a tensor was lent from.

        Args:
            part: any tensor.

        Returns:
            its buffer; None for a tensor that begins in none.
        """
        for slot in self._slots:
            if slot.buffer.own.data_ptr() == part.data_ptr() and not slot.is_free:
                return slot.buffer
        return None

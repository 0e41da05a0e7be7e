"""The memory that tensors would take, by what they are for and when.

Counted are the storages behind all tensors that operators make, from the first sight to the last
reference. Left out: what an allocator rounds up or keeps, workspaces inside a kernel, and what the
driver and the libraries take for themselves.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The moment of most memory.

    Attributes:
        total_bytes: in use then.
        by_kind: kind -> bytes of it; what nobody has named is ``other``.
        section: what ran.
    """

    total_bytes: int
    by_kind: dict[str, int]
    section: str


class MemoryCount:
    """Counts storages. Use `watching` around everything that may resize one.

    Attributes:
        now_bytes: in use.
        section: what runs.
    """

    def __init__(self) -> None:
        self.now_bytes = 0
        self.section = ""
        self._bytes: dict[int, int] = {}
        self._kinds: dict[int, str] = {}
        self._watched: dict[int, Any] = {}
        self._now_by_kind: dict[str, int] = {}
        self._peak = MemoryPeak(0, {}, "")
        self._section_peaks: dict[str, int] = {}

    def see(self, tensor: Tensor) -> None:
        """Take note of a tensor's storage, which may be known.

        Args:
            tensor: any; real, or without memory.
        """
        if isinstance(tensor, DTensor) or tensor.layout != torch.strided:
            return  # its parts are seen by themselves
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._bytes:
            self._resize(key, storage.nbytes())
            return
        self._watched[key] = weakref.ref(storage, lambda _, key=key: self._gone(key))
        self._bytes[key] = 0
        self._resize(key, storage.nbytes())

    def name(self, kind: str, tensors: Iterable[Tensor]) -> int:
        """Say what tensors are for.

        Args:
            kind: ``parameters``, ``optimizer`` and so on.
            tensors: of that kind; of a tensor over a mesh, the local part.

        Returns:
            bytes of their storages.
        """
        own: dict[int, int] = {}
        for given in tensors:
            tensor = given.to_local() if isinstance(given, DTensor) else given
            self.see(tensor)
            key = tensor.untyped_storage()._cdata
            size = own[key] = self._bytes[key]
            self._book(key, -size)
            self._kinds[key] = kind
            self._book(key, size)
        return sum(own.values())

    def begin(self) -> None:
        """Forget the peaks so far."""
        self._peak = MemoryPeak(self.now_bytes, dict(self._now_by_kind), self.section)
        self._section_peaks = {self.section: self.now_bytes}

    def enter(self, section: str) -> None:
        """Say what runs from now on.

        Args:
            section: its name.
        """
        self.section = section
        self._note()

    @property
    def peak(self) -> MemoryPeak:
        """The moment of most memory since `begin`."""
        return self._peak

    @property
    def section_peaks(self) -> dict[str, int]:
        """Section -> most bytes in use while it ran, since `begin`."""
        return dict(self._section_peaks)

    @contextmanager
    def watching(self) -> Iterator["MemoryCount"]:
        """Follow storages that are resized, for the length of a ``with`` block.

        Yields:
            this count.
        """
        cls: Any = torch.UntypedStorage
        before = cls.resize_

        def resize(storage: Any, size: int) -> Any:
            found = before(storage, size)
            if storage._cdata in self._bytes:
                self._resize(storage._cdata, storage.nbytes())
            return found

        cls.resize_ = resize
        try:
            yield self
        finally:
            cls.resize_ = before

    def _resize(self, key: int, size: int) -> None:
        change = size - self._bytes[key]
        if change:
            self._bytes[key] = size
            self.now_bytes += change
            self._book(key, change)
            self._note()

    def _book(self, key: int, change: int) -> None:
        kind = self._kinds.get(key, "other")
        self._now_by_kind[kind] = self._now_by_kind.get(kind, 0) + change

    def _gone(self, key: int) -> None:
        size = self._bytes.pop(key, 0)
        self.now_bytes -= size
        self._book(key, -size)
        self._kinds.pop(key, None)
        self._watched.pop(key, None)

    def _note(self) -> None:
        section = self.section
        self._section_peaks[section] = max(self._section_peaks.get(section, 0), self.now_bytes)
        if self.now_bytes > self._peak.total_bytes:
            by_kind = {kind: size for kind, size in self._now_by_kind.items() if size}
            self._peak = MemoryPeak(self.now_bytes, by_kind, section)

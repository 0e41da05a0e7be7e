"""Arrays in files, mapped into memory, whose bytes are checked block by block as they are read.

To check a whole file when it is opened would mean to read all of it, which is what mapping avoids.
So every 64 KiB have a sum of their own, and a block is compared with it when a value of it is
first asked for. A process checks each block once; from then on it trusts its memory.
"""

import zlib
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

_BLOCK_BYTES = 1 << 16


class Values(Protocol):
    """One value a place: a numpy array, or one that is checked."""

    @property
    def dtype(self) -> np.dtype:
        """Of a value."""
        ...

    def __getitem__(self, places: np.ndarray, /) -> np.ndarray:
        """The values at some places, int64 (n,)."""
        ...


class BlockSums:
    """The sums of the blocks of an array, as it is written piece by piece.

    Args:
        dtype: of the array.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self._block_bytes = dtype.itemsize << block_shift(dtype)
        self._done: list[int] = []
        self._sum = self._filled = 0

    def add(self, data: memoryview) -> None:
        """Count the bytes that follow.

        Args:
            data: one dim of bytes.
        """
        place = 0
        while place < len(data):
            part = data[place : place + self._block_bytes - self._filled]
            self._sum = zlib.crc32(part, self._sum)
            self._filled += len(part)
            place += len(part)
            if self._filled == self._block_bytes:
                self._done.append(self._sum)
                self._sum = self._filled = 0

    def all(self) -> np.ndarray:
        """The sums so far, uint32; the last block may be a short one."""
        return np.asarray([*self._done, *([self._sum] if self._filled else [])], np.uint32)


def block_shift(dtype: np.dtype) -> int:
    """The binary logarithm of the values in a block.

    Args:
        dtype: of the array.
    """
    return max(_BLOCK_BYTES // dtype.itemsize, 1).bit_length() - 1


class CheckedArray:
    """An array whose blocks are compared with their sums before values of them are given.

    Attributes:
        dtype: of a value.

    Args:
        values: mapped, one dim.
        sums: of its blocks, as `BlockSums` gives them.
        damaged: makes the error for a block that has changed, of the first and last byte of it.
    """

    def __init__(
        self, values: np.ndarray, sums: np.ndarray, damaged: Callable[[int, int], Exception]
    ) -> None:
        self.dtype = values.dtype
        self._values, self._sums, self._damaged = values, sums, damaged
        self._shift = block_shift(values.dtype)
        self._sound = np.zeros(len(sums), bool)
        self._all_sound = not len(sums)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        if not self._all_sound:
            blocks = places >> self._shift
            unread = blocks[~self._sound[blocks]]
            if len(unread):
                self._check(np.unique(unread))
        return self._values[places]

    def whole(self) -> np.ndarray:
        """All values, checked; mapped, not to be written to."""
        if not self._all_sound:
            self._check(np.flatnonzero(~self._sound))
        return self._values

    def _check(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            first = int(block) << self._shift
            values = self._values[first : first + (1 << self._shift)]
            if zlib.crc32(values.view(np.uint8).data) != self._sums[block]:
                start = first * self.dtype.itemsize
                raise self._damaged(start, start + values.nbytes - 1)
            self._sound[block] = True
        self._all_sound = bool(self._sound.all())

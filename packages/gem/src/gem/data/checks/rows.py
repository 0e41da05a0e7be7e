"""Rows that occur twice, found by a 64-bit hash of each, one column in memory at a time."""

import numpy as np

from gem.data.columns import Column
from gem.data.statistics.keyed_sums import mix64

_STEP = np.uint64(0x9E3779B97F4A7C15)


class RowHashes:
    """A hash of every row, over the columns added so far.

    Two of n different rows share a hash with a chance of about n² / 2^65: one in 4 million for a
    hundred million rows.

    Args:
        rows: how many there are.
    """

    def __init__(self, rows: int) -> None:
        self.values = np.zeros(rows, np.uint64)

    def add(self, column: Column) -> None:
        """Take a column into the hash.

        Args:
            column: with as many rows.
        """
        self.values = mix64(self.values * _STEP + _row_hashes(column))

    def repeats(self) -> tuple[int, int]:
        """How many rows repeat an earlier one, and the first such row; -1 where there is none."""
        order = np.argsort(self.values, kind="stable")
        again = np.zeros(len(order), bool)
        again[order[1:]] = self.values[order[1:]] == self.values[order[:-1]]
        return int(again.sum()), int(np.argmax(again)) if again.any() else -1


def _row_hashes(column: Column) -> np.ndarray:
    values = column.values
    if values.dtype == np.float32:
        values = np.where(np.isnan(values), np.float32(np.nan), values + np.float32(0))  # one NaN
        bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    else:
        bits = np.ascontiguousarray(values).view(np.uint64)
    hashes = mix64(bits)
    if column.offsets is None:
        return hashes
    starts, ends = column.offsets[:-1], column.offsets[1:]
    place = (np.arange(len(hashes)) - np.repeat(starts, ends - starts)).astype(np.uint64)
    # Differences of running sums, right also where they wrap: the sum over each row's elements.
    sums = np.zeros(len(hashes) + 1, np.uint64)
    np.cumsum(mix64(hashes + place * _STEP), out=sums[1:])
    return mix64(sums[ends] - sums[starts] + (ends - starts).astype(np.uint64))

"""Sums and counts per key that many rows read as they stood at each row's own time.

A block is a run of rows in time order. Rows of equal time form a group, and a row reads what was
added by rows of *earlier groups* only: by all blocks before, and within the block by the groups
before its own.

Sums are kept in 64-bit fixed point, in steps of 2**-30. Integer addition is exact and has no order,
so what a row reads is the same to the last bit however the log is cut into blocks, and nothing
that happens later can change it, not even by rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gem_opkit.errors import DataError, refusal

FIXED_POINT = float(2**30)


def to_fixed(values: np.ndarray) -> np.ndarray:
    """Turn numbers into fixed point.

    Args:
        values: magnitudes below 2**20.

    Returns:
        int64, rounded to the nearest step of 2**-30.
    """
    return np.rint(values * FIXED_POINT).astype(np.int64)


def mix64(ids: np.ndarray) -> np.ndarray:
    """Scatter 64-bit integers: a one-to-one map whose bits all depend on all bits of the input.

    Args:
        ids: int64 or uint64.

    Returns:
        uint64.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195).
    """
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read: fixed-point sums and counts, int64, one of each a query."""

    sums: np.ndarray
    counts: np.ndarray

    def means(self, prior: float, towards: np.ndarray | float) -> np.ndarray:
        """Smoothed means: (sum + prior · towards) / (count + prior).

        Args:
            prior: examples that `towards` counts as, > 0.
            towards: mean of a key without examples; one for all queries, or one each.

        Returns:
            float64, one a query.
        """
        return (self.sums / FIXED_POINT + prior * towards) / (self.counts + prior)


class _Totals:
    """Sum and count of each row of a table, in fixed point; they can be saved and restored."""

    def __init__(self, rows: int) -> None:
        self._totals = np.zeros((rows, 2), np.int64)  # side by side: one cache line a lookup

    def saved(self) -> dict[str, np.ndarray]:
        """The rows that hold anything; for `restore`."""
        rows = np.flatnonzero(self._totals.any(axis=1))
        size = np.asarray([len(self._totals)], np.int64)
        return {"rows": rows, "totals": self._totals[rows], "size": size}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Hold what was saved, and nothing else.

        Args:
            arrays: of `saved`.

        Raises:
            DataError: they are of another number of rows.
        """
        if int(arrays["size"][0]) != len(self._totals):
            raise DataError(
                refusal(
                    "statistics",
                    "saved sums",
                    must=f"be of {len(self._totals)} rows",
                    got=int(arrays["size"][0]),
                    fix="save them again with these declarations",
                )
            )
        self._totals[:] = 0
        self._totals[arrays["rows"]] = arrays["totals"]


class KeyedSums(_Totals):
    """Sum and count of each of `keys` keys, over everything that was added."""

    def __init__(self, keys: int) -> None:
        super().__init__(keys)
        self._first = np.full(keys, -1, np.int32)

    def open_block(self, keys: np.ndarray, groups: np.ndarray, values: np.ndarray) -> "OpenBlock":
        """Announce what the rows of a block will add, so that its later rows can read it.

        Args:
            keys: int64 (U,).
            groups: of the adding rows, int64 (U,), from 0, below 2**31.
            values: fixed point, int64 (U,).

        Returns:
            the block; `close` can add it for good. Only one may be open at a time.
        """
        return OpenBlock(self._totals, self._first, keys, groups, values)


class OpenBlock:
    """The additions of a block, readable as of each group of it."""

    def __init__(
        self,
        totals: np.ndarray,
        first: np.ndarray,
        keys: np.ndarray,
        groups: np.ndarray,
        values: np.ndarray,
    ) -> None:
        self._totals, self._first = totals, first
        order = np.lexsort((groups, keys))
        self._keys, self._groups = keys[order], groups[order]
        self._running = np.zeros(len(keys) + 1, np.int64)
        np.cumsum(values[order], out=self._running[1:])
        starts = np.flatnonzero(np.diff(self._keys, prepend=-1))
        self._run_keys = self._keys[starts]
        self._run_starts = np.append(starts, len(keys))
        # Runs are numbered, so that one composite number orders by key, then group.
        runs = np.repeat(np.arange(len(starts)), np.diff(self._run_starts))
        self._composite = (runs << 32) | self._groups
        first[self._run_keys] = np.arange(len(starts), dtype=np.int32)

    def read(self, keys: np.ndarray, groups: np.ndarray) -> Reading:
        """What each key holds for a row of each group.

        Args:
            keys: int64 (Q,).
            groups: of the reading rows, int64 (Q,).

        Returns:
            sums and counts over all blocks before, and the groups before in this one.
        """
        totals = self._totals[keys]
        sums, counts = totals[:, 0].copy(), totals[:, 1].copy()
        if len(self._keys):
            runs = self._first[keys]
            touched = np.flatnonzero(runs >= 0)
            run = runs[touched].astype(np.int64)
            stop = np.searchsorted(self._composite, (run << 32) | groups[touched])
            start = self._run_starts[run]
            sums[touched] += self._running[stop] - self._running[start]
            counts[touched] += stop - start
        return Reading(sums, counts)

    def close(self, *, add: bool) -> None:
        """Leave the block.

        Args:
            add: whether what is opened next reads all of it.
        """
        self._first[self._run_keys] = -1
        if not add:
            return
        ends = self._run_starts
        self._totals[self._run_keys, 0] += self._running[ends[1:]] - self._running[ends[:-1]]
        self._totals[self._run_keys, 1] += np.diff(ends)


class PairSums(_Totals):
    """Sum and count of each pair of keys, where the pairs that read are also those that add.

    With more possible pairs than rows in the table, pairs share rows by hash: a bounded memory
    for any number of keys.
    """

    def __init__(self, keys: int, rows: int) -> None:
        self._keys = keys
        self._rows = min(rows, keys * keys)
        self._dense = keys * keys <= rows
        super().__init__(self._rows)

    def rows(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """The row of each pair; the order of the two does not matter.

        Args:
            left: one key of each pair, int64 (Q,).
            right: the other one, int64 (Q,).

        Returns:
            int64 (Q,). Above the number of rows, pairs share rows by hash.
        """
        low, high = np.minimum(left, right), np.maximum(left, right)
        if self._dense:
            return low * self._keys + high
        mixed = mix64(mix64(low) + high.astype(np.uint64))
        return (mixed % np.uint64(self._rows)).astype(np.int64)

    def read_and_add(
        self, rows: np.ndarray, groups: np.ndarray, values: np.ndarray, adds: np.ndarray
    ) -> Reading:
        """Read every pair of a block as of its group, then add the block.

        Args:
            rows: of the pairs, int64 (Q,).
            groups: of the reading and adding rows, int64 (Q,), from 0, non-decreasing.
            values: fixed point, int64 (Q,).
            adds: bool (Q,); a pair where it is False reads only.

        Returns:
            what each pair held.
        """
        totals = self._totals[rows]
        if not len(rows):
            return Reading(totals[:, 0], totals[:, 1])
        # A stable sort by row keeps the groups in order within a row.
        order = np.argsort(rows, kind="stable")
        sorted_rows, sorted_groups = rows[order], groups[order]
        new_row = np.diff(sorted_rows, prepend=-1) != 0
        new_group = new_row | (np.diff(sorted_groups, prepend=-1) != 0)
        places = np.arange(len(rows))
        row_start = np.maximum.accumulate(np.where(new_row, places, 0))
        group_start = np.maximum.accumulate(np.where(new_group, places, 0))
        added = np.zeros((len(rows) + 1, 2), np.int64)
        np.cumsum((values * adds)[order], out=added[1:, 0])
        np.cumsum(adds[order], out=added[1:, 1])
        earlier = np.empty_like(totals)
        earlier[order] = added[group_start] - added[row_start]
        starts = np.flatnonzero(new_row)
        ends = np.append(starts[1:], len(rows))
        self._totals[sorted_rows[starts]] += added[ends] - added[starts]
        totals += earlier
        return Reading(totals[:, 0], totals[:, 1])

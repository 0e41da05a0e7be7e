"""Labels that are known some time after their rows. Part of `gem.data.statistics`.

A row of time t whose label is known d ms later is read by rows of time t + d and after.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gem.data.statistics.keyed_sums import KeyedSums


@dataclass(frozen=True, slots=True)
class _Additions:
    """What rows add, and strictly after which time it counts. One element an addition, int64."""

    keys: np.ndarray
    values: np.ndarray
    known_after: np.ndarray

    def part(self, which: np.ndarray) -> "_Additions":
        return _Additions(self.keys[which], self.values[which], self.known_after[which])

    def and_then(self, other: "_Additions") -> "_Additions":
        return _Additions(
            np.concatenate([self.keys, other.keys]),
            np.concatenate([self.values, other.values]),
            np.concatenate([self.known_after, other.known_after]),
        )


class LateLabels:
    """Additions to keyed sums that wait until they are known.

    Args:
        visible_after_ms: how long after its row a label is known, > 1.
    """

    def __init__(self, visible_after_ms: int) -> None:
        # Readers come strictly later than this, so a label is read from its delay on.
        self._delay_ms = visible_after_ms - 1
        none = np.empty(0, np.int64)
        self._waiting = self._left = _Additions(none, none, none)
        self._learns = True

    def open(
        self,
        sums: KeyedSums,
        keys: np.ndarray,
        values: np.ndarray,
        row_times: np.ndarray,
        group_times: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a block of rows.

        Args:
            sums: with no block open; what all rows of the block may read is added to it.
            keys: that the block's rows add to, int64 (U,).
            values: fixed point, int64 (U,).
            row_times: of the adding rows, int64 (U,).
            group_times: the distinct times of the block's rows, rising, int64 (G,).

        Returns:
            keys, groups and values of the additions that come to be known within the block, each
            in the last group that does not know of it yet.
        """
        known = self._waiting.known_after < group_times[0]
        if not self._learns:  # an earlier time may come later: what waits is not added for good
            now = self._waiting.part(known)
            return now.keys, np.zeros(len(now.keys), np.int64), now.values
        if known.any():
            flushed = self._waiting.part(known)
            groups = np.zeros(len(flushed.keys), np.int64)
            sums.open_block(flushed.keys, groups, flushed.values).close(add=True)
            self._waiting = self._waiting.part(~known)
        everything = self._waiting.and_then(_Additions(keys, values, row_times + self._delay_ms))
        within = everything.known_after < group_times[-1]
        self._left = everything.part(~within)
        now = everything.part(within)
        groups = np.searchsorted(group_times, now.known_after, side="right") - 1
        return now.keys, groups, now.values

    def saved(self) -> dict[str, np.ndarray]:
        """What waits; for `restore`."""
        waiting = self._waiting
        return {
            "late_keys": waiting.keys,
            "late_values": waiting.values,
            "late_known_after": waiting.known_after,
        }

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Wait with what was saved, and take nothing more.

        Rows that are read from now on may come in any order of time; their groups are numbered
        from 1, and what is known by then is in group 0.

        Args:
            arrays: of `saved`.
        """
        names = ("late_keys", "late_values", "late_known_after")
        self._waiting = self._left = _Additions(*(arrays[name] for name in names))
        self._learns = False

    def close(self, *, add: bool) -> None:
        """Leave the block.

        Args:
            add: whether its rows count from now on; what was returned is added by the caller.
        """
        if add:
            self._waiting = self._left

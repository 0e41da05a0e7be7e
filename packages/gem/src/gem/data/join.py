"""The point-in-time join: which events of a user an example may see.

An example at time t sees the last `max_events` events of its user with time strictly before t,
oldest first; events of equal time keep their file order. The log is indexed once; after that a
batch costs a vectorised bisection and slices, with no loop over examples.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class History:
    """The events of B examples, packed.

    Attributes:
        events: positions in the index order of the stream (`EventIndex.order`), int64 (T,).
        offsets: first event of each example in `events`, int64 (B+1,).
    """

    events: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Events of each example, int64 (B,)."""
        return np.diff(self.offsets)


class EventIndex:
    """A stream's events, ordered by user, then time, then file order.

    Attributes:
        order: row in the files of each event in index order, int64; None where the files have
            that order already, which saves a copy of every column.
        times: times in index order, int64.

    Args:
        users: user of each event, int64, in file order.
        times: time of each event in ms, int64, in file order.

    Cost: one stable sort; none where the files are sorted by user and time.
    """

    def __init__(self, users: np.ndarray, times: np.ndarray) -> None:
        later = users[1:] > users[:-1]
        same = users[1:] == users[:-1]
        if bool(np.all(later | (same & (times[1:] >= times[:-1])))):
            self.order: np.ndarray | None = None
            self.times = times
        else:
            self.order = np.lexsort((times, users))  # stable: file order decides last
            users = users[self.order]
            self.times = times[self.order]
        starts = np.flatnonzero(np.r_[True, users[1:] != users[:-1]]) if len(users) else []
        self._starts = np.append(np.asarray(starts, np.int64), len(users))
        self._users = users[self._starts[:-1]]

    def in_order(self, column: np.ndarray) -> np.ndarray:
        """Bring a column of the stream into index order.

        Args:
            column: one value an event, in file order.

        Returns:
            the values in index order; the same array where the files are in that order.
        """
        return column if self.order is None else column[self.order]

    def history(self, users: np.ndarray, times: np.ndarray, max_events: int) -> History:
        """The events that each example may see.

        Args:
            users: user of each example, int64 (B,); one without events has an empty history.
            times: time of each example in ms, int64 (B,).
            max_events: how many of the last events at most, > 0.

        Returns:
            the events of each example, oldest first.

        Cost: O(B log(longest log of a user)) and the slices.
        """
        if not len(self._users):
            return History(np.empty(0, np.int64), np.zeros(len(users) + 1, np.int64))
        place = np.minimum(np.searchsorted(self._users, users), len(self._users) - 1)
        first, end = self._starts[place], self._starts[place + 1]
        end = np.where(self._users[place] == users, end, first)
        stop = first_at_or_after(self.times, first, end, times)
        start = np.maximum(first, stop - max_events)
        offsets = np.zeros(len(users) + 1, np.int64)
        np.cumsum(stop - start, out=offsets[1:])
        return History(packed_ranges(start, offsets), offsets)


def packed_ranges(starts: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The integers of B ranges, one after the other.

    Args:
        starts: first integer of each range, int64 (B,).
        offsets: where each range begins in the result, int64 (B+1,).

    Returns:
        int64 (offsets[-1],): ``starts[b], starts[b] + 1, ...`` for each b.
    """
    lengths = np.diff(offsets)
    return np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])


def first_at_or_after(
    times: np.ndarray, first: np.ndarray, end: np.ndarray, when: np.ndarray
) -> np.ndarray:
    """Bisect many sorted ranges of one array at once.

    Args:
        times: sorted within each range.
        first: start of each range, int64 (B,).
        end: end of each range, exclusive, int64 (B,).
        when: time looked for, int64 (B,).

    Returns:
        int64 (B,): first position in the range whose time is >= `when`, or the range's end.
    """
    low, high = first.copy(), end.copy()
    while True:
        open_ranges = low < high
        if not open_ranges.any():
            return low
        middle = (low + high) >> 1
        # A closed range may point one past the end of the array; it is not looked at.
        earlier = times[np.where(open_ranges, middle, 0)] < when
        low = np.where(open_ranges & earlier, middle + 1, low)
        high = np.where(open_ranges & ~earlier, middle, high)

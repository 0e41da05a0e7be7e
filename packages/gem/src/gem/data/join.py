"""The point-in-time join: which events of a user an example may see.

An example at time t sees the last `max_events` events of its user with time strictly before t,
oldest first; events of equal time keep their file order. The log is indexed once; after that a
batch costs a vectorised bisection and slices, with no loop over examples.

Two kinds of events differ. One is seen later than its time says (`seen_after`): it is ordered by
when it is seen. The other has no time of its own (`untimed`): it comes before the user's other
events, and all of a user's are seen from one time on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gem.data.checked_array import CheckedArray, Values


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
    """A stream's events, ordered by user, untimed first, then by when seen, then file order.

    Attributes:
        order: row in the files of each event in index order, int64; None where the files have
            that order already, which saves a copy of every column.
        times: times in index order, int64.
        untimed: in index order, which events have no time of their own; None: all have one.

    Args:
        users: user of each event, int64, in file order.
        times: time of each event in ms, int64, in file order.
        seen_after: strictly after which time each event is seen, int64, at least its time; None:
            after its time.
        untimed: bool, in file order; the times of a user's are equal. None: there are none.

    Cost: one stable sort; none where the files are sorted by user and time.
    """

    def __init__(
        self,
        users: np.ndarray,
        times: np.ndarray,
        *,
        seen_after: np.ndarray | None = None,
        untimed: np.ndarray | None = None,
    ) -> None:
        self.order: np.ndarray | None = None
        self.times: Values
        self.untimed: Values | None
        self._seen: Values
        seen = times if seen_after is None else seen_after
        # Within a user: untimed events first, and these in file order, as their times are equal.
        part = users if untimed is None else ~untimed
        same = (users[1:] == users[:-1]) & (part[1:] == part[:-1])
        later = (users[1:] > users[:-1]) | ((users[1:] == users[:-1]) & (part[1:] > part[:-1]))
        if not bool(np.all(later | (same & (seen[1:] >= seen[:-1])))):
            # Stable: file order decides last.
            order = np.lexsort((seen, part, users))
            self.order, users, times, seen = order, users[order], times[order], seen[order]
            untimed = None if untimed is None else untimed[order]
        self.times, self._seen, self.untimed = times, seen, untimed
        starts = np.flatnonzero(np.r_[True, users[1:] != users[:-1]]) if len(users) else []
        self._starts = np.append(np.asarray(starts, np.int64), len(users))
        self._users = users[self._starts[:-1]]
        # Where each user's own times begin.
        self._timed = self._starts[:-1]
        if untimed is not None and len(users):
            self._timed = self._timed + np.add.reduceat(untimed, self._timed, dtype=np.int64)

    @classmethod
    def mapped(cls, arrays: Mapping[str, CheckedArray]) -> "EventIndex":
        """An index that was made before.

        Args:
            arrays: in index order: `users`, the different ones; `starts`, where each one's events
                begin and the number of all events; `times`; where events are seen later than
                their time says, `seen`; where some are untimed, `untimed` and, a user,
                `timed`: where the others begin.

        Returns:
            the index; it keeps the arrays as they are.
        """
        index = cls.__new__(cls)
        index.order, index.untimed = None, arrays.get("untimed")
        index.times = arrays["times"]
        index._seen = arrays.get("seen", index.times)
        index._users, index._starts = arrays["users"].whole(), arrays["starts"].whole()
        index._timed = arrays["timed"].whole() if "timed" in arrays else index._starts[:-1]
        return index

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
        start, stop = self._seen_by(users, times, max_events)
        offsets = np.zeros(len(users) + 1, np.int64)
        np.cumsum(stop - start, out=offsets[1:])
        return History(packed_ranges(start, offsets), offsets)

    def lengths(self, users: np.ndarray, times: np.ndarray, max_events: int) -> np.ndarray:
        """How many events each example may see, without looking any of them up.

        Args:
            users: user of each example, int64 (B,).
            times: time of each example in ms, int64 (B,).
            max_events: how many of the last events at most, > 0.

        Returns:
            int64 (B,): the lengths that `history` gives.

        Cost: O(B log(longest log of a user)).
        """
        start, stop = self._seen_by(users, times, max_events)
        return stop - start

    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """User of every event, and strictly after which time it is seen; in index order."""
        return np.repeat(self._users, np.diff(self._starts)), self._seen[self._all()]

    def all_times(self) -> np.ndarray:
        """Time of every event, in index order."""
        return self.times[self._all()]

    def timed(self) -> np.ndarray:
        """Which events have a time of their own, bool, in index order."""
        if self.untimed is None:
            return np.ones(int(self._starts[-1]), bool)
        return ~self.untimed[self._all()].astype(bool)

    def _all(self) -> np.ndarray:
        return np.arange(int(self._starts[-1]))

    def _seen_by(
        self, users: np.ndarray, times: np.ndarray, max_events: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """First event of each example in index order, and the end of its events."""
        if not len(self._users):
            nothing = np.zeros(len(users), np.int64)
            return nothing, nothing
        place = np.minimum(np.searchsorted(self._users, users), len(self._users) - 1)
        has = self._users[place] == users
        first = timed = self._starts[place]
        end = np.where(has, self._starts[place + 1], first)
        if self.untimed is not None:
            # All of a user's untimed events are seen, or none.
            timed = np.where(has, self._timed[place], first)
            seen = (timed > first) & (self._seen[first] < times)
            first = np.where(seen, first, timed)
        stop = first_at_or_after(self._seen, timed, end, times)
        return np.maximum(first, stop - max_events), stop


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
    times: Values, first: np.ndarray, end: np.ndarray, when: np.ndarray
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

"""Labels from a later log: does the same user come back to the same item in time?

For an example of user u and item i at time t the label is 1 where the log holds a row (u, i, s)
with t < s <= t + within; 0 where it does not; unknown where the log ends before t + within and no
such row has come by then.
"""

import numpy as np


class LaterRows:
    """The rows of a log that can follow, by user, item and time.

    Args:
        users: int64, one a row.
        items: int64.
        times: ms, int64.
        end_ms: time of the last row of the whole log, whether or not it can follow.
    """

    def __init__(
        self, users: np.ndarray, items: np.ndarray, times: np.ndarray, end_ms: int
    ) -> None:
        order = np.lexsort((times, items, users))
        self._users, self._items, self._times = users[order], items[order], times[order]
        self._end_ms = end_ms

    def follow(
        self, users: np.ndarray, items: np.ndarray, times: np.ndarray, within_ms: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Labels of examples.

        Args:
            users: of the examples, int64.
            items: int64.
            times: ms, int64.
            within_ms: how long after an example a row counts.

        Returns:
            label, float32, and whether it is known.
        """
        # The first row strictly after (user, item, time) in the order of the log: a bisection for
        # all examples at once, as numpy's own knows keys of one column only.
        low, high = np.zeros(len(users), np.int64), np.full(len(users), len(self._times), np.int64)
        while (open_ := low < high).any():
            middle = np.where(open_, (low + high) // 2, 0)
            after = self._after(middle, users, items, times)
            high = np.where(open_ & after, middle, high)
            low = np.where(open_ & ~after, middle + 1, low)
        there = low < len(self._times)
        row = np.where(there, low, 0)
        if len(self._times):
            there &= (self._users[row] == users) & (self._items[row] == items)
            there &= self._times[row] <= times + within_ms
        return there.astype(np.float32), there | (times + within_ms <= self._end_ms)

    def _after(
        self, row: np.ndarray, users: np.ndarray, items: np.ndarray, times: np.ndarray
    ) -> np.ndarray:
        """Whether rows of the log come after examples, by user, then item, then time."""
        user, item, time = self._users[row], self._items[row], self._times[row]
        later = (item > items) | ((item == items) & (time > times))
        return (user > users) | ((user == users) & later)

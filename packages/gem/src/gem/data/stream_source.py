"""The events of a stream, as the examples may know them. Part of `sources`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gem.data.dataset import Dataset
from gem.data.entity_table import IdInfo
from gem.data.fields import EventIdField, EventNumberField, StreamSpec, UnionSpec
from gem.data.join import EventIndex
from gem_opkit.errors import DataError


@dataclass(frozen=True, slots=True)
class EventField:
    """A field of the events of a stream.

    Attributes:
        info: its table; None for a number.
        take: positions in index order and times to the example in ms -> one value an event.
    """

    info: IdInfo | None
    take: Callable[[np.ndarray, np.ndarray], np.ndarray]


class StreamSource:
    """The events of a stream, in index order; of a union, its own and then those it takes.

    Attributes:
        spec: its contract.
        index: the point-in-time index.

    Args:
        dataset: the data set.
        spec: of the stream.

    Raises:
        DataError: untimed events of one user have different times.
    """

    def __init__(self, dataset: Dataset, spec: StreamSpec) -> None:
        self.spec = spec
        self._dataset = dataset
        self._taken: _Taken | None = None
        self._columns: dict[str, np.ndarray] = {}
        users, times, untimed = _who_and_when(dataset, spec)
        seen_after = None
        if spec.also is not None:
            self._taken = taken = _Taken(dataset, spec.also)
            own_times, taken_times = times, taken.times
            users = np.concatenate([users, taken.users])
            times = np.concatenate([own_times, taken_times])
            # Seen from the delay on, and strictly later than the event itself.
            seen_after = np.concatenate([own_times, taken_times + max(taken.delay_ms - 1, 0)])
            if untimed is not None or taken.untimed is not None:
                own = np.zeros(len(own_times), bool) if untimed is None else untimed
                other = np.zeros(len(taken_times), bool)
                untimed = np.concatenate([own, other if taken.untimed is None else taken.untimed])
        _check_untimed(spec.name, users, times, untimed)
        self.index = EventIndex(users, times, seen_after=seen_after, untimed=untimed)

    def column(self, name: str) -> np.ndarray:
        """A field of all events as stored, without regard to visibility.

        Args:
            name: of the field.

        Returns:
            one value an event, in index order.
        """
        if name not in self._columns:
            values = self._dataset.events(self.spec.name, [name])[name].values
            if self._taken is not None:
                values = np.concatenate([values, self._taken.column(name)])
            self._columns[name] = self.index.in_order(values)
        return self._columns[name]

    def visible(self, name: str, events: np.ndarray, gap_ms: np.ndarray) -> np.ndarray:
        """A field of some events, as it was known when the examples happened.

        Args:
            name: of the field.
            events: positions in index order, int64 (T,).
            gap_ms: time from each event to its example, int64 (T,).

        Returns:
            (T,): the stored value, or `unknown` where the field was not visible yet; for events
            without a time of their own it never is, unless it is visible at once.
        """
        field = _field(self.spec, name)
        values = self.column(name)[events]
        if not field.visible_after_ms:
            return values
        known = gap_ms >= field.visible_after_ms
        if self.index.untimed is not None:
            known &= ~self.index.untimed[events]
        return np.where(known, values, np.asarray(field.unknown, values.dtype))


class _Taken:
    """The events that a union takes from another stream, in the order of its files.

    Attributes:
        users, times: of these events, int64.
        untimed: which of them have no time of their own; None: all have one.
        delay_ms: how long after the event it is known to be one of them.
    """

    def __init__(self, dataset: Dataset, also: UnionSpec) -> None:
        self._dataset, self._spec = dataset, dataset.spec.stream(also.stream)
        users, times, untimed = _who_and_when(dataset, self._spec)
        self.delay_ms = _field(self._spec, also.field).visible_after_ms
        kept = np.isin(dataset.events(also.stream, [also.field])[also.field].values, also.values)
        if untimed is not None and self.delay_ms:
            kept &= ~untimed  # what they were is never known
        self._rows = np.flatnonzero(kept)
        self.users, self.times = users[self._rows], times[self._rows]
        self.untimed = None if untimed is None else untimed[self._rows]

    def column(self, name: str) -> np.ndarray:
        return self._dataset.events(self._spec.name, [name])[name].values[self._rows]


def _who_and_when(
    dataset: Dataset, spec: StreamSpec
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """User and time of every stored event, and which have no time of their own."""
    names = [spec.user, spec.time, *([] if spec.untimed is None else [spec.untimed])]
    columns = dataset.events(spec.name, names)
    untimed = None if spec.untimed is None else columns[spec.untimed].values.astype(bool)
    return columns[spec.user].values, columns[spec.time].values, untimed


def _check_untimed(
    stream: str, users: np.ndarray, times: np.ndarray, untimed: np.ndarray | None
) -> None:
    if untimed is None:
        return
    users, times = users[untimed], times[untimed]
    order = np.lexsort((times, users))
    users, times = users[order], times[order]
    differ = (users[1:] == users[:-1]) & (times[1:] != times[:-1])
    if differ.any():
        place = int(np.argmax(differ))
        raise DataError(
            f"gem data: untimed events of stream {stream!r} must have one time a user, that of "
            f"the last of them; got {times[place]} and {times[place + 1]} for user "
            f"{users[place]}; write the later one to all of them"
        )


def _field(spec: StreamSpec, name: str) -> EventIdField | EventNumberField:
    return next(field for field in (*spec.ids, *spec.numbers) if field.name == name)

"""The events of a stream, as the examples may know them. Part of `sources`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gem.data.checked_array import Values
from gem.data.columns import Column
from gem.data.entity_table import IdInfo
from gem.data.features import DatasetSpec
from gem.data.fields import EventIdField, EventNumberField, StreamSpec, UnionSpec
from gem.data.join import EventIndex
from gem_opkit.errors import DataError


class StoredEvents(Protocol):
    """The events of a data set, by stream and field: `gem.data.dataset.Dataset` has them."""

    spec: DatasetSpec

    def events(self, stream: str, names: Iterable[str] | None = None) -> Mapping[str, Column]:
        """Columns of a stream's events, in the order in which they are stored."""
        ...


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
        spec: of the stream.
        index: its index.
        column: name of a field -> one value an event, in index order.
    """

    def __init__(
        self, spec: StreamSpec, index: EventIndex, column: Callable[[str], Values]
    ) -> None:
        self.spec, self.index = spec, index
        self._column = column
        self._columns: dict[str, Values] = {}

    def take_from(self, other: "StreamSource") -> None:
        """Hold other events from now on; who reads this stream reads those.

        Args:
            other: of the same stream.
        """
        self.index, self._column, self._columns = other.index, other._column, other._columns

    def column(self, name: str) -> Values:
        """A field of all events as stored, without regard to visibility.

        Args:
            name: of the field.

        Returns:
            one value an event, in index order; not to be written to.
        """
        if name not in self._columns:
            self._columns[name] = self._column(name)
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
        field = event_field_of(self.spec, name)
        values = self.column(name)[events]
        if not field.visible_after_ms:
            return values
        known = gap_ms >= field.visible_after_ms
        if self.index.untimed is not None:
            known &= ~self.index.untimed[events]
        return np.where(known, values, np.asarray(field.unknown, values.dtype))


def whole_stream(dataset: StoredEvents, spec: StreamSpec) -> StreamSource:
    """A stream whose columns are decoded whole, each when it is first asked for.

    Args:
        dataset: the data set.
        spec: of the stream.

    Returns:
        the stream, indexed.

    Raises:
        DataError: untimed events of one user have different times.
    """
    taken: _Taken | None = None
    users, times, untimed = _who_and_when(dataset, spec)
    seen_after = None
    if spec.also is not None:
        taken = _Taken(dataset, spec.also)
        own_times, taken_times = times, taken.times
        users = np.concatenate([users, taken.users])
        times = np.concatenate([own_times, taken_times])
        seen_after = np.concatenate([own_times, taken_times + seen_later_ms(taken.delay_ms)])
        if untimed is not None or taken.untimed is not None:
            own = np.zeros(len(own_times), bool) if untimed is None else untimed
            other = np.zeros(len(taken_times), bool)
            untimed = np.concatenate([own, other if taken.untimed is None else taken.untimed])
    _check_untimed(spec.name, users, times, untimed)
    index = EventIndex(users, times, seen_after=seen_after, untimed=untimed)

    def column(name: str) -> np.ndarray:
        values = dataset.events(spec.name, [name])[name].values
        if taken is not None:
            values = np.concatenate([values, taken.column(name)])
        return index.in_order(values)

    return StreamSource(spec, index, column)


def seen_later_ms(delay_ms: int) -> int:
    """Strictly after which time, counted from its own, a taken event is seen.

    Args:
        delay_ms: how long after it the field is visible by which it is taken.

    Returns:
        the difference: it is seen from the delay on, and strictly later than the event itself.
    """
    return max(delay_ms - 1, 0)


class _Taken:
    """The events that a union takes from another stream, in the order of its files.

    Attributes:
        users, times: of these events, int64.
        untimed: which of them have no time of their own; None: all have one.
        delay_ms: how long after the event it is known to be one of them.
    """

    def __init__(self, dataset: StoredEvents, also: UnionSpec) -> None:
        self._dataset, self._spec = dataset, dataset.spec.stream(also.stream)
        users, times, untimed = _who_and_when(dataset, self._spec)
        self.delay_ms = event_field_of(self._spec, also.field).visible_after_ms
        kept = np.isin(dataset.events(also.stream, [also.field])[also.field].values, also.values)
        if untimed is not None and self.delay_ms:
            kept &= ~untimed  # what they were is never known
        self._rows = np.flatnonzero(kept)
        self.users, self.times = users[self._rows], times[self._rows]
        self.untimed = None if untimed is None else untimed[self._rows]

    def column(self, name: str) -> np.ndarray:
        return self._dataset.events(self._spec.name, [name])[name].values[self._rows]


def _who_and_when(
    dataset: StoredEvents, spec: StreamSpec
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
        raise untimed_differ(stream, users[place], times[place], times[place + 1])


def untimed_differ(stream: str, user: int, one_ms: int, other_ms: int) -> DataError:
    """The error for untimed events of one user that have two times.

    Args:
        stream: name of the stream.
        user: whose they are.
        one_ms: a time of theirs.
        other_ms: another one.
    """
    return DataError(
        f"gem data: untimed events of stream {stream!r} must have one time a user, that of "
        f"the last of them; got {one_ms} and {other_ms} for user "
        f"{user}; write the later one to all of them"
    )


def event_field_of(spec: StreamSpec, name: str) -> EventIdField | EventNumberField:
    """A field of a stream.

    Args:
        spec: of the stream.
        name: of a field that it declares.
    """
    return next(field for field in (*spec.ids, *spec.numbers) if field.name == name)

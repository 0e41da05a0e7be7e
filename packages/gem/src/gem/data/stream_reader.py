"""The events of one stream, for the examples of a batch."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gem.data.batch import StreamBatch
from gem.data.entity_table import IdInfo
from gem.data.features import NumberTransform, StreamRead
from gem.data.names import nearest
from gem.data.schema import IdInput, StreamInput
from gem.data.sources import Sources
from gem.data.stream_source import EventField
from gem.data.transforms import apply_transforms
from gem_jagged.batch import Jagged, Layout
from gem_opkit.errors import ConfigError, refusal


def id_input(name: str, info: IdInfo) -> IdInput:
    """Describe a categorical input to the model.

    Args:
        name: of the input.
        info: its table.

    Returns:
        the entry of the batch schema.
    """
    return IdInput(
        name=name,
        table=info.table,
        num_embeddings=info.rows,
        id_space=info.id_space,
        multi=info.multi,
    )


class StreamReader:
    """Reads one stream as a recipe says.

    Attributes:
        schema: its fields, in batch order.

    Args:
        sources: of the data set.
        name: of the stream.
        read: how it is read.
        statistics: names of the per-event statistics, the last columns of its numbers.
    """

    def __init__(
        self, sources: Sources, name: str, read: StreamRead, statistics: tuple[str, ...]
    ) -> None:
        self._sources = sources
        self._source = sources.stream(name)
        self._max_events = read.max_events
        spec = self._source.spec
        own = tuple(field.name for field in (*spec.ids, *spec.numbers))
        fields = {
            field: sources.event_field(name, field)
            for field in (own if read.fields is None else read.fields)
        }
        self._ids = {n: f for n, f in fields.items() if f.info is not None}
        self._numbers = {n: f for n, f in fields.items() if f.info is None}
        self._statistics = statistics
        self.schema = StreamInput(
            name=name,
            ids=tuple(_described(n, f) for n, f in self._ids.items()),
            numbers=(*self._numbers, *statistics),
            max_events=read.max_events,
        )

    def lengths(self, low: int, high: int) -> np.ndarray:
        """Events of examples low .. high-1, without reading one.

        Args:
            low: first example row.
            high: end of the example rows, exclusive.

        Returns:
            int64 (high - low,).
        """
        users, times = self._sources.users[low:high], self._sources.times[low:high]
        return self._source.index.lengths(users, times, self._max_events)

    def arrays(
        self, low: int, high: int, transforms: Mapping[str, NumberTransform]
    ) -> dict[str, np.ndarray]:
        """The events of examples low .. high-1, as far as the log alone tells them.

        Args:
            low: first example row.
            high: end of the example rows, exclusive.
            transforms: of continuous fields, by name.

        Returns:
            `lengths`, int64 (B,); `gap`, float32 (T,); `numbers`, float32 (T, C), whose last
            columns are left for the statistics; and `id:<field>`, int64 (T,), each.
        """
        users, times = self._sources.users[low:high], self._sources.times[low:high]
        return self.arrays_at(users, times, transforms)

    def arrays_at(
        self, users: np.ndarray, times: np.ndarray, transforms: Mapping[str, NumberTransform]
    ) -> dict[str, np.ndarray]:
        """The events that some users had at some times, as far as the log alone tells them.

        Args:
            users: int64 (B,); one without events has an empty history.
            times: int64 (B,), ms; events strictly earlier are seen.
            transforms: of continuous fields, by name.

        Returns:
            as `arrays`.
        """
        index = self._source.index
        history = index.history(users, times, self._max_events)
        lengths, events = history.lengths, history.events
        gap_ms = np.repeat(times, lengths) - index.times[events]
        numbers = np.empty((len(events), len(self.schema.numbers)), np.float32)
        for place, field in enumerate(self._numbers.values()):
            numbers[:, place] = field.take(events, gap_ms)
        apply_transforms(numbers, tuple(self._numbers), transforms)
        found = {"lengths": lengths, "gap": (gap_ms / 1000.0).astype(np.float32)}
        ids = {f"id:{name}": field.take(events, gap_ms) for name, field in self._ids.items()}
        return found | ids | {"numbers": numbers}

    def news(self) -> tuple[np.ndarray, np.ndarray]:
        """When what is known of each user changes: an event is seen, or a field of one is.

        Returns:
            users and times, int64 (N,): whoever asks strictly later sees the change.

        Cost: two numbers an event in memory.
        """
        users, seen = self._source.index.seen()
        parts = [(users, seen)]
        spec, timed = self._source.spec, self._source.index.timed()
        fields = [f for f in (*spec.ids, *spec.numbers) if f.name in {*self._ids, *self._numbers}]
        for delay_ms in sorted({f.visible_after_ms for f in fields} - {0}):
            # Visible from the delay on, so to whoever asks strictly later than a moment before.
            parts.append((users[timed], self._source.index.all_times()[timed] + delay_ms - 1))
        who, when = zip(*parts, strict=True)
        return np.concatenate(who), np.concatenate(when)

    def events_with(self, field: str, values: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Events that hold certain ids in a field, and when that is known.

        Args:
            field: an id field that the recipe reads.
            values: ids.

        Returns:
            users and times, int64 (N,): known to whoever asks strictly later.

        Raises:
            ConfigError: the recipe reads no such field.
        """
        own = {f.name: f for f in self._source.spec.ids if f.name in self._ids}
        if field not in own:
            raise ConfigError(
                refusal(
                    "gem predict",
                    "--refresh-on",
                    must=f"name an id field that the stream itself holds ({', '.join(own)})",
                    got=repr(field) + nearest(field, own),
                    fix="correct the name",
                )
            )
        index, delay_ms = self._source.index, own[field].visible_after_ms
        users, seen = index.seen()
        taken = np.isin(self._source.column(field)[np.arange(len(users))], np.asarray(values))
        taken &= index.timed()
        known = np.maximum(seen, index.all_times() + delay_ms - 1) if delay_ms else seen
        return users[taken], known[taken]

    def batch(
        self,
        arrays: Mapping[str, np.ndarray],
        statistics: np.ndarray | None,
        transforms: Mapping[str, NumberTransform],
    ) -> StreamBatch:
        """Make the stream's part of a batch.

        Args:
            arrays: of `arrays`; they become the tensors.
            statistics: float32 (events, columns) of these examples; None where there are none.
            transforms: of continuous fields, by name.

        Returns:
            the stream; every member has the same layout.
        """
        layout = Layout.from_lengths(torch.from_numpy(arrays["lengths"]))
        numbers = arrays["numbers"]
        if statistics is not None:
            room = numbers[:, len(self._numbers) :]
            room[:] = statistics
            apply_transforms(room, self._statistics, transforms)

        def packed(name: str) -> Jagged:
            return Jagged.from_layout(torch.from_numpy(arrays[name]), layout)

        return StreamBatch(
            ids={name: packed(f"id:{name}") for name in self._ids},
            numbers=packed("numbers"),
            gap_seconds=packed("gap"),
        )


def _described(name: str, field: EventField) -> IdInput:
    if field.info is None:
        raise TypeError(f"StreamReader: {name} is a number")
    return id_input(name, field.info)

"""The events of one stream, for the examples of a batch."""

from collections.abc import Mapping

import numpy as np
import torch

from gem.data.batch import StreamBatch
from gem.data.entity_table import IdInfo
from gem.data.features import NumberTransform, StreamRead
from gem.data.schema import IdInput, StreamInput
from gem.data.sources import Sources
from gem.data.stream_source import EventField
from gem.data.transforms import apply_transforms
from gem_jagged.batch import Jagged, Layout


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

    def batch(
        self,
        low: int,
        high: int,
        statistics: np.ndarray | None,
        transforms: Mapping[str, NumberTransform],
    ) -> StreamBatch:
        """The events of examples low .. high-1.

        Args:
            low: first example row.
            high: end of the example rows, exclusive.
            statistics: float32 (events, columns) of these examples; None where there are none.
            transforms: of continuous fields, by name.

        Returns:
            the stream's part of the batch; every member has the same layout.
        """
        times = self._sources.times[low:high]
        index = self._source.index
        history = index.history(self._sources.users[low:high], times, self._max_events)
        lengths, events = history.lengths, history.events
        layout = Layout.from_lengths(torch.from_numpy(lengths))
        gap_ms = np.repeat(times, lengths) - index.times[events]
        numbers = np.empty((len(events), len(self.schema.numbers)), np.float32)
        for place, field in enumerate(self._numbers.values()):
            numbers[:, place] = field.take(events, gap_ms)
        if statistics is not None:
            numbers[:, len(self._numbers) :] = statistics
        apply_transforms(numbers, self.schema.numbers, transforms)
        return StreamBatch(
            ids={
                name: Jagged.from_layout(torch.from_numpy(field.take(events, gap_ms)), layout)
                for name, field in self._ids.items()
            },
            numbers=Jagged.from_layout(torch.from_numpy(numbers), layout),
            gap_seconds=Jagged.from_layout(
                torch.from_numpy((gap_ms / 1000.0).astype(np.float32)), layout
            ),
        )


def _described(name: str, field: EventField) -> IdInput:
    if field.info is None:
        raise TypeError(f"StreamReader: {name} is a number")
    return id_input(name, field.info)

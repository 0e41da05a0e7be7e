"""From a request to tensors, by the reader's own code, with the statistics that training left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gem.data.assemble import Assembler
from gem.data.batch import ExampleBatch, StreamBatch
from gem.data.dataset import SPEC_FILE, Dataset, read_spec
from gem.data.features import StreamRead
from gem.data.schema import BatchSchema
from gem.data.statistics.engine import StatisticsBlock
from gem.data.statistics.rates import Block
from gem.data.statistics.state import Outputs, StatisticState
from gem.data.stream_reader import StreamReader
from gem.data.transforms import resolved_transforms
from gem.serving.manifest import ArtefactManifest
from gem.serving.request import ScoreRequest
from gem.serving.request_columns import Texts
from gem.serving.request_log import RequestLog, RequestSources, Told
from gem.serving.sharing import one_history
from gem_jagged.batch import Jagged, Layout
from gem_opkit.errors import DataError, refusal


@dataclass(frozen=True, slots=True)
class ServedBatch:
    """Candidates of one request or of several.

    Attributes:
        batch: one example a candidate; of the streams only those whose events differ between the
            candidates of a request.
        shared: the other streams, one history a request.
        owners_N: request of each candidate, int64, not falling.
        counts: candidates of each request.
    """

    batch: ExampleBatch
    shared: Mapping[str, StreamBatch]
    owners_N: Tensor
    counts: tuple[int, ...]

    def to(self, device: torch.device) -> "ServedBatch":
        """The same on another device.

        Args:
            device: where to.
        """
        return ServedBatch(
            self.batch.to(device),
            {name: stream.to(device) for name, stream in self.shared.items()},
            self.owners_N.to(device),
            self.counts,
        )


class RequestReader:
    """Makes batches of requests. Not for several threads at once.

    Args:
        manifest: of an artefact.
        folder: its part of the data set.
        statistics: arrays that training left.
        share: read a history once a request where that can be done; else once a candidate.

    Raises:
        DataError: the artefact contradicts itself.
    """

    def __init__(
        self,
        manifest: ArtefactManifest,
        folder: Path,
        statistics: Mapping[str, np.ndarray],
        *,
        share: bool = True,
    ) -> None:
        dataset = Dataset(folder, read_spec(folder / SPEC_FILE))
        data, self.schema = manifest.data, manifest.inputs
        self._log = RequestLog(
            dataset, Texts(dataset.spec, folder), _columns_read(manifest), manifest.first_ms
        )
        widths = {vector.name: vector.width for vector in self.schema.vectors}
        sources = RequestSources(dataset, data, self._log, widths)
        at_rest = tuple(n for n in self.schema.numbers if n in sources.number_names())
        scaled = at_rest if data.running_scale is not None else ()
        self._state: StatisticState | None = None
        if data.statistics or scaled:
            self._state = StatisticState(sources, scaled)
            self._state.restore(statistics)
        self._transforms = resolved_transforms(dataset.spec, data)
        plain = tuple(name for name in at_rest if name not in scaled)
        reads = data.streams
        if reads is None:
            reads = {stream.name: StreamRead() for stream in dataset.spec.streams}
        streams = {
            name: StreamReader(
                sources, name, read, self._state.event_names.get(name, ()) if self._state else ()
            )
            for name, read in reads.items()
        }
        _check_schema(self.schema, streams, plain, self._state)
        self._once = {n: s for n, s in streams.items() if share and one_history(data, n)}
        each = {name: stream for name, stream in streams.items() if name not in self._once}
        self._assembler = Assembler(sources, self.schema, each, plain, self._transforms)

    def read(self, request: ScoreRequest, time_ms: int) -> tuple[ServedBatch, Told]:
        """Make a batch of a request.

        Args:
            request: of a size that is allowed.
            time_ms: its time.

        Returns:
            its candidates, and what the request left open.

        Raises:
            RequestError: it has a name or a value that does not fit.
        """
        told = self._log.fill(request, time_ms)
        found = self._statistics(told.rows)
        block = None
        if found is not None:
            numbers, events = found.cut(0, told.rows)
            block = StatisticsBlock(numbers, events)
        batch = self._assembler.batch(self._assembler.arrays(0, told.rows), block)
        one = min(told.rows, 1)
        of_first = None if found is None else found.cut(0, one)[1]
        shared = {
            name: stream.batch(
                stream.arrays(0, one, self._transforms),
                None if of_first is None else of_first.get(name),
                self._transforms,
            )
            for name, stream in self._once.items()
        }
        owners_N = torch.zeros(told.rows, dtype=torch.int64)
        return ServedBatch(batch, shared, owners_N, (told.rows,)), told

    def _statistics(self, rows: int) -> Outputs | None:
        if self._state is None:
            return None
        if not rows:
            return self._state.nothing()
        # Group 0 is what was waiting to be known; no candidate teaches another one anything.
        block = Block(np.arange(rows), np.ones(rows, np.int64), np.zeros(rows, bool))
        return self._state.walk(block, outputs=True, add_pairs=False, add_rates=False)[0]


def rows_of_request(served: ServedBatch, low: int, high: int) -> ServedBatch:
    """Some of the candidates of one request.

    Args:
        served: of one request.
        low: first candidate.
        high: end of the candidates, exclusive, above ``low``.

    Returns:
        the same request with those alone.
    """
    batch = served.batch
    names = ("numbers_BD", "labels_BA", "label_mask_BA", "weights_B", "domains_B", "user_B")
    columns = {name: getattr(batch, name)[low:high] for name in (*names, "row_B")}
    if batch.vectors_BV is not None:
        columns["vectors_BV"] = batch.vectors_BV[low:high]
    part = replace(
        batch,
        streams={name: _cut_stream(stream, low, high) for name, stream in batch.streams.items()},
        ids={name: rows_of_jagged(field, low, high) for name, field in batch.ids.items()},
        **columns,
    )
    return ServedBatch(part, served.shared, served.owners_N[low:high], (high - low,))


def rows_of_jagged(field: Jagged, low: int, high: int) -> Jagged:
    """Some consecutive rows.

    Args:
        field: packed rows.
        low: first row.
        high: end of the rows, exclusive, above ``low``.
    """
    ends = field.lengths.cumsum(0)
    first = int(ends[low] - field.lengths[low])
    layout = Layout.from_lengths(field.lengths[low:high])
    return Jagged.from_layout(field.values[first : int(ends[high - 1])], layout)


def _cut_stream(stream: StreamBatch, low: int, high: int) -> StreamBatch:
    return StreamBatch(
        ids={name: rows_of_jagged(field, low, high) for name, field in stream.ids.items()},
        numbers=rows_of_jagged(stream.numbers, low, high),
        gap_seconds=rows_of_jagged(stream.gap_seconds, low, high),
    )


def join_served(parts: Sequence[ServedBatch]) -> ServedBatch:
    """Put requests one after the other, to be scored together.

    Args:
        parts: at least one, each with at least one candidate, of one reader.

    Returns:
        them as one.
    """
    if len(parts) == 1:
        return parts[0]
    batches = [part.batch for part in parts]
    names = ("numbers_BD", "labels_BA", "label_mask_BA", "weights_B", "domains_B", "user_B")
    columns = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
    first = batches[0]
    if first.vectors_BV is not None:
        columns["vectors_BV"] = torch.cat([cast(Tensor, b.vectors_BV) for b in batches])
    batch = replace(
        first,
        streams={name: _join_streams([b.streams[name] for b in batches]) for name in first.streams},
        ids={name: _join_jagged([b.ids[name] for b in batches]) for name in first.ids},
        row_B=torch.arange(sum(batch.examples for batch in batches)),
        **columns,
    )
    counts = tuple(count for part in parts for count in part.counts)
    return ServedBatch(
        batch,
        {name: _join_streams([p.shared[name] for p in parts]) for name in parts[0].shared},
        torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
        counts,
    )


def _join_streams(parts: Sequence[StreamBatch]) -> StreamBatch:
    layout = Layout.from_lengths(torch.cat([part.numbers.lengths for part in parts]))

    def joined(fields: Sequence[Jagged]) -> Jagged:
        return Jagged.from_layout(torch.cat([field.values for field in fields]), layout)

    return StreamBatch(
        ids={name: joined([part.ids[name] for part in parts]) for name in parts[0].ids},
        numbers=joined([part.numbers for part in parts]),
        gap_seconds=joined([part.gap_seconds for part in parts]),
    )


def _join_jagged(parts: Sequence[Jagged]) -> Jagged:
    layout = Layout.from_lengths(torch.cat([part.lengths for part in parts]))
    return Jagged.from_layout(torch.cat([part.values for part in parts]), layout)


def _columns_read(manifest: ArtefactManifest) -> frozenset[str]:
    """Inputs and streams whose absence from a request is worth a word."""
    data, inputs = manifest.data, manifest.inputs
    read = {source.name for source in inputs.ids} | {*inputs.numbers}
    read |= {stream.name for stream in inputs.streams}
    read |= {derived.field for derived in data.derived if derived.kind == "bucket"}
    for statistic in data.statistics:
        read |= {*getattr(statistic, "keys", ())}
        feedback = getattr(statistic, "feedback", None)
        stream = getattr(statistic, "stream", None if feedback is None else feedback.stream)
        read |= set() if stream is None else {stream}
    return frozenset(read)


def _check_schema(
    schema: BatchSchema,
    streams: Mapping[str, StreamReader],
    plain: tuple[str, ...],
    state: StatisticState | None,
) -> None:
    """The inputs that are read have to be those that the model was built for."""
    found = tuple(stream.schema for stream in streams.values())
    numbers = (*plain, *(state.example_names if state is not None else ()))
    if found != schema.streams or numbers != schema.numbers:
        raise DataError(
            refusal(
                "artefact",
                "inputs",
                must="be those that its data section describes",
                got=f"numbers {', '.join(numbers)} and streams {', '.join(streams)}",
                fix="export it again with this version",
            )
        )

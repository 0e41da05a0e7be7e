"""A request as the log of a data set: its candidates are the examples, its history the events.

What the reader and the statistics make of a log they then make of a request, by the same code, so
a score differs in nothing from that of the same row in `gem predict`. The log is made once; each
request replaces what it holds.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from gem.data.columns import Column, ColumnRequest
from gem.data.dataset import Dataset
from gem.data.entity_table import Ids, take_ids
from gem.data.example_rows import ExampleRows
from gem.data.features import Bucket, DatasetSpec, DataSpec
from gem.data.fields import StreamSpec
from gem.data.names import suggestion
from gem.data.sources import Sources, bucket
from gem.data.stream_source import StreamSource, whole_stream
from gem.serving.request import RequestError, ScoreRequest
from gem.serving.request_columns import ColumnReader, Texts, filled_column, same_lengths
from gem.serving.request_vectors import GivenEmbedding


class RequestColumn:
    """A declared column of the examples, whose rows are the candidates of the request at hand.

    Attributes:
        held: the column.
    """

    def __init__(self, held: Column) -> None:
        self.held = held

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Values of rows."""
        return self.held.values[rows]

    def __len__(self) -> int:
        """Number of rows."""
        return self.held.rows

    def ids(self, rows: np.ndarray) -> Ids:
        """Ids of rows."""
        return take_ids(self.held, rows)


@dataclass(frozen=True, slots=True)
class Told:
    """What a request left open.

    Attributes:
        rows: number of candidates.
        time_ms: of the request.
        unknown: column -> values that its table does not have.
        missing: columns that were not given.
    """

    rows: int
    time_ms: int
    unknown: Mapping[str, int]
    missing: tuple[str, ...]


class RequestLog:
    """The log that consists of one request; `gem.data.log.Log`.

    Attributes:
        spec: the contract of the data set.
        examples: this log, as the examples that it has.
        times: time of every candidate, in ms.
        given: static fields that the request brings itself, by name.

        embeddings: cached embeddings that requests may bring, by name.

    Args:
        dataset: whose columns a request has.
        texts: what ids stand for.
        read: names of the inputs that the model or the statistics read; others may be missing
            without a word.
        first_ms: what stands for the time of the first example, until there is a request.
    """

    def __init__(self, dataset: Dataset, texts: Texts, read: frozenset[str], first_ms: int) -> None:
        self.spec: DatasetSpec = dataset.spec
        self._texts, self._read = texts, read
        self._declared = dataset.example_requests()
        self._tables = {field.name: field.table for field in self.spec.examples.ids}
        self._columns = {n: RequestColumn(filled_column(r, 0)) for n, r in self._declared.items()}
        self.times: Any = self._columns[self.spec.examples.time]
        self.times.held = Column(np.asarray([first_ms], np.int64))
        self.examples: ExampleRows = self
        self.given: dict[str, Column] = {}
        self._static: dict[str, tuple[ColumnRequest, str | None]] = {}
        for entity in self.spec.entities:
            requests = dataset.field_requests((*entity.ids, *entity.numbers))
            tables = {field.name: field.table for field in entity.ids}
            self._static |= {name: (r, tables.get(name)) for name, r in requests.items()}
        self._event_requests = {s.name: dataset.event_requests(s) for s in self.spec.streams}
        self._events: dict[str, dict[str, Column]] = {
            stream: {name: filled_column(request, 0) for name, request in requests.items()}
            for stream, requests in self._event_requests.items()
        }
        self._streams: dict[str, StreamSource] = {}
        self.embeddings: dict[str, GivenEmbedding] = {}

    # -- as a log ------------------------------------------------------------------------------
    def column(self, name: str) -> RequestColumn:
        """A declared column of the candidates.

        Args:
            name: of the column.
        """
        return self._columns[name]

    def stream(self, name: str) -> StreamSource:
        """A stream, which holds the events of each request in turn.

        Args:
            name: of the stream.
        """
        if name not in self._streams:
            self._streams[name] = whole_stream(self, self.spec.stream(name))
        return self._streams[name]

    def events(self, stream: str, names: Iterable[str] | None = None) -> Mapping[str, Column]:
        """Columns of a stream's events, as the request gave them.

        Args:
            stream: its name.
            names: of the columns; all are there.
        """
        return self._events[stream]

    # -- a request -----------------------------------------------------------------------------
    def fill(self, request: ScoreRequest, time_ms: int) -> Told:
        """Hold a request in place of the one before.

        Args:
            request: of a size that is allowed.
            time_ms: its time.

        Returns:
            what it left open.

        Raises:
            RequestError: a name that the data set does not have, or a value that does not fit.
        """
        reader = ColumnReader(self._texts)
        self._check_names(request)
        rows = same_lengths("candidates", request.candidates)
        examples = self.spec.examples
        user = self._user(request, reader)
        held: dict[str, Column] = {}
        for name, how in self._declared.items():
            if name == examples.user:
                held[name] = Column(np.full(rows, user, np.int64))
            elif name == examples.time:
                held[name] = Column(np.full(rows, time_ms, np.int64))
            elif name == examples.domain:
                held[name] = Column(np.full(rows, self._domain(request), np.int64))
            else:
                table = self._tables.get(name)
                found = _given(request, name, how, table, rows, reader)
                if found is None and name in self._read:
                    found = reader.absent(f"candidates.{name}", how, rows)
                held[name] = filled_column(how, rows) if found is None else found
        given = {}
        for name, (how, table) in self._static.items():
            found = _given(request, name, how, table, rows, reader)
            if found is not None:
                given[name] = found
        events = {s.name: self._history(s, request, user, reader) for s in self.spec.streams}
        for name, cached in self.embeddings.items():
            if not cached.take(request.vectors.get(name), time_ms):
                reader.missing.append(f"vectors.{name}")
        # Nothing has failed: only now is anything of the request before replaced.
        self._events, self.given = events, given
        for name, column in held.items():
            self._columns[name].held = column
        for name, source in self._streams.items():
            source.take_from(whole_stream(self, self.spec.stream(name)))
        return Told(rows, time_ms, reader.unknown, tuple(reader.missing))

    def _check_names(self, request: ScoreRequest) -> None:
        examples = self.spec.examples
        own = {field.name for field in (*examples.ids, *examples.numbers)} - {examples.user}
        known = own | set(self._static)
        for part, names in (("features", request.features), ("candidates", request.candidates)):
            for name in names:
                if name not in known:
                    raise _unknown(f"{part}.{name}", "an input of the data set", name, known)
        for name in request.features:
            if name in request.candidates:
                raise RequestError(
                    f"request: features.{name} must not be in candidates as well; got both; remove "
                    f"one of them"
                )
        if examples.item is not None and examples.item not in request.candidates:
            raise RequestError(
                f"request: candidates must have the column {examples.item!r}, the item; got "
                f"{', '.join(request.candidates) or 'none'}; add it"
            )
        for name in request.vectors:
            if name not in self.embeddings:
                what = "an embedding that the model reads"
                raise _unknown(f"vectors.{name}", what, name, self.embeddings)
        for stream, columns in request.history.items():
            if stream not in self._event_requests:
                raise _unknown(
                    f"history.{stream}", "a stream of the data set", stream, self._event_requests
                )
            declared = self._event_requests[stream]
            fields = set(declared) - {self.spec.stream(stream).user}
            for name in columns:
                if name not in fields:
                    raise _unknown(
                        f"history.{stream}.{name}", "a field of its events", name, fields
                    )

    def _user(self, request: ScoreRequest, reader: ColumnReader) -> int:
        user = self.spec.examples.user
        field = next((f for f in self.spec.examples.ids if f.name == user), None)
        how = self._declared[user]
        how = ColumnRequest(user, "id", 0 if field is None else field.fill, how.rows)
        table = None if field is None else field.table
        return int(reader.column("user", [request.user], how, table).values[0])

    def _domain(self, request: ScoreRequest) -> int:
        if request.domain is None:
            return 0
        if request.domain not in self.spec.domains:
            raise _unknown("domain", "a domain of the data set", request.domain, self.spec.domains)
        return self.spec.domains.index(request.domain)

    def _history(
        self, stream: StreamSpec, request: ScoreRequest, user: int, reader: ColumnReader
    ) -> dict[str, Column]:
        where, columns = f"history.{stream.name}", request.history.get(stream.name)
        if columns is None:
            if stream.name in self._read:
                reader.missing.append(where)
            columns = {stream.time: []}
        rows = same_lengths(where, columns)
        if stream.time not in columns:
            raise RequestError(
                f"request: {where} must have the column {stream.time!r}; got "
                f"{', '.join(columns) or 'none'}; add it"
            )
        tables = {field.name: field.table for field in stream.ids}
        found = {}
        for name, how in self._event_requests[stream.name].items():
            if name == stream.user:
                found[name] = Column(np.full(rows, user, np.int64))
            elif name in columns:
                place = f"{where}.{name}"
                found[name] = reader.column(place, columns[name], how, tables.get(name))
            else:
                found[name] = reader.absent(f"{where}.{name}", how, rows)
        return found


def _given(
    request: ScoreRequest,
    name: str,
    how: ColumnRequest,
    table: str | None,
    rows: int,
    reader: ColumnReader,
) -> Column | None:
    """A column as the request gives it, for each candidate or for all; None where it does not."""
    if name in request.candidates:
        return reader.column(f"candidates.{name}", request.candidates[name], how, table)
    if name not in request.features:
        return None
    one = reader.column(f"features.{name}", [request.features[name]], how, table)
    found = take_ids(one, np.zeros(rows, np.int64))
    return Column(found.values, found.offsets)


class RequestSources(Sources):
    """Sources in which a static field may come with the request, in place of the stored one.

    Args:
        dataset: the artefact's part of the data set.
        data: the recipe's section.
        log: holds the requests.
        widths: cached embedding that the model reads -> its numbers.
    """

    def __init__(
        self, dataset: Dataset, data: DataSpec, log: RequestLog, widths: Mapping[str, int]
    ) -> None:
        # Embeddings come with the requests: no folder of them is opened.
        super().__init__(dataset, data.model_copy(update={"user_embeddings": {}}), log)
        self._requests = log
        reads = data.user_embeddings
        log.embeddings = {n: GivenEmbedding(n, reads[n], width) for n, width in widths.items()}
        self.embeddings.update(cast(Any, log.embeddings))  # what reads them asks for no more
        self._ages.update({f"{name}_age_hours": name for name in widths if reads[name].age})

    def ids(self, name: str) -> Callable[[np.ndarray], Ids]:
        """A categorical input as a function of candidates; as `Sources.ids`."""
        stored, derived = super().ids(name), self._derived.get(name)
        if isinstance(derived, Bucket):
            number = self.numbers(derived.field)
            return lambda rows: Ids(bucket(number(rows), derived))
        if self.entity_field(name) is None:
            return stored

        def take(rows: np.ndarray) -> Ids:
            own = self._requests.given.get(name)
            return stored(rows) if own is None else take_ids(own, rows)

        return take

    def numbers(self, name: str) -> Callable[[np.ndarray], np.ndarray]:
        """A continuous input as a function of candidates; as `Sources.numbers`."""
        stored = super().numbers(name)
        if self.entity_field(name) is None:
            return stored

        def take(rows: np.ndarray) -> np.ndarray:
            own = self._requests.given.get(name)
            return stored(rows) if own is None else own.values[rows]

        return take


def _unknown(where: str, what: str, name: str, known: Iterable[str]) -> RequestError:
    names = sorted(known)
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") or "there is none"
    return RequestError(
        f"request: {where} must be {what} ({shown}); got {name[:80]!r}{suggestion(name, names)}; "
        f"correct the name"
    )

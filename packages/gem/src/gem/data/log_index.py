"""The index of a log on disk: its events by user and time, and the times of its examples.

Built once in bounded memory, beside the data set or where the recipe says, and mapped into memory
by every process that reads. Values, fills and the order of events are those of
`gem.data.stream_source.whole_stream`.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from gem.data.array_folder import ArrayWriter, fingerprint, made_once
from gem.data.checked_array import CheckedArray
from gem.data.columns import Column, part_files
from gem.data.dataset import Dataset
from gem.data.features import DataSpec
from gem.data.fields import StreamSpec, UnionSpec
from gem.data.file_versions import changed
from gem.data.join import EventIndex
from gem.data.record_sort import sorted_records
from gem.data.scan import PieceReader
from gem.data.stream_source import StreamSource, event_field_of, seen_later_ms, untimed_differ

# Changes when what the arrays hold does.
_LAYOUT = 2
_SORT_KEYS = ("user", "part", "seen")
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 1 << 18, 1 << 24


class LogIndex:
    """Indexed parts of a data set, made where they are missing.

    Args:
        dataset: the data set.
        data: says where the index lies.
        budget_bytes: memory for making it, > 0.
    """

    def __init__(self, dataset: Dataset, data: DataSpec, *, budget_bytes: int) -> None:
        self._dataset, self._budget = dataset, budget_bytes
        self._root = dataset.folder / ".index"
        if data.index_folder is not None:
            # Many data sets may keep their indices in one place.
            path = hashlib.sha256(str(dataset.folder.resolve()).encode()).hexdigest()[:12]
            self._root = Path(data.index_folder) / f"{dataset.spec.name}-{path}"

    def times(self) -> np.ndarray:
        """Time of every example in ms, int64, mapped.

        Raises:
            DataError: times fall or are missing, or the index cannot be written.
        """
        name = self._dataset.spec.examples.time
        files = part_files(self._dataset.examples_folder)

        def make(writer: ArrayWriter, work: Path) -> None:
            del work
            writer.append("times", np.empty(0, np.int64))
            last, first = np.empty(0, np.int64), 0
            reader = self._reader(files, 8)
            for piece in reader.scan([self._dataset.example_request(name)]):
                values = piece[name].values
                # With the last time before it, where there is one.
                chain = np.concatenate([last, values])
                self._dataset.check_time_order(chain, first=first - len(last))
                writer.append("times", values)
                last, first = values[-1:], first + len(values)

        parts = {"layout": _LAYOUT, "time": name}
        # Of the examples all times are needed, and soon.
        return self._made("examples", parts, files, make, at_once=["times"])["times"].whole()

    def stream(self, spec: StreamSpec) -> StreamSource:
        """A stream, its events and all of its fields mapped.

        Args:
            spec: of the stream.

        Returns:
            the stream.

        Raises:
            DataError: as `gem.data.stream_source.whole_stream`, or a value of a declared field
                that is not what `dataset.toml` says, or the index cannot be written.
        """
        files = list(self._dataset.event_files(spec.name))
        parts: dict[str, object] = {"layout": _LAYOUT, "stream": spec.model_dump_json()}
        parts |= {table.name: table.model_dump_json() for table in self._dataset.spec.tables}
        if spec.also is not None:
            other = self._dataset.spec.stream(spec.also.stream)
            files += self._dataset.event_files(other.name)
            parts |= {"also": other.model_dump_json()}

        def make(writer: ArrayWriter, work: Path) -> None:
            log = _StreamLog(self._dataset, spec, self._budget)
            records = sorted_records(
                log.records, _SORT_KEYS, most=log.most, budget_bytes=self._budget // 2, work=work
            )
            _write_stream(writer, records, log)

        # Those that say where each user's events lie: a wrong one would lead anywhere.
        places = ["users", "starts", "timed"]
        arrays = self._made(f"stream-{spec.name}", parts, files, make, at_once=places)
        return StreamSource(spec, EventIndex.mapped(arrays), lambda name: arrays[f"field-{name}"])

    def _made(
        self,
        name: str,
        parts: Mapping[str, object],
        files: list[Path],
        make: Callable[[ArrayWriter, Path], None],
        *,
        at_once: list[str],
    ) -> dict[str, CheckedArray]:
        key = fingerprint(parts, files)

        def make_of_these(writer: ArrayWriter, work: Path) -> None:
            make(writer, work)
            if fingerprint(parts, files) != key:
                raise changed(files[0].parent)

        return made_once(self._root, name, key, make_of_these, at_once=at_once)

    def _reader(self, files: list[Path], row_bytes: int) -> PieceReader:
        return PieceReader(files, _piece_rows(self._budget, row_bytes))


def _piece_rows(budget_bytes: int, row_bytes: int) -> int:
    piece_bytes = min(max(budget_bytes // 16, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES)
    return max(piece_bytes // row_bytes, 1)


class _StreamLog:
    """The events of a stream in file order, those it takes from another one behind its own.

    Attributes:
        name: of the stream.
        most: number of events at most.
        fields: names of the stream's fields.
        delayed: whether events are seen later than their time says.
        untimed: whether there may be events without a time of their own.
        dtype: of a record.
    """

    def __init__(self, dataset: Dataset, spec: StreamSpec, budget_bytes: int) -> None:
        self._dataset, self._budget = dataset, budget_bytes
        self._spec, self._other = spec, None
        self.name = spec.name
        self.fields = [field.name for field in (*spec.ids, *spec.numbers)]
        self.untimed, self.delayed = spec.untimed is not None, False
        types = [("user", "<i8"), ("part", "?"), ("seen", "<i8"), ("time", "<i8")]
        types += [(f"field-{field.name}", "<i8") for field in spec.ids]
        types += [(f"field-{field.name}", "<f4") for field in spec.numbers]
        self.dtype = np.dtype(types)
        self._readers = [self._open(spec)]
        if spec.also is not None:
            self._other = dataset.spec.stream(spec.also.stream)
            self.untimed |= self._other.untimed is not None
            self.delayed = seen_later_ms(self._delay_ms(self._other, spec.also)) > 0
            self._readers.append(self._open(self._other))
        self.most = sum(reader.rows for reader in self._readers)

    def records(self, *, keys_only: bool) -> Iterator[np.ndarray]:
        """All events in pieces, of `dtype`.

        Args:
            keys_only: leave the fields empty.

        Yields:
            consecutive events.
        """
        yield from self._of(self._spec, self._readers[0], None, keys_only=keys_only)
        if self._other is not None:
            also = self._spec.also
            yield from self._of(self._other, self._readers[1], also, keys_only=keys_only)

    def _of(
        self, spec: StreamSpec, reader: PieceReader, also: UnionSpec | None, *, keys_only: bool
    ) -> Iterator[np.ndarray]:
        names = [spec.user, spec.time, *([] if spec.untimed is None else [spec.untimed])]
        names += [] if also is None else [also.field]
        names += [] if keys_only else self.fields
        declared = self._dataset.event_requests(spec)
        requests = [declared[name] for name in dict.fromkeys(names)]
        delay_ms = 0 if also is None else self._delay_ms(spec, also)
        for columns in reader.scan(requests):
            made = np.zeros(columns[spec.user].rows, self.dtype)
            made["user"], made["time"] = columns[spec.user].values, columns[spec.time].values
            made["seen"] = made["time"] + (seen_later_ms(delay_ms) if also is not None else 0)
            made["part"] = True
            if spec.untimed is not None:
                made["part"] = columns[spec.untimed].values == 0
            for field in [] if keys_only else self.fields:
                made[f"field-{field}"] = columns[field].values
            yield made if also is None else made[self._kept(made, columns, also, delay_ms)]

    def _kept(
        self, made: np.ndarray, columns: dict[str, Column], also: UnionSpec, delay_ms: int
    ) -> np.ndarray:
        kept = np.isin(columns[also.field].values, also.values)
        # What an untimed event was is never known, unless it is at once.
        return kept & made["part"] if delay_ms else kept

    def _delay_ms(self, spec: StreamSpec, also: UnionSpec) -> int:
        return event_field_of(spec, also.field).visible_after_ms

    def _open(self, spec: StreamSpec) -> PieceReader:
        rows = _piece_rows(self._budget, 2 * self.dtype.itemsize)
        return PieceReader(self._dataset.event_files(spec.name), rows)


def _write_stream(writer: ArrayWriter, records: Iterator[np.ndarray], log: _StreamLog) -> None:
    users = _Users(writer, log)
    _append(writer, np.empty(0, log.dtype), log)
    for piece in records:
        if len(piece):
            users.add(piece)
            _append(writer, piece, log)
    users.finish()


def _append(writer: ArrayWriter, piece: np.ndarray, log: _StreamLog) -> None:
    writer.append("times", piece["time"])
    if log.delayed:
        writer.append("seen", piece["seen"])
    if log.untimed:
        writer.append("untimed", ~piece["part"])
    for field in log.fields:
        writer.append(f"field-{field}", piece[f"field-{field}"])


class _Users:
    """Writes which users there are and where their events begin, as sorted events go by."""

    def __init__(self, writer: ArrayWriter, log: _StreamLog) -> None:
        self._writer, self._log = writer, log
        self._events = 0
        self._last: np.ndarray | None = None  # the event before
        for name in ("users", "starts", *(["timed"] if log.untimed else [])):
            writer.append(name, np.empty(0, np.int64))

    def add(self, piece: np.ndarray) -> None:
        chain = piece if self._last is None else np.concatenate([self._last, piece])
        before = len(chain) - len(piece)
        same = chain["user"][1:] == chain["user"][:-1]
        new = np.ones(len(piece), bool)
        new[1 - before :] = ~same
        places = self._events + np.arange(len(piece))
        self._writer.append("users", piece["user"][new])
        self._writer.append("starts", places[new])
        if self._log.untimed:
            self._add_timed(chain, piece, before=before, same=same, new=new, places=places)
        self._last = piece[-1:].copy()
        self._events += len(piece)

    def _add_timed(
        self,
        chain: np.ndarray,
        piece: np.ndarray,
        *,
        before: int,
        same: np.ndarray,
        new: np.ndarray,
        places: np.ndarray,
    ) -> None:
        """Where a user's own times begin: at the first event with one, or behind the last event."""
        differ = same & ~chain["part"][1:] & (chain["time"][1:] != chain["time"][:-1])
        if differ.any():
            place = int(np.argmax(differ))
            left, right = chain[place], chain[place + 1]
            raise untimed_differ(self._log.name, left["user"], left["time"], right["time"])
        timed = piece["part"]
        # The event before a piece's first is that of `_last`; none at all counts as timed.
        was_timed = np.ones(len(piece), bool)
        was_timed[1 - before :] = chain["part"][:-1]
        # A user without untimed events begins with a timed one; another one's times begin where
        # the kind of event changes, or where the next user comes and it has not.
        begins = np.where(new, timed, timed & ~was_timed)
        ended = new & ~was_timed
        self._writer.append("timed", np.sort(np.concatenate([places[begins], places[ended]])))

    def finish(self) -> None:
        end = np.asarray([self._events])
        self._writer.append("starts", end)
        if self._log.untimed and self._last is not None and not self._last["part"][0]:
            self._writer.append("timed", end)

"""Columns of the examples as functions of rows: held whole, or streamed in pieces.

Both give the same values. A log that fits into the budget is decoded when it is opened. A longer
one is decoded around the rows that are asked for, and a bounded number of pieces stays, so a walk
forwards through it decodes each row once.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from gem.data.columns import Column, ColumnRequest, empty_column, part_files
from gem.data.dataset import Dataset
from gem.data.entity_table import Ids, take_ids
from gem.data.scan import PieceReader

_MOST_PIECE_ROWS, _LEAST_PIECE_ROWS = 1 << 16, 1 << 8
# Pieces that stay: the statistics are a piece ahead of the batches, and a second reading of the
# same log, as for an evaluation, has its own place in it.
_KEPT_PIECES = 4


class RowColumn(Protocol):
    """A declared column of the examples."""

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Values of rows, one a row, in their order; not to be written to where given a slice."""
        ...

    def ids(self, rows: np.ndarray) -> Ids:
        """Ids of rows, of a column that may be multi-valued."""
        ...


class ExampleRows(Protocol):
    """The examples of a data set."""

    def column(self, name: str) -> RowColumn:
        """A declared column; a ConfigError names the nearest to one that is not."""
        ...


class WholeExamples:
    """Examples whose columns are decoded whole, each when it is first asked for."""

    def __init__(self, dataset: Dataset, names: tuple[str, ...]) -> None:
        self._dataset = dataset
        self._columns = dataset.examples(names)  # one pass over the files for all of these

    def column(self, name: str) -> RowColumn:
        """A declared column.

        Args:
            name: of the column.

        Returns:
            all rows of it.

        Raises:
            ConfigError, DataError: as `Dataset.examples`.
        """
        if name not in self._columns:
            self._columns |= self._dataset.examples([name])
        return _WholeColumn(self._columns[name])


class _WholeColumn:
    def __init__(self, column: Column) -> None:
        self._column = column

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        return self._column.values[rows]

    def ids(self, rows: np.ndarray) -> Ids:
        return take_ids(self._column, rows)


class StreamedExamples:
    """Examples of which a bounded number of pieces is held.

    Args:
        dataset: the data set.
        budget_bytes: memory for the pieces that stay, > 0; more is used where one batch needs it.

    Raises:
        DataError: a file cannot be read.
    """

    def __init__(self, dataset: Dataset, *, budget_bytes: int) -> None:
        self._declared = dataset.example_requests()
        self._dataset = dataset
        files = part_files(dataset.examples_folder)
        # Twice: decoding makes a second copy of a piece for a moment.
        row_bytes = sum(bytes_a_row(request) for request in self._declared.values())
        rows = budget_bytes // (2 * _KEPT_PIECES * row_bytes)
        rows = min(max(rows, _LEAST_PIECE_ROWS), _MOST_PIECE_ROWS)
        self._reader = PieceReader(files, rows)
        self._wanted: dict[str, ColumnRequest] = {}
        self._pieces: OrderedDict[int, dict[str, Column]] = OrderedDict()
        self._lock = threading.Lock()

    def column(self, name: str) -> RowColumn:
        """A declared column. Its values are read and checked when rows of it are asked for.

        Args:
            name: of the column.

        Returns:
            rows -> values; rows must be consecutive.

        Raises:
            ConfigError: a name that `dataset.toml` does not declare.
        """
        with self._lock:
            self._wanted[name] = self._dataset.example_request(name)
        return _StreamedColumn(self, name)

    def part(self, name: str, low: int, high: int) -> Column:
        """Consecutive rows of a column.

        Args:
            name: a column that `column` was called for.
            low: first row.
            high: end of the rows, exclusive.

        Returns:
            rows low .. high-1.

        Raises:
            DataError: as `gem.data.columns.read_columns`.
        """
        if low >= high:
            return empty_column(self._wanted[name])
        with self._lock:
            parts = [_cut(column, a, b) for column, a, b in self._covering(name, low, high)]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _covering(self, name: str, low: int, high: int) -> Iterator[tuple[Column, int, int]]:
        first, last = self._reader.number_of(low), self._reader.number_of(high - 1)
        for number in range(first, last + 1):
            piece = self._reader.pieces[number]
            column = self._column_of(number, name, keep=max(_KEPT_PIECES, last - first + 2))
            yield column, max(low - piece.first, 0), min(high - piece.first, piece.rows)

    def _column_of(self, number: int, name: str, *, keep: int) -> Column:
        held = self._pieces.get(number)
        if held is None:
            while len(self._pieces) >= keep:
                self._pieces.popitem(last=False)
            held = self._pieces[number] = self._reader.read(number, list(self._wanted.values()))
        elif name not in held:  # asked for since the piece was read
            held |= self._reader.read(number, [self._wanted[name]])
        self._pieces.move_to_end(number)
        return held[name]


class _StreamedColumn:
    def __init__(self, examples: StreamedExamples, name: str) -> None:
        self._examples, self._name = examples, name

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        values = self._part(rows).values
        return values if isinstance(rows, slice) else values.copy()

    def ids(self, rows: np.ndarray) -> Ids:
        part = self._part(rows)
        return Ids(part.values.copy(), part.offsets)

    def _part(self, rows: slice | np.ndarray) -> Column:
        if isinstance(rows, slice):
            return self._examples.part(self._name, rows.start, rows.stop)
        if not len(rows):
            return self._examples.part(self._name, 0, 0)
        low, high = int(rows[0]), int(rows[-1]) + 1
        if high - low != len(rows):
            raise ValueError(f"StreamedExamples: rows must be consecutive; got {low} .. {high - 1}")
        return self._examples.part(self._name, low, high)


def bytes_a_row(request: ColumnRequest) -> int:
    """About what a row of a column takes in memory; lists are taken to hold eight ids.

    Args:
        request: how it is read.
    """
    return {"ids": 72, "id": 8, "time": 8}.get(request.kind, 4)


def _cut(column: Column, start: int, stop: int) -> Column:
    if column.offsets is None:
        return Column(column.values[start:stop])
    offsets = column.offsets[start : stop + 1]
    return Column(column.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def _joined(parts: list[Column]) -> Column:
    values = np.concatenate([part.values for part in parts])
    lengths = [np.diff(part.offsets) for part in parts if part.offsets is not None]
    if not lengths:
        return Column(values)
    return Column(values, np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum())

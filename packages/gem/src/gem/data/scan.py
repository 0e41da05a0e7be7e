"""The rows of Parquet files in pieces of bounded length, forwards at little cost.

A row group may be far larger than what a process shall hold, so it is decoded in pieces, page by
page; reading piece after piece continues where the last one ended. A jump costs the decoding of
the pieces before it in its row group.

A run is long: a file that was written anew since its pieces were counted is refused, as its rows
would be others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.columns import (
    DAMAGE,
    Column,
    ColumnRequest,
    check_names,
    decode_rows,
    not_whole,
    open_parquet,
)
from gem.data.file_versions import changed, file_version


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one row group.

    Attributes:
        first: number of the first row over all files.
        rows: how many, > 0.
        file: number of the file.
        file_row: number of the first row in that file.
        group: number of the row group.
        place: number of the piece in its row group.
    """

    first: int
    rows: int
    file: int
    file_row: int
    group: int
    place: int


class PieceReader:
    """Decodes the columns of a part of a data set piece by piece.

    Attributes:
        pieces: all of them, in row order.
        rows: number of rows over all files.

    Args:
        files: in order.
        piece_rows: rows of a piece at most, > 0.

    Raises:
        DataError: a file cannot be read.
    """

    def __init__(self, files: Sequence[Path], piece_rows: int) -> None:
        self._files, self._piece_rows = list(files), piece_rows
        self._versions = [file_version(file) for file in self._files]
        self.pieces = _pieces_of(self._files, piece_rows)
        self.rows = self.pieces[-1].first + self.pieces[-1].rows if self.pieces else 0
        self._firsts = np.asarray([piece.first for piece in self.pieces], np.int64)
        self._open: tuple[int, pq.ParquetFile] | None = None
        # The tables that follow in the row group that was read last, and whose they are.
        self._following: Iterator[pa.Table] = iter(())
        self._next: tuple[int, tuple[str, ...]] = (-1, ())

    def number_of(self, row: int) -> int:
        """The piece that holds a row.

        Args:
            row: 0 .. rows-1.

        Returns:
            its number.
        """
        return int(np.searchsorted(self._firsts, row, side="right")) - 1

    def read(self, number: int, requests: Sequence[ColumnRequest]) -> dict[str, Column]:
        """Decode a piece.

        Args:
            number: of the piece.
            requests: what to read; nothing else is decoded.

        Returns:
            name -> column.

        Raises:
            DataError: as `gem.data.columns.read_columns`, or the file was written anew.
        """
        piece, names = self.pieces[number], tuple(request.name for request in requests)
        file = self._files[piece.file]
        try:
            if self._next != (number, names):
                self._following = self._tables(piece, requests)
                for _ in range(piece.place):
                    next(self._following)
            # Named before it is read: a fault must not leave half a row group to go on with.
            self._next = (-1, ())
            table = next(self._following)
        except DAMAGE as fault:
            self._check_version(piece.file)
            raise not_whole(file, fault) from fault
        except StopIteration as fault:
            raise changed(file) from fault
        if table.num_rows != piece.rows:
            raise changed(file)
        after = number + 1
        if after < len(self.pieces) and self.pieces[after].place:
            self._next = (after, names)
        return decode_rows(table, file, piece.file_row, requests)

    def scan(self, requests: Sequence[ColumnRequest]) -> Iterator[dict[str, Column]]:
        """Decode all pieces in turn.

        Args:
            requests: what to read.

        Yields:
            name -> column of each piece.
        """
        for number in range(len(self.pieces)):
            yield self.read(number, requests)

    def _tables(self, piece: Piece, requests: Sequence[ColumnRequest]) -> Iterator[pa.Table]:
        if self._open is None or self._open[0] != piece.file:
            self._open = piece.file, open_parquet(self._files[piece.file])
        self._check_version(piece.file)
        parquet = self._open[1]
        check_names(self._files[piece.file], parquet.schema_arrow.names, requests)
        # One thread: the decoder of several would read ahead, out of anybody's budget.
        batches = parquet.iter_batches(
            self._piece_rows,
            row_groups=[piece.group],
            columns=[request.name for request in requests],
            use_threads=False,
        )
        return _regrouped(batches, self._piece_rows)

    def _check_version(self, number: int) -> None:
        if file_version(self._files[number]) != self._versions[number]:
            raise changed(self._files[number])


def _pieces_of(files: Sequence[Path], piece_rows: int) -> list[Piece]:
    pieces, first = [], 0
    for number, file in enumerate(files):
        metadata, file_row = open_parquet(file).metadata, 0
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group).num_rows
            for place, start in enumerate(range(0, rows, piece_rows)):
                count = min(piece_rows, rows - start)
                pieces.append(Piece(first, count, number, file_row, group, place))
                first, file_row = first + count, file_row + count
    return pieces


def _regrouped(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Tables of exactly so many rows, the last one of fewer; Arrow may give smaller batches."""
    held: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        held.append(batch)
        count += batch.num_rows
        while count >= rows:
            table = pa.Table.from_batches(held)
            yield table.slice(0, rows)
            rest = table.slice(rows)
            held, count = rest.to_batches(), rest.num_rows
    if count:
        yield pa.Table.from_batches(held)

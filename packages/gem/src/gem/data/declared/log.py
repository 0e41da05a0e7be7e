"""A raw log: the rows of it that a declaration takes, with their times."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.declared.encode import texts_of, times_of
from gem.data.declared.files import Place, RawTable
from gem.data.declared.spec import TimedTable, Where, milliseconds
from gem_opkit.errors import DataError


class Log:
    """Rows of a timed table that are taken, batch by batch.

    Attributes:
        declared: its columns and which rows are taken.
        left_out: rows that were not taken so far.

    Args:
        table: the raw table.
        declared: as the attribute.
    """

    def __init__(self, table: RawTable, declared: TimedTable) -> None:
        self.table = table
        self.declared = declared
        self.left_out = 0

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[Place, pa.RecordBatch, np.ndarray]]:
        """Columns of the rows that are taken, user, item and time among them.

        Args:
            columns: names of further columns.

        Yields:
            where a batch comes from (faults name rows of the files), its columns, and the times of
            its rows in ms, int64.

        Raises:
            DataError: as `RawTable.batches` and `times_of`.
        """
        declared = self.declared
        first = declared.time_from and milliseconds(declared.time_from)
        end = declared.time_until and milliseconds(declared.time_until)
        extra = [name for name in (declared.time, declared.user, declared.item) if name]
        if declared.where is not None:
            extra.append(declared.where.column)
        row = 0
        for place, batch in self.table.batches([*columns, *extra]):
            if declared.time is None:
                times = np.arange(row, row + batch.num_rows, dtype=np.int64)
            else:
                column = batch.column(declared.time)
                times = times_of(
                    column, declared.time, declared.time_format, declared.time_zone, place
                )
            row += batch.num_rows
            taken = np.ones(batch.num_rows, bool)
            if first is not None:
                taken &= times >= first
            if end is not None:
                taken &= times < end
            if declared.where is not None:
                taken &= rows_where(declared.where, batch, place)
            if not taken.all():
                self.left_out += int((~taken).sum())
                batch = batch.filter(pa.array(taken))
                times = times[taken]
                place = _Filtered(place, np.flatnonzero(taken))
            yield place, batch, times


class _Filtered(Place):
    """A batch of which some rows were left out: messages name the row of the file."""

    def __init__(self, place: Place, rows: np.ndarray) -> None:
        super().__init__(place.path, place.first_row)
        self._rows = rows

    def refuse(self, column: str, must: str, got: object, row: int | None = None) -> DataError:
        return super().refuse(column, must, got, None if row is None else int(self._rows[row]))


def rows_where(where: Where, batch: pa.RecordBatch, place: Place) -> np.ndarray:
    """Which rows hold certain texts in a column.

    Args:
        where: the column and the texts.
        batch: holds the column.
        place: where it comes from.

    Returns:
        bool, one a row.
    """
    texts = texts_of(batch.column(where.column), place, where.column)
    options = pc.SetLookupOptions(pa.array(where.values, pa.string()))
    return pc.call_function("is_in", [texts], options).to_numpy(zero_copy_only=False)

"""Static features of users and items, by the id that they are joined by. Part of `sources`."""

from dataclasses import dataclass

import numpy as np

from gem.data.columns import Column
from gem.data.dataset import Dataset
from gem.data.fields import EntitySpec, IdField, NumberField
from gem.data.join import packed_ranges


@dataclass(frozen=True, slots=True)
class Ids:
    """Ids of B rows: one each, or with offsets (B+1,) several."""

    values: np.ndarray
    offsets: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class IdInfo:
    """The table of an id field, and whether a row has several ids."""

    table: str
    rows: int
    id_space: str
    multi: bool = False


def take_ids(column: Column, rows: np.ndarray) -> Ids:
    """The ids of some rows of a column.

    Args:
        column: single- or multi-valued.
        rows: int64 (n,), in any order.

    Returns:
        ids in the order of `rows`, with offsets (n+1,) where the column is multi-valued.
    """
    if column.offsets is None:
        return Ids(column.values[rows])
    starts, ends = column.offsets[rows], column.offsets[rows + 1]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(ends - starts, out=offsets[1:])
    return Ids(column.values[packed_ranges(starts, offsets)], offsets)


class EntityTable:
    """Static features of an entity; one more row than the files holds the fills.

    Attributes:
        spec: its contract.
    """

    def __init__(self, dataset: Dataset, spec: EntitySpec, key: IdInfo) -> None:
        self.spec = spec
        self._columns = dataset.entity(spec.name)
        keys = self._columns[spec.key].values
        self._rows = len(keys)
        self._valid_from: np.ndarray | None = None
        if spec.valid_from is not None:
            # The row of the fills holds at any time.
            always = np.iinfo(np.int64).min
            self._valid_from = np.append(self._columns[spec.valid_from].values, always)
        if key.id_space == "row":
            self._sorted_keys = None
            self._row_of_id = np.full(key.rows, self._rows, np.int64)
            self._row_of_id[keys] = np.arange(self._rows)
        else:
            self._row_of_id = np.argsort(keys, kind="stable")
            self._sorted_keys = keys[self._row_of_id]

    def rows_of(self, ids: np.ndarray, times: np.ndarray) -> np.ndarray:
        """The row of each id, as an example knows it.

        Args:
            ids: keys of the entity, int64.
            times: time of the example that asks, in ms, int64, the same shape.

        Returns:
            int64, the same shape; the row of the fills for an id that the entity lacks, and
            before the row holds.
        """
        rows = self._latest_rows(ids)
        if self._valid_from is None:
            return rows
        return np.where(times >= self._valid_from[rows], rows, self._rows)

    def _latest_rows(self, ids: np.ndarray) -> np.ndarray:
        if self._sorted_keys is None:
            return self._row_of_id[ids]
        if not self._rows:
            return np.zeros(len(ids), np.int64)
        place = np.minimum(np.searchsorted(self._sorted_keys, ids), self._rows - 1)
        found = self._sorted_keys[place] == ids
        return np.where(found, self._row_of_id[place], self._rows)

    def id_column(self, field: IdField) -> Column:
        """A categorical field, by entity row.

        Args:
            field: of this entity.

        Returns:
            ids as stored, the fill in the last row.
        """
        column = self._columns[field.name]
        values = np.append(column.values, np.int64(field.fill))
        if column.offsets is None:
            return Column(values)
        return Column(values, np.append(column.offsets, len(values)))

    def number_column(self, field: NumberField) -> np.ndarray:
        """A continuous field, by entity row.

        Args:
            field: of this entity.

        Returns:
            float32, the fill in the last row.
        """
        return np.append(self._columns[field.name].values, np.float32(field.fill))

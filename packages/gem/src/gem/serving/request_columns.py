"""Values of a request as the arrays that a data set would give. Part of `gem.serving`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.columns import MOST_MS, Column, ColumnRequest
from gem.data.declared.encode import text_hash
from gem.data.features import DatasetSpec
from gem.serving.request import RequestError

_INT64 = np.iinfo(np.int64)
_LONGEST_SHOWN = 60


class Texts:
    """What the ids of each table stand for, both as declared and as a data set of texts wrote it.

    Args:
        spec: the contract of the data set.
        folder: of the artefact's part of it.
    """

    def __init__(self, spec: DatasetSpec, folder: Path) -> None:
        self._ids: dict[str, dict[str, int]] = {}
        self._hashed = {table.name for table in spec.tables if table.id_space == "hash"}
        for table in spec.tables:
            if table.values:
                self._ids[table.name] = {text: place for place, text in enumerate(table.values)}
            files = sorted((folder / "vocabularies" / table.name).glob("*.parquet"))
            for file in files:
                read: pa.Table = pq.read_table(file, columns=["id", "value"])
                texts, ids = read.column("value").to_pylist(), read.column("id").to_pylist()
                self._ids.setdefault(table.name, {}).update(zip(texts, ids, strict=True))

    def id_of(self, table: str, text: str) -> int | None:
        """The id of a text.

        Args:
            table: that the id is of.
            text: what it stands for.

        Returns:
            the id; None where the table has no such text.
        """
        if table in self._hashed:
            return text_hash(text)
        return self._ids.get(table, {}).get(text)


class ColumnReader:
    """Decodes the columns of one request, and keeps count of what was missing.

    Attributes:
        unknown: column -> values that its table does not have.
        missing: columns that were not given.

    Args:
        texts: what ids stand for.
    """

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self.unknown: dict[str, int] = {}
        self.missing: list[str] = []

    def absent(self, where: str, request: ColumnRequest, rows: int) -> Column:
        """A column of nothing but missing values.

        Args:
            where: its place in the request, for the answer.
            request: how it would be read.
            rows: how many.
        """
        if rows:
            self.missing.append(where)
        return filled_column(request, rows)

    def column(
        self, where: str, values: Sequence[Any], request: ColumnRequest, table: str | None
    ) -> Column:
        """Decode a column.

        Args:
            where: its place in the request, for messages.
            values: one a row.
            request: how it is read.
            table: that its ids are of; None where it has none.

        Returns:
            the column.

        Raises:
            RequestError: a value of a wrong type, or out of range.
        """
        if request.kind == "ids":
            return self._lists(where, values, request, table)
        if request.kind in ("number", "weight", "label"):
            return Column(_numbers(where, values, request))
        if request.kind == "time":
            return Column(_times(where, values))
        return Column(self._ids(where, values, request, table))

    def _lists(
        self, where: str, values: Sequence[Any], request: ColumnRequest, table: str | None
    ) -> Column:
        flat: list[Any] = []
        offsets = np.zeros(len(values) + 1, np.int64)
        for row, given in enumerate(values):
            if given is not None and not isinstance(given, list):
                raise _wrong(f"{where}[{row}]", "be a list of ids, or null", given)
            # A missing list is one missing value, as in a data set, and not an empty list.
            flat += [None] if given is None else given
            offsets[row + 1] = len(flat)
        return Column(self._ids(where, flat, request, table), offsets)

    def _ids(
        self, where: str, values: Sequence[Any], request: ColumnRequest, table: str | None
    ) -> np.ndarray:
        fill = 0 if request.fill is None else int(request.fill)
        known = [self._number(where, row, v, table) for row, v in enumerate(values)]
        ids = np.asarray([fill if one is None else one for one in known], np.int64)
        lost = sum(one is None and v is not None for one, v in zip(known, values, strict=True))
        if request.rows is not None:
            outside = (ids < 0) | (ids >= request.rows)
            lost += int(outside.sum())
            ids = np.where(outside, np.int64(fill), ids)
        if lost:
            self.unknown[where] = self.unknown.get(where, 0) + int(lost)
        return ids

    def _number(self, where: str, row: int, value: Any, table: str | None) -> int | None:
        if type(value) is int:  # no bool
            if not _INT64.min <= value <= _INT64.max:
                raise _wrong(f"{where}[{row}]", "fit in 64 bits", value)
            return value
        if value is None:
            return None
        if isinstance(value, str) and table is not None:
            return self._texts.id_of(table, value)
        raise _wrong(f"{where}[{row}]", "be an id: a whole number, a text or null", value)


def filled_column(request: ColumnRequest, rows: int) -> Column:
    """A column whose rows all hold the fill.

    Args:
        request: names it.
        rows: how many.
    """
    if request.kind == "label":
        return Column(np.full(rows, np.nan, np.float32))
    if request.kind == "weight":
        return Column(np.ones(rows, np.float32))
    fill = 0.0 if request.fill is None else request.fill
    if request.kind == "number":
        return Column(np.full(rows, fill, np.float32))
    values = np.full(rows, int(fill), np.int64)
    return Column(values, np.arange(rows + 1) if request.kind == "ids" else None)


def _numbers(where: str, values: Sequence[Any], request: ColumnRequest) -> np.ndarray:
    fill = 0.0 if request.fill is None else request.fill
    for row, value in enumerate(values):
        if value is not None and type(value) not in (int, float):
            raise _wrong(f"{where}[{row}]", "be a number or null", value)
    try:
        found = np.asarray([fill if v is None else v for v in values], np.float64)
    except OverflowError:
        found = np.full(len(values), np.inf)
    # What float32 cannot hold would be infinite in the model.
    bad = ~(np.abs(found) <= np.finfo(np.float32).max)
    if bad.any():
        row = int(np.argmax(bad))
        raise _wrong(f"{where}[{row}]", "be finite in float32", values[row])
    return found.astype(np.float32)


def _times(where: str, values: Sequence[Any]) -> np.ndarray:
    for row, value in enumerate(values):
        if type(value) is not int or not -MOST_MS <= value <= MOST_MS:
            raise _wrong(f"{where}[{row}]", "be whole milliseconds since 1970", value)
    return np.asarray(values, np.int64)


def _wrong(where: str, must: str, got: object) -> RequestError:
    shown = repr(got)
    shown = shown if len(shown) <= _LONGEST_SHOWN else shown[:_LONGEST_SHOWN] + "..."
    return RequestError(f"request: {where} must {must}; got {shown}; correct it")


def same_lengths(where: str, columns: Mapping[str, Sequence[Any]]) -> int:
    """How many rows some columns have.

    Args:
        where: their place in the request.
        columns: by name.

    Returns:
        rows; 0 without columns.

    Raises:
        RequestError: they differ.
    """
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise _wrong(where, "have columns of one length", lengths)
    return next(iter(lengths.values()), 0)

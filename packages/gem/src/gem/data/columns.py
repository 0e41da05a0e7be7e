"""Columns of Parquet files as numpy arrays: chosen by name, nulls filled, values checked.

Every fault is a DataError that names the file, the row within it and the value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem.data.names import nearest
from gem_opkit.errors import DataError, refusal

# The difference of two such times, and one shifted by a time zone, still fit in int64.
MOST_MS = 2**62 - 1
# What Arrow raises where bytes are not what they should be; names in a footer may be no text.
DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError)


@dataclass(frozen=True, slots=True)
class ColumnRequest:
    """A column to be read.

    Attributes:
        name: its name in the files.
        kind: ids and lists of ids become int64; times int64 within MOST_MS, never null; numbers
            float32, where NaN counts as missing; labels float32 in [0, 1] with NaN where unknown;
            weights float32, at least 0.
        fill: what stands for a null; None where a null is an error.
        rows: ids must lie in 0 .. rows-1; None for any int64.
    """

    name: str
    kind: Literal["id", "ids", "time", "number", "label", "weight"]
    fill: float | None = None
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """All rows of a column.

    Attributes:
        values: one a row, or for lists the elements of all rows.
        offsets: for lists, where each row begins in `values`, int64, one more than rows.
        missing: how many values were null (or NaN, for numbers) and filled.
        filled: which ones, bool, one a value; None where nobody asked for it.
    """

    values: np.ndarray
    offsets: np.ndarray | None = None
    missing: int = 0
    filled: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.values) if self.offsets is None else len(self.offsets) - 1


def part_files(folder: Path) -> list[Path]:
    """The Parquet files of one part of a data set, in the order in which they are read.

    Args:
        folder: `examples`, `events/<stream>` or `entities/<entity>`.

    Returns:
        at least one path, sorted by name.

    Raises:
        DataError: there is none.
    """
    # Listed, not globbed: a glob finds nothing in a folder that may not be read.
    there = folder.iterdir() if folder.is_dir() else ()
    files = sorted(entry for entry in there if entry.suffix == ".parquet")
    if not files:
        raise DataError(
            refusal(
                "gem data",
                "the data set",
                must=f"have Parquet files in {folder}",
                got="none" if folder.is_dir() else "no such folder",
                fix="make it with `gem data prepare`",
            )
        )
    return files


def count_rows(files: Sequence[Path]) -> int:
    """Rows of all files, from their footers.

    Args:
        files: Parquet files.

    Raises:
        DataError: a file cannot be read.
    """
    return sum(open_parquet(file).metadata.num_rows for file in files)


def read_columns(
    files: Sequence[Path], requests: Sequence[ColumnRequest], *, mark_filled: bool = False
) -> dict[str, Column]:
    """Read columns of a part, row group by row group.

    Args:
        files: in order; a file without rows is normal.
        requests: what to read; nothing else is decoded.
        mark_filled: also keep which values were filled.

    Returns:
        name -> column over all files.

    Raises:
        DataError: a file cannot be read, lacks a column, holds a type that the kind does not
            take, a null that has no fill, or a value outside its range.

    Cost: the files are memory-mapped; memory is that of the columns asked for, plus one row group.
    """
    chunks: dict[str, list[_Chunk]] = {r.name: [] for r in requests}
    for file in files:
        parquet = open_parquet(file)
        check_names(file, parquet.schema_arrow.names, requests)
        first_row = 0
        for group in range(parquet.num_row_groups):
            table = _row_group(parquet, file, group, list(chunks))
            for request in requests:
                where = _Place(file, first_row, request)
                chunk = _decode(table.column(request.name), where)
                chunks[request.name].append(chunk if mark_filled else chunk.unmarked())
            first_row += table.num_rows
    return {r.name: _joined(chunks[r.name], r, mark_filled=mark_filled) for r in requests}


def decode_rows(
    table: pa.Table, file: Path, first_row: int, requests: Sequence[ColumnRequest]
) -> dict[str, Column]:
    """Decode consecutive rows of a file.

    Args:
        table: the rows, with every column asked for.
        file: where they come from.
        first_row: number of the first one in the file.
        requests: what to decode.

    Returns:
        name -> column.

    Raises:
        DataError: as `read_columns`.
    """
    found = {}
    for request in requests:
        chunk = _decode(table.column(request.name), _Place(file, first_row, request))
        found[request.name] = _joined([chunk.unmarked()], request, mark_filled=False)
    return found


def empty_column(request: ColumnRequest) -> Column:
    """A column of no rows.

    Args:
        request: says of which kind.
    """
    return _joined([], request, mark_filled=False)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A column in one row group."""

    values: np.ndarray
    lengths: np.ndarray | None
    missing: int
    filled: np.ndarray | None

    def unmarked(self) -> "_Chunk":
        return _Chunk(self.values, self.lengths, self.missing, None)


def open_parquet(file: Path) -> pq.ParquetFile:
    """Open a Parquet file and decode its footer.

    Args:
        file: the file.

    Raises:
        DataError: it is no Parquet file, or a damaged one.
    """
    try:
        parquet = pq.ParquetFile(file, memory_map=True, page_checksum_verification=True)
        _ = parquet.schema_arrow  # decoded on demand, with faults of its own
    except DAMAGE as fault:
        raise not_whole(file, fault) from fault
    return parquet


def _row_group(parquet: pq.ParquetFile, file: Path, group: int, names: list[str]) -> pa.Table:
    try:
        return parquet.read_row_group(group, columns=names)
    except DAMAGE as fault:  # a damaged page says nothing of its file
        raise not_whole(file, fault) from fault


def not_whole(file: Path, fault: Exception) -> DataError:
    """The error for bytes that are not what they should be.

    Args:
        file: the Parquet file.
        fault: what Arrow said.
    """
    return DataError(
        refusal(
            "gem data",
            str(file),
            must="be a whole Parquet file",
            got=str(fault).rstrip("."),
            fix="restore it, or make the data set again",
        )
    )


def check_names(file: Path, names: list[str], requests: Sequence[ColumnRequest]) -> None:
    """Check that a file has every column asked for, once.

    Args:
        file: for the message.
        names: of its columns.
        requests: what is asked for.

    Raises:
        DataError: a column is missing, or there are two of its name.
    """
    for request in requests:
        if names.count(request.name) > 1:
            raise DataError(
                refusal(
                    "gem data",
                    str(file),
                    must=f"have one column {request.name!r}",
                    got=names.count(request.name),
                    fix="remove or rename the others",
                )
            )
        if request.name not in names:
            raise DataError(
                refusal(
                    "gem data",
                    str(file),
                    must=f"have the column {request.name!r}",
                    got=f"columns without it{nearest(request.name, names)}",
                    fix="correct dataset.toml or make the data set again",
                )
            )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk of values comes from, for messages."""

    file: Path
    first_row: int
    request: ColumnRequest

    def error(self, must: str, got: object, row: int | None = None) -> DataError:
        place = f"column {self.request.name!r}"
        if row is not None:
            place += f" in row {self.first_row + row}"
        return DataError(
            f"{self.file}: {place} must {must}; got {got}; "
            f"mend the file or declare the column otherwise in dataset.toml"
        )


def _decode(column: pa.ChunkedArray, where: _Place) -> _Chunk:
    array = _one_array(column)
    if where.request.kind == "ids":
        return _decode_lists(array, where)
    values, filled = _decode_flat(array, where, owners=None)
    return _Chunk(values, None, int(filled.sum()), filled)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    """All of a column; categories, as pandas writes them, become what they stand for."""
    chunks = column.chunks
    if pa.types.is_dictionary(column.type):
        chunks = [chunk.dictionary_decode() for chunk in chunks]
        return pa.concat_arrays(chunks) if chunks else pa.array([], column.type.value_type)
    return pa.concat_arrays(chunks) if chunks else pa.array([], column.type)


def _decode_lists(array: pa.Array, where: _Place) -> _Chunk:
    if pa.types.is_null(array.type):
        array = array.cast(pa.list_(pa.int64()))
    lists = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    # Told here and not by the elements: there may be none, and Arrow computes with few other types.
    inner = array.type.value_type if lists else None
    if inner is None or not (pa.types.is_integer(inner) or pa.types.is_null(inner)):
        raise where.error("hold lists of integers", array.type)
    if pa.types.is_null(inner):
        array = array.cast(pa.list_(pa.int64()))
    # A missing list is one missing value, not an empty list: the model sees the fill.
    one_null = pa.scalar([None], type=array.type)
    array = pc.call_function("if_else", [array.is_null(), one_null, array])
    lengths = array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    values, filled = _decode_flat(array.flatten(), where, owners=owners)
    return _Chunk(values, lengths, int(filled.sum()), filled)


def _decode_flat(
    array: pa.Array, where: _Place, *, owners: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Values, and which of them were missing."""
    kind = where.request.kind
    integers = kind in ("id", "ids", "time")
    null = pa.types.is_null(array.type)
    if integers and not (pa.types.is_integer(array.type) or null):
        unit = ", milliseconds since 1970" if kind == "time" else ""
        raise where.error(f"hold integers{unit}", array.type)
    numeric = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    if not integers and not (numeric or null or pa.types.is_boolean(array.type)):
        raise where.error("hold numbers", array.type)
    is_missing = array.is_null(nan_is_null=not integers).to_numpy(zero_copy_only=False)
    if integers:
        values = _as_int64(array, where, owners)
    else:
        values = array.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    if is_missing.any():
        if where.request.fill is None and kind != "label":
            raise where.error("not be null", "null", _row(is_missing, owners))
        fill = np.nan if kind == "label" else where.request.fill
        values = np.where(is_missing, np.asarray(fill, values.dtype), values)
    _check_values(values, where, owners)
    return values, is_missing


def _as_int64(array: pa.Array, where: _Place, owners: np.ndarray | None) -> np.ndarray:
    filled = pa.nulls(len(array), pa.int64()) if pa.types.is_null(array.type) else array
    if filled.null_count:
        filled = filled.fill_null(0)
    if pa.types.is_uint64(filled.type):
        values = filled.to_numpy(zero_copy_only=False)
        too_large = values > np.uint64(np.iinfo(np.int64).max)
        if too_large.any():
            row = int(np.argmax(too_large))
            raise where.error("fit in int64", int(values[row]), _row(too_large, owners))
        return values.astype(np.int64)
    return filled.cast(pa.int64()).to_numpy(zero_copy_only=False)


def _check_values(values: np.ndarray, where: _Place, owners: np.ndarray | None) -> None:
    request = where.request
    if request.kind in ("id", "ids") and request.rows is not None:
        bad, must = (values < 0) | (values >= request.rows), f"lie in 0 .. {request.rows - 1}"
    elif request.kind == "time":
        bad = (values < -MOST_MS) | (values > MOST_MS)
        must = f"be milliseconds since 1970, between {-MOST_MS} and {MOST_MS}"
    elif request.kind == "number":
        bad, must = ~np.isfinite(values), "be finite"
    elif request.kind == "label":
        bad, must = (values < 0) | (values > 1), "lie in [0, 1]"
    elif request.kind == "weight":
        bad, must = ~(np.isfinite(values) & (values >= 0)), "be finite and at least 0"
    else:
        return
    if bad.any():
        raise where.error(must, values[int(np.argmax(bad))], _row(bad, owners))


def _row(bad: np.ndarray, owners: np.ndarray | None) -> int:
    element = int(np.argmax(bad))
    return element if owners is None else int(owners[element])


def _joined(chunks: list[_Chunk], request: ColumnRequest, *, mark_filled: bool) -> Column:
    dtype = np.int64 if request.kind in ("id", "ids", "time") else np.float32
    values = np.concatenate([np.empty(0, dtype), *(chunk.values for chunk in chunks)])
    missing = sum(chunk.missing for chunk in chunks)
    marks = [chunk.filled for chunk in chunks if chunk.filled is not None]
    filled = np.concatenate([np.empty(0, bool), *marks]) if mark_filled else None
    if request.kind != "ids":
        return Column(values, None, missing, filled)
    zero = np.zeros(1, np.int64)
    lengths = np.concatenate([zero, *(c.lengths for c in chunks if c.lengths is not None)])
    return Column(values, np.cumsum(lengths), missing, filled)

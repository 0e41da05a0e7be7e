"""A data set at rest: open its folder, read its parts by name, write a new one.

The folder holds `dataset.toml` (a `DatasetSpec`) and Parquet files under `examples/`,
`events/<stream>/` and `entities/<entity>/`. It is complete or not there: a writer gives
its files their place at the end (`gem.data.whole_folder`).

Left out: joins (`gem.data.join`) and batches (`gem.data.reader`).
"""

import shutil
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from gem.contract_faults import explain, explain_size
from gem.data.columns import (
    DAMAGE,
    Column,
    ColumnRequest,
    count_rows,
    not_whole,
    part_files,
    read_columns,
)
from gem.data.features import DatasetSpec
from gem.data.fields import (
    EventIdField,
    EventNumberField,
    IdField,
    NumberField,
    StreamSpec,
)
from gem.data.names import nearest
from gem.data.toml_text import toml_text
from gem.data.whole_folder import begin_folder, complete_folder, hidden_folder, is_free
from gem_opkit.errors import ConfigError, DataError, refusal

SPEC_FILE = "dataset.toml"
SOURCES_FILE = "sources.json"


class Dataset:
    """An opened data set. Reads columns on demand; holds none itself.

    Attributes:
        folder: where it lies.
        spec: its `dataset.toml`.
    """

    def __init__(self, folder: Path, spec: DatasetSpec) -> None:
        self.folder = folder
        self.spec = spec

    @classmethod
    def open(cls, folder: Path | str) -> "Dataset":
        """Open the data set in a folder.

        Args:
            folder: holds `dataset.toml`.

        Returns:
            the data set; no column has been read.

        Raises:
            DataError: there is no data set there, its spec is not valid, or its number of
                examples is not the declared one.
        """
        folder = Path(folder)
        path = folder / SPEC_FILE
        if not path.is_file():
            raise DataError(
                refusal(
                    "gem data",
                    "folder",
                    must=f"hold a {SPEC_FILE}",
                    got=folder,
                    fix="make the data set with `gem data prepare`",
                )
            )
        spec = read_spec(path)
        dataset = cls(folder, spec)
        rows = count_rows(part_files(dataset.examples_folder))
        if rows != spec.examples.rows:
            raise DataError(
                refusal(
                    "gem data",
                    str(dataset.examples_folder),
                    must=f"have the {spec.examples.rows} rows of {SPEC_FILE}",
                    got=rows,
                    fix="make the data set again",
                )
            )
        return dataset

    @property
    def examples_folder(self) -> Path:
        """Folder of the examples."""
        return self.folder / "examples"

    def examples(self, names: Iterable[str]) -> dict[str, Column]:
        """Read columns of the examples.

        Args:
            names: declared columns: user, time, ids, numbers, labels, domain, weight.

        Returns:
            name -> column. The user column has its raw ids; labels have NaN where unknown.

        Raises:
            ConfigError: a name that `dataset.toml` does not declare.
            DataError: as `read_columns`, or times that fall.
        """
        declared = self.example_requests()
        wanted = _chosen(names, declared, "examples")
        columns = read_columns(part_files(self.examples_folder), wanted)
        time = self.spec.examples.time
        if time in columns:
            self.check_time_order(columns[time].values)
        return columns

    def events(self, stream: str, names: Iterable[str] | None = None) -> dict[str, Column]:
        """Read columns of a stream's events, in file order.

        Args:
            stream: its name.
            names: declared columns; None for all, user and time included.

        Returns:
            name -> column.

        Raises:
            ConfigError, DataError: as `examples`.
        """
        spec = self.spec.stream(stream)
        declared = self.event_requests(spec)
        wanted = _chosen(declared if names is None else names, declared, f"stream {stream!r}")
        return read_columns(self.event_files(stream), wanted)

    def entity(self, name: str, names: Iterable[str] | None = None) -> dict[str, Column]:
        """Read columns of an entity.

        Args:
            name: of the entity.
            names: declared columns; None for all. The key is always read.

        Returns:
            name -> column, the key included.

        Raises:
            ConfigError, DataError: as `examples`, or a key that occurs twice.
        """
        spec = next((entity for entity in self.spec.entities if entity.name == name), None)
        if spec is None:
            known = [entity.name for entity in self.spec.entities]
            raise ConfigError(f"gem data: no entity {name!r}{nearest(name, known)}")
        key_table = next(f.table for f in self.spec.examples.ids if f.name == spec.key)
        declared = {spec.key: ColumnRequest(spec.key, "id", None, self._id_rows(key_table))}
        if spec.valid_from is not None:
            declared[spec.valid_from] = ColumnRequest(spec.valid_from, "time")
        declared |= self.field_requests((*spec.ids, *spec.numbers))
        wanted = [spec.key, *(declared if names is None else names)]
        requests = _chosen(dict.fromkeys(wanted), declared, f"entity {name!r}")
        columns = read_columns(part_files(self.folder / "entities" / name), requests)
        keys, counts = np.unique(columns[spec.key].values, return_counts=True)
        if (counts > 1).any():
            raise DataError(
                f"{self.folder / 'entities' / name}: {spec.key} must be unique; "
                f"got {keys[np.argmax(counts > 1)]} twice; keep one row of each"
            )
        return columns

    def vocabulary(self, table: str) -> tuple[str, ...] | None:
        """What the ids 1, 2, ... of a table stand for.

        Args:
            table: its name.

        Returns:
            texts; None where the data set does not say.

        Raises:
            DataError: what it says is damaged, or of another number of ids.
        """
        folder = self.folder / "vocabularies" / table
        if not folder.is_dir():
            return None
        found: list[str] = []
        for file in part_files(folder):
            try:
                found += pq.read_table(file, columns=["value"]).column(0).to_pylist()
            except DAMAGE as fault:
                raise not_whole(file, fault) from fault
        rows = self.spec.table(table).num_embeddings
        if len(found) != rows - 1:
            raise DataError(
                refusal(
                    "gem data",
                    str(folder),
                    must=f"say what the {rows - 1} ids of table {table!r} stand for",
                    got=f"{len(found)} texts",
                    fix="make the data set again",
                )
            )
        return tuple(found)

    def example_request(self, name: str) -> ColumnRequest:
        """How a declared column of the examples is read.

        Args:
            name: of the column.

        Raises:
            ConfigError: a name that `dataset.toml` does not declare.
        """
        return _chosen([name], self.example_requests(), "examples")[0]

    def event_files(self, stream: str) -> list[Path]:
        """The files of a stream's events, in the order in which they are read.

        Args:
            stream: its name.

        Raises:
            DataError: there is none.
        """
        return part_files(self.folder / "events" / stream)

    def example_requests(self) -> dict[str, ColumnRequest]:
        """How every declared column of the examples is read, by name."""
        spec = self.spec.examples
        declared = self.field_requests((*spec.ids, *spec.numbers))
        declared[spec.user] = _never_null(declared, spec.user)
        declared[spec.time] = ColumnRequest(spec.time, "time")
        for label in spec.labels:
            declared[label.name] = ColumnRequest(label.name, "label")
        if spec.domain is not None:
            declared[spec.domain] = ColumnRequest(spec.domain, "id", None, len(self.spec.domains))
        if spec.weight is not None:
            declared[spec.weight] = ColumnRequest(spec.weight, "weight")
        return declared

    def event_requests(self, spec: StreamSpec) -> dict[str, ColumnRequest]:
        """How every declared column of a stream is read.

        Args:
            spec: of a stream of this data set.

        Returns:
            name -> request, user and time included.
        """
        declared = {
            spec.user: ColumnRequest(spec.user, "id"),
            spec.time: ColumnRequest(spec.time, "time"),
        }
        if spec.untimed is not None:
            declared[spec.untimed] = ColumnRequest(spec.untimed, "id", None, rows=2)
        fields = self.field_requests((*spec.ids, *spec.numbers))
        return declared | fields | {spec.user: _never_null(fields, spec.user)}

    def field_requests(
        self, fields: Iterable[IdField | EventIdField | NumberField | EventNumberField]
    ) -> dict[str, ColumnRequest]:
        """How some fields are read.

        Args:
            fields: of examples, events or entities.

        Returns:
            name -> request.
        """
        requests = {}
        for field in fields:
            if isinstance(field, NumberField | EventNumberField):
                requests[field.name] = ColumnRequest(field.name, "number", field.fill)
                continue
            kind = "ids" if isinstance(field, IdField) and field.multi else "id"
            rows = self._id_rows(field.table)
            requests[field.name] = ColumnRequest(field.name, kind, field.fill, rows)
        return requests

    def _id_rows(self, table: str) -> int | None:
        declared = self.spec.table(table)
        return declared.num_embeddings if declared.id_space == "row" else None

    def check_time_order(self, time_ms: np.ndarray, *, first: int = 0) -> None:
        """Check that examples are in time order.

        Args:
            time_ms: of consecutive examples, int64.
            first: row of the first of them.

        Raises:
            DataError: a time is below the one before it.
        """
        falls = time_ms[1:] < time_ms[:-1]
        if falls.any():
            row = int(np.argmax(falls)) + 1
            raise DataError(
                f"{self.examples_folder}: {self.spec.examples.time} must not fall, examples are "
                f"in time order; got {time_ms[row]} after {time_ms[row - 1]} in row {first + row} "
                f"over all files; sort the examples by time"
            )


def _never_null(fields: Mapping[str, ColumnRequest], user: str) -> ColumnRequest:
    """The request for a user column: a fill would give one person's history to another."""
    return replace(fields.get(user, ColumnRequest(user, "id")), fill=None)


def _chosen(
    names: Iterable[str], declared: Mapping[str, ColumnRequest], owner: str
) -> list[ColumnRequest]:
    requests = []
    for name in names:
        if name not in declared:
            raise ConfigError(
                refusal(
                    "gem data",
                    f"column of {owner}",
                    must=f"be declared in {SPEC_FILE}",
                    got=repr(name) + nearest(name, declared),
                    fix="correct the name",
                )
            )
        requests.append(declared[name])
    return requests


def read_spec(path: Path) -> DatasetSpec:
    """Read the contract of a data set.

    Args:
        path: its `dataset.toml`.

    Raises:
        DataError: the file is no TOML, or not such a contract.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    # Broken TOML is a ValueError, as is a number of thousands of digits; arrays may nest too deep.
    except (ValueError, RecursionError) as fault:
        raise DataError(
            f"{path}: the file must be TOML in UTF-8; got {fault}; mend it, or make the data set "
            f"again"
        ) from fault
    if large := explain_size(raw):
        raise DataError(f"{path}: {large}")
    try:
        return DatasetSpec.model_validate(raw)
    except ValidationError as fault:
        raise DataError(f"{path}: {explain(fault, raw, DatasetSpec)}") from fault


class DatasetWriter:
    """Writes a data set in pieces; the folder appears, whole, when the `with` block ends well.

    Pages carry checksums, so that a bit that flips on the disk later is found when it is read.

    Args:
        folder: where the data set shall lie; empty or not there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._work = hidden_folder(folder)
        self._writers: dict[Path, pq.ParquetWriter] = {}
        self._spec: DatasetSpec | None = None
        self._sources: str | None = None

    def __enter__(self) -> "DatasetWriter":
        if not is_free(self._folder):
            raise DataError(
                refusal(
                    "gem data",
                    "out",
                    must="be empty or not there yet",
                    got=self._folder,
                    fix="remove it or choose another folder",
                )
            )
        self._work = begin_folder(self._folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for writer in self._writers.values():
            writer.close()
        if kind is not None or self._spec is None:
            shutil.rmtree(self._work, ignore_errors=True)
            if kind is None:
                raise DataError("DatasetWriter: finish must be called before the block ends")
            return
        fields = self._spec.model_dump(mode="json", exclude_defaults=True)
        # The version stands in the file, though it is the default of today.
        text = toml_text({"format": self._spec.format} | fields)
        (self._work / SPEC_FILE).write_text(text, encoding="utf-8")
        if self._sources is not None:
            (self._work / SOURCES_FILE).write_text(self._sources, encoding="utf-8")
        complete_folder(self._work, self._folder, last=SPEC_FILE)

    def examples(self, columns: Mapping[str, Any]) -> None:
        """Append rows to the examples: name -> numpy or Arrow array, equal in length."""
        self._append(Path("examples"), columns)

    def events(self, stream: str, columns: Mapping[str, Any]) -> None:
        """Append rows to a stream."""
        self._append(Path("events") / stream, columns)

    def entity(self, name: str, columns: Mapping[str, Any]) -> None:
        """Append rows to an entity."""
        self._append(Path("entities") / name, columns)

    def vocabulary(self, table: str, columns: Mapping[str, Any]) -> None:
        """Append to what the ids of a table stand for; no model reads it."""
        self._append(Path("vocabularies") / table, columns)

    def sources(self, text: str) -> None:
        """Say of which raw files the data set is made (`gem.data.made_from`)."""
        self._sources = text

    def finish(self, spec: DatasetSpec) -> None:
        """Say what was written; the files follow it when the block ends."""
        self._spec = spec

    def _append(self, part: Path, columns: Mapping[str, Any]) -> None:
        table = pa.table(dict(columns))
        if part not in self._writers:
            (self._work / part).mkdir(parents=True)
            self._writers[part] = pq.ParquetWriter(
                self._work / part / "part-00000.parquet", table.schema, write_page_checksum=True
            )
        self._writers[part].write_table(table)

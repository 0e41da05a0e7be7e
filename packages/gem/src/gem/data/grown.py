"""Whether a data set is another one that has grown: the same past, and more behind it.

A log grows by the day. What was made of its first days stays true of the longer one only if nothing
in these days has changed, so all of it is compared, row by row. Ids keep their meaning if the
longer data set is made with `gem data prepare --grown-from`.
"""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from gem.data.columns import Column
from gem.data.dataset import Dataset
from gem.data.fields import EntitySpec, StreamSpec
from gem_opkit.errors import DataError, refusal

# What growing may change: how many there are, and what people read about it.
_FREE = {"description", "terms", "citation", "options"}


def check_grown(before: Dataset, after: Dataset) -> None:
    """Compare a data set with one that is said to continue it.

    Of the examples, the first so many must be the same, but that a label may have become known. Of
    each stream, the events up to the last example or event that `before` holds must be the same;
    a field that is known a while after its event may differ where it was not known by then. Rows of
    entities may be added.

    Args:
        before: the shorter one.
        after: the longer one.

    Raises:
        DataError: the first difference that is found.

    Cost: reads both once; memory is that of a part of both.
    """
    _check_contract(before, after)
    end = _end(before)
    _check_examples(before, after)
    for stream in before.spec.streams:
        _check_stream(before, after, stream, end)
    for entity in before.spec.entities:
        _check_entity(before, after, entity)


def past_digest(dataset: Dataset, until_ms: int) -> str:
    """Hash what a data set says of its users before a time, whatever comes later.

    Args:
        dataset: may have grown since.
        until_ms: events before it count, with what was known of them by then, and the rows of
            entities that such events name.

    Returns:
        SHA-256, as hex digits.

    Cost: reads all streams and entities; memory is that of the largest.
    """
    digest = hashlib.sha256()
    spec = dataset.spec
    tables = {field.name: field.table for field in spec.examples.ids}
    named: dict[str, list[np.ndarray]] = {}
    for stream in spec.streams:
        columns = dataset.events(stream.name)
        past = columns[stream.time].values < until_ms
        columns = _in_order({name: _rows(c, past) for name, c in columns.items()}, stream)
        delays = {f.name: f.visible_after_ms for f in (*stream.ids, *stream.numbers)}
        told = {}
        for name, column in columns.items():
            known = columns[stream.time].values + delays.get(name, 0) < until_ms
            told[name] = np.where(known, column.values, column.values.dtype.type(0))
            _add(digest, f"{stream.name}.{name}", told[name])
        for field in stream.ids:
            named.setdefault(field.table, []).append(told[field.name])
        if spec.examples.user in tables:
            users = columns[stream.user].values
            named.setdefault(tables[spec.examples.user], []).append(users)
    for entity in spec.entities:
        columns = dataset.entity(entity.name)
        keys = columns[entity.key].values
        there = np.isin(keys, np.concatenate([keys[:0], *named.get(tables[entity.key], [])]))
        if entity.valid_from is not None:
            there &= columns[entity.valid_from].values < until_ms
        rows = np.flatnonzero(there)
        rows = rows[np.argsort(keys[rows])]
        for name, column in columns.items():
            taken = _taken(column, rows)
            _add(digest, f"{entity.name}.{name}", taken.values)
            if taken.offsets is not None:
                _add(digest, f"{entity.name}.{name} lists", taken.offsets)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", name: str, values: np.ndarray) -> None:
    digest.update(f"{name} {values.dtype.str} {len(values)}\n".encode())
    digest.update(np.ascontiguousarray(values).tobytes())


def _refuse(after: Dataset, must: str, got: object) -> DataError:
    return DataError(
        refusal(
            "gem data",
            str(after.folder),
            must=must,
            got=got,
            fix="make it of the same log with more behind it, by `gem data prepare --grown-from`",
        )
    )


def _check_contract(before: Dataset, after: Dataset) -> None:
    kept = {"rows", "num_embeddings", "values"}
    own, other = (each.spec.model_dump(mode="json") for each in (before, after))
    for name in own:
        if name in _FREE | {"splits", "tables", "examples"}:
            continue
        if own[name] != other[name]:
            raise _refuse(after, f"have the {name} of {before.folder}", "another declaration")
    if _without(own["examples"], kept) != _without(other["examples"], kept):
        raise _refuse(after, f"have the examples' columns of {before.folder}", "other columns")
    tables = {table["name"]: table for table in other["tables"]}
    if tables.keys() != {table["name"] for table in own["tables"]}:
        raise _refuse(after, f"have the tables of {before.folder}", ", ".join(tables))
    for table in own["tables"]:
        longer = tables[table["name"]]
        rows, named = table["num_embeddings"], table.get("values") or ()
        if _without(table, kept) != _without(longer, kept) or longer["num_embeddings"] < rows:
            raise _refuse(
                after,
                f"have at least the {rows} rows of table {table['name']!r}",
                f"{longer['num_embeddings']} ({longer['id_space']})",
            )
        told = longer.get("values") or ()
        if named and told and list(told[: len(named)]) != list(named):
            raise _refuse(
                after,
                f"give the ids of table {table['name']!r} their meaning in {before.folder}",
                f"{told[: len(named)]} for {named}"[:200],
            )


def _without(fields: Mapping[str, object], names: Iterable[str]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name not in set(names)}


def _end(dataset: Dataset) -> int:
    """The last time that a data set holds, of an example or of an event."""
    spec = dataset.spec
    times = [dataset.examples([spec.examples.time])[spec.examples.time].values]
    times += [dataset.events(s.name, [s.time])[s.time].values for s in spec.streams]
    return max((int(each.max()) for each in times if len(each)), default=-(2**62))


def _check_examples(before: Dataset, after: Dataset) -> None:
    labels = {label.name for label in before.spec.examples.labels}
    rows = before.spec.examples.rows
    if after.spec.examples.rows < rows:
        raise _refuse(
            after, f"have at least the {rows} examples of {before.folder}", after.spec.examples.rows
        )
    for name in before.example_requests():
        own, other = before.examples([name])[name], _head(after.examples([name])[name], rows)
        free = np.isnan(own.values) if name in labels else None
        _compare(after, f"examples, {name}", own, other, free)


def _check_stream(before: Dataset, after: Dataset, stream: StreamSpec, end: int) -> None:
    own, other = before.events(stream.name), after.events(stream.name)
    # A user's events are read in time order, those of one time in file order: files may differ.
    own = _in_order(own, stream)
    past = other[stream.time].values <= end
    if stream.untimed is not None:
        # An event without a time of its own has that of the user's last such event.
        past |= other[stream.untimed].values == 1
    other = _in_order({name: _rows(column, past) for name, column in other.items()}, stream)
    where = f"stream {stream.name!r} up to {end} ms"
    if own[stream.time].rows != other[stream.time].rows:
        raise _refuse(
            after,
            f"hold the {own[stream.time].rows} events of {before.folder} in {where}",
            f"{other[stream.time].rows}",
        )
    delays = {f.name: f.visible_after_ms for f in (*stream.ids, *stream.numbers)}
    for name, column in own.items():
        free = own[stream.time].values + delays.get(name, 0) > end if delays.get(name) else None
        _compare(after, f"{where}, {name}", column, other[name], free)


def _in_order(columns: Mapping[str, Column], stream: StreamSpec) -> dict[str, Column]:
    order = np.lexsort((columns[stream.time].values, columns[stream.user].values))
    return {name: Column(column.values[order]) for name, column in columns.items()}


def _check_entity(before: Dataset, after: Dataset, entity: EntitySpec) -> None:
    own, other = before.entity(entity.name), after.entity(entity.name)
    keys = other[entity.key].values
    order = np.argsort(keys)
    place = np.searchsorted(keys[order], own[entity.key].values)
    place = order[np.minimum(place, len(keys) - 1)] if len(keys) else np.zeros(0, np.int64)
    where = f"entity {entity.name!r}"
    if len(own[entity.key].values) and not (
        len(place) and np.array_equal(keys[place], own[entity.key].values)
    ):
        raise _refuse(after, f"hold all rows of {before.folder} in {where}", "fewer keys")
    for name, column in own.items():
        _compare(after, f"{where}, {name}", column, _taken(other[name], place), None)


def _head(column: Column, rows: int) -> Column:
    if column.offsets is None:
        return Column(column.values[:rows])
    offsets = column.offsets[: rows + 1]
    return Column(column.values[: offsets[-1]], offsets)


def _rows(column: Column, kept: np.ndarray) -> Column:
    return Column(column.values[kept])


def _taken(column: Column, rows: np.ndarray) -> Column:
    if column.offsets is None:
        return Column(column.values[rows])
    lengths = np.diff(column.offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return Column(column.values[np.repeat(column.offsets[rows], lengths) + within], offsets)


def _compare(
    after: Dataset, where: str, own: Column, other: Column, free: np.ndarray | None
) -> None:
    """Refuse the first value that is another one, but where it is free to be."""
    if own.offsets is not None and other.offsets is not None:
        moved = own.offsets != other.offsets
        if moved.any():
            row = int(np.argmax(moved)) - 1
            raise _refuse(after, f"hold what it grew from ({where})", f"another list in row {row}")
    differs = own.values != other.values
    if own.values.dtype.kind == "f":
        differs &= ~(np.isnan(own.values) & np.isnan(other.values))
    if free is not None:
        differs &= ~free
    if differs.any():
        row = int(np.argmax(differs))
        raise _refuse(
            after,
            f"hold what it grew from ({where})",
            f"{other.values[row]} for {own.values[row]} in row {row}",
        )

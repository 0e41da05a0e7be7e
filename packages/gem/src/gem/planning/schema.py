"""Inputs of a recipe's model as the data set declares them, before any row is read.

The reader (`gem.data.reader`) derives the same schema from an opened data set; a test holds the
two to each other. Here it comes from the contract alone, so that a plan needs neither torch nor
Arrow, and for generated data not even the data set.
"""

import tomllib
from pathlib import Path

from pydantic import ValidationError

from gem.config import RunConfig
from gem.contract_faults import explain
from gem.data.features import (
    Bucket,
    DatasetSpec,
    DataSpec,
    DayOfWeek,
    ElapsedDays,
    HourOfDay,
    StreamRead,
)
from gem.data.fields import IdField
from gem.data.names import nearest
from gem.data.schema import BatchSchema, IdInput, StreamInput
from gem.data.synthetic_dataset import synthetic_dataset
from gem.data.synthetic_spec import SyntheticSpec
from gem_opkit.errors import ConfigError, DataError, UnsupportedError, refusal

_SPEC_FILE = "dataset.toml"
_OP = "gem plan"  # unless the caller names another command


def declared_dataset(
    data: DataSpec, root: Path = Path("runs/data"), *, op: str = _OP
) -> DatasetSpec:
    """Find the contract of a recipe's data set.

    Args:
        data: the recipe's section.
        root: folder of all data sets, for one that the recipe names no folder for.
        op: command that asks, for its refusals.

    Returns:
        that of the generator for generated data, else the one in the data set's folder.

    Raises:
        ConfigError: the data set is not there yet.
        DataError: its contract cannot be read.
    """
    if data.folder is None and data.dataset == "synthetic":
        return synthetic_dataset(data.synthetic or SyntheticSpec())
    path = Path(data.folder or root / data.dataset) / _SPEC_FILE
    if not path.is_file():
        raise ConfigError(
            refusal(
                op,
                "data.dataset",
                must="be synthetic, or a data set that is there: tables and lengths are not known "
                "otherwise",
                got=f"{data.dataset!r} and no {path}",
                fix=f"run `gem data prepare {data.dataset} --out {path.parent}`, or name its "
                "folder with --set data.folder=DIR",
            )
        )
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    # Broken TOML is a ValueError, as is a number of thousands of digits; arrays may nest too deep.
    except (ValueError, RecursionError) as fault:
        raise DataError(f"{path}: the file must be TOML in UTF-8; got {fault}; mend it") from fault
    try:
        return DatasetSpec.model_validate(raw)
    except ValidationError as fault:
        raise DataError(f"{path}: {explain(fault, raw, DatasetSpec)}") from fault


def declared_schema(
    config: RunConfig, dataset: DatasetSpec | None = None, *, op: str = _OP
) -> BatchSchema:
    """Derive what a batch of a recipe holds.

    Args:
        config: the recipe.
        dataset: contract of its data set; None to find it.
        op: command that asks, for its refusals.

    Returns:
        the schema that the reader would give.

    Raises:
        ConfigError: a name that the data set does not have, or a data set that is not there.
        DataError: as `declared_dataset`.
    """
    data = config.data
    _refuse_given(op, data)
    spec = declared_dataset(data, op=op) if dataset is None else dataset
    derived = {each.name: each for each in data.derived}
    owners = (spec.examples, *spec.entities)
    ids = {field.name: _described(spec, data, field) for owner in owners for field in owner.ids}
    numbers = [field.name for owner in owners for field in owner.numbers]
    for name, each in derived.items():
        if isinstance(each, ElapsedDays):
            numbers.append(name)
        else:
            ids[name] = IdInput(name=name, table=name, num_embeddings=_values(each))
    left_out: set[str] = set()
    if data.inputs is not None:
        at_rest = spec.input_names()
        for name in data.inputs:
            if name not in at_rest:
                raise _unknown(op, "inputs", name, at_rest)
        left_out = set(at_rest) - set(data.inputs)
    kept = {name: source for name, source in ids.items() if name not in left_out}
    kept_numbers = tuple(name for name in numbers if name not in left_out)
    rows, events = _statistics(data)
    item = spec.examples.item
    reads = data.streams
    if reads is None:
        reads = {stream.name: StreamRead() for stream in spec.streams}
    return BatchSchema(
        streams=tuple(
            _stream(op, spec, data, name, read, ids, events.get(name, ()))
            for name, read in reads.items()
        ),
        ids=tuple(kept.values()),
        numbers=(*kept_numbers, *rows),
        item=item if item in kept else None,
        of_user=_owned(spec, data, spec.examples.user, (*kept, *kept_numbers)),
        of_item=_owned(spec, data, item, (*kept, *kept_numbers)),
        labels=tuple(label.name for label in spec.examples.labels),
        domains=spec.domains,
    )


def _refuse_given(op: str, data: DataSpec) -> None:
    """Refuse what only its own files tell: how wide embeddings are, and which rows have them."""
    for key in ("user_embeddings", "teacher"):
        if getattr(data, key):
            raise UnsupportedError(
                refusal(
                    op,
                    f"data.{key}",
                    must="be left out: no row is read here",
                    got="a section",
                    fix="ask about the same recipe without it",
                )
            )


def _owned(
    spec: DatasetSpec, data: DataSpec, key: str | None, read: tuple[str, ...]
) -> tuple[str, ...]:
    """Inputs that are read and belong to a user or an item, as the reader tells them."""
    if key is None:
        return ()
    entities = [entity for entity in spec.entities if entity.key == key]
    own = {key} | {field.name for e in entities for field in (*e.ids, *e.numbers)}
    own |= {each.name for each in data.derived if isinstance(each, Bucket) and each.field in own}
    return tuple(name for name in read if name in own)


def _described(spec: DatasetSpec, data: DataSpec, field: IdField) -> IdInput:
    return _id_input(spec, data, field.name, field.table, multi=field.multi)


def _id_input(
    spec: DatasetSpec, data: DataSpec, name: str, table: str, *, multi: bool = False
) -> IdInput:
    declared = spec.table(table)
    return IdInput(
        name=name,
        table=table,
        num_embeddings=data.hash_rows.get(table, declared.num_embeddings),
        id_space=declared.id_space,
        multi=multi,
    )


def _values(derived: HourOfDay | DayOfWeek | Bucket) -> int:
    if isinstance(derived, Bucket):
        return len(derived.boundaries) + 1
    return 24 if isinstance(derived, HourOfDay) else 7


def _stream(
    op: str,
    spec: DatasetSpec,
    data: DataSpec,
    name: str,
    read: StreamRead,
    ids: dict[str, IdInput],
    statistics: tuple[str, ...],
) -> StreamInput:
    """A stream with its own fields, and fields of entities whose key it holds."""
    own = spec.stream(name)
    own_ids = {f.name: _id_input(spec, data, f.name, f.table) for f in own.ids}
    own_numbers = {field.name for field in own.numbers}
    joined = [entity for entity in spec.entities if entity.key in own_ids]
    entity_numbers = {field.name for entity in joined for field in entity.numbers}
    held = {field.name for entity in joined for field in entity.ids}
    held |= {e.name for e in data.derived if isinstance(e, Bucket) and e.field in entity_numbers}
    given = (*own_ids, *(field.name for field in own.numbers))
    found_ids: list[IdInput] = []
    found_numbers: list[str] = []
    for field in given if read.fields is None else read.fields:
        if field in own_ids:
            found_ids.append(own_ids[field])
        elif field in held:
            found_ids.append(ids[field])
        elif field in own_numbers or field in entity_numbers:
            found_numbers.append(field)
        else:
            known = (*given, *sorted(held | entity_numbers))
            raise _unknown(op, f"streams.{name}.fields", field, known)
    return StreamInput(
        name=name,
        ids=tuple(found_ids),
        numbers=(*found_numbers, *statistics),
        max_events=read.max_events,
    )


def _statistics(data: DataSpec) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Names of the statistics of the examples, and of those of each stream's events."""
    rows: list[str] = []
    events: dict[str, list[str]] = {}
    for statistic in data.statistics:
        if getattr(statistic, "output", None) == "none":
            continue
        if statistic.kind == "event":
            events.setdefault(statistic.feedback.stream, []).append(statistic.name)
        else:
            rows.append(statistic.name)
    return tuple(rows), {stream: tuple(names) for stream, names in events.items()}


def _unknown(op: str, key: str, name: str, known: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        refusal(
            op,
            f"data.{key}",
            must="name what the data set has",
            got=repr(name) + nearest(name, known),
            fix="correct the name",
        )
    )

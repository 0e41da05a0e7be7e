"""What a data set holds (`DatasetSpec`) and what a recipe reads of it (`DataSpec`). No torch.

`DatasetSpec` is the contract of `dataset.toml`, beside the Parquet files of a data set at rest.
`DataSpec` is the `[data]` section of a recipe. Both speak of names; `gem.data.reader` resolves
them against each other once, and derives the `BatchSchema` from which the model is built.
"""

from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from gem.data.fields import (
    EntitySpec,
    EventIdField,
    ExamplesSpec,
    IdField,
    IdTable,
    Name,
    SplitSpec,
    StreamSpec,
    UnionSpec,
)
from gem.data.given_spec import TeacherRead, UserEmbeddingRead
from gem.data.names import nearest
from gem.data.statistics.spec import StatisticSpec
from gem.data.synthetic_spec import SyntheticSpec
from gem_opkit.contract import Contract
from gem_opkit.errors import ConfigError, refusal

_Named = TypeVar("_Named", "IdTable", "StreamSpec", "SplitSpec")


class DatasetSpec(Contract):
    """A data set at rest: the contract of `dataset.toml`."""

    name: Name
    format: Literal[1] = Field(default=1, description="version of the layout of the folder")
    description: str = ""
    terms: str = Field(default="", description="what the owner of the data allows")
    citation: str = ""
    tables: tuple[IdTable, ...]
    entities: tuple[EntitySpec, ...] = ()
    streams: tuple[StreamSpec, ...] = ()
    examples: ExamplesSpec
    domains: tuple[str, ...] = Field(default=("all",), min_length=1)
    splits: tuple[SplitSpec, ...]
    options: dict[str, int | float | str | bool] = Field(
        default_factory=dict, description="options that the data was made with"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "DatasetSpec":
        _unique("table", (table.name for table in self.tables))
        _unique("entity", (entity.name for entity in self.entities))
        _unique("stream", (stream.name for stream in self.streams))
        _unique("split", (split.name for split in self.splits))
        _unique("input", self.input_names())
        _unique("label", (label.name for label in self.examples.labels))
        _unique("domain", self.domains)
        _no_label_is_read(self.examples)
        tables = {table.name: table for table in self.tables}
        for owner, fields in self._id_fields():
            _unique(f"id field of {owner}", (field.name for field in fields))
            for field in fields:
                _check_id_field(owner, field, tables)
        for stream in self.streams:
            if stream.also is not None:
                _check_union(stream, stream.also, {one.name: one for one in self.streams})
        own_ids = {field.name for field in self.examples.ids}
        joined = {self.examples.user, *(entity.key for entity in self.entities)}
        for field in self.examples.ids:
            if field.multi and field.name in joined | {self.examples.item, self.examples.domain}:
                raise ValueError(
                    f"examples: {field.name!r} must hold one id a row, as rows are joined or "
                    f"grouped by it; got multi = true; remove that"
                )
        for entity in self.entities:
            if entity.key not in own_ids:
                raise ValueError(
                    f"entity {entity.name!r}: key must be an id field of the examples; got "
                    f"{entity.key!r}; fields are {', '.join(sorted(own_ids)) or 'none'}"
                )
        if self.examples.item is not None and self.examples.item not in own_ids:
            raise ValueError(
                f"examples: item must be one of the id fields; got {self.examples.item!r}"
            )
        if (self.examples.domain is None) and len(self.domains) > 1:
            raise ValueError("examples: domain must name a column where there are several domains")
        end = 0
        for split in self.splits:
            if not end <= split.start <= split.stop <= self.examples.rows:
                raise ValueError(
                    f"split {split.name!r}: rows must lie in order, without overlap and below "
                    f"{self.examples.rows}; got {split.start} .. {split.stop} after {end}"
                )
            end = split.stop
        return self

    def _id_fields(self) -> Iterable[tuple[str, tuple[IdField | EventIdField, ...]]]:
        yield "examples", self.examples.ids
        for entity in self.entities:
            yield f"entity {entity.name!r}", entity.ids
        for stream in self.streams:
            yield f"stream {stream.name!r}", stream.ids

    def input_names(self) -> tuple[str, ...]:
        """Names of everything at rest that an example can give the model, besides its streams.

        Returns:
            ids of the examples, then of the entities, then numbers in the same order.
        """
        owners = (self.examples, *self.entities)
        return tuple(field.name for owner in owners for field in owner.ids) + tuple(
            field.name for owner in owners for field in owner.numbers
        )

    def table(self, name: str) -> IdTable:
        """The table `name`; a ConfigError names the nearest one there is."""
        return _pick("table", name, self.tables)

    def stream(self, name: str) -> StreamSpec:
        """The stream `name`; a ConfigError names the nearest one there is."""
        return _pick("stream", name, self.streams)

    def split(self, name: str) -> SplitSpec:
        """The split `name`; a ConfigError names the nearest one there is."""
        return _pick("split", name, self.splits)


class HourOfDay(Contract):
    """Hour of the example's time, as an id 0 .. 23."""

    kind: Literal["hour_of_day"]
    name: Name
    utc_offset_hours: float = Field(default=0.0, ge=-14, le=14)


class DayOfWeek(Contract):
    """Day of the example's time, as an id 0 (Monday) .. 6."""

    kind: Literal["day_of_week"]
    name: Name
    utc_offset_hours: float = Field(default=0.0, ge=-14, le=14)


class ElapsedDays(Contract):
    """Days from the first example of the data set to this one, as a number."""

    kind: Literal["elapsed_days"]
    name: Name


class Bucket(Contract):
    """Position of a number among fixed boundaries, as an id 0 .. len(boundaries).

    id = how many boundaries are <= the value.
    """

    kind: Literal["bucket"]
    name: Name
    field: Name = Field(description="number field of the examples or of an entity")
    boundaries: tuple[float, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ascending(self) -> "Bucket":
        pairs = zip(self.boundaries, self.boundaries[1:], strict=False)
        if any(left >= right for left, right in pairs):
            raise ValueError(f"bucket {self.name!r}: boundaries must rise; got {self.boundaries}")
        return self


DerivedSpec = Annotated[HourOfDay | DayOfWeek | ElapsedDays | Bucket, Field(discriminator="kind")]


class NumberTransform(Contract):
    """A fixed map of a continuous input: y = clip((f(x) - offset) / scale, -limit, limit).

    Fixed by the recipe, or by the `offset` and `scale` that `dataset.toml` declares for the field
    where the recipe says nothing: no example ever depends on rows after it.
    """

    function: Literal["identity", "log1p"] = Field(
        default="identity", description="f; log1p is sign(x) · log(1 + |x|)"
    )
    offset: float = 0.0
    scale: float = Field(default=1.0, gt=0)
    limit: float = Field(default=10.0, gt=0)


class RunningScale(Contract):
    """Scale every continuous input of an example by mean and variance of what came before it.

    After the fixed transforms: y = clip((x - mean) / spread, -limit, limit), over training rows
    strictly earlier in time. For a log whose typical values nobody knows in advance.
    """

    prior_rows: float = Field(
        default=1000.0, gt=0, description="rows of mean 0 and variance 1 that come first"
    )
    limit: float = Field(default=6.0, gt=0)


class StreamRead(Contract):
    """How a recipe reads one stream."""

    max_events: int = Field(
        default=200, gt=0, le=2**24, description="the last so many events are read"
    )
    fields: tuple[Name, ...] | None = Field(
        default=None,
        description="fields of the stream, fields of an entity whose key the stream holds, or "
        "buckets of such; none given: all of the stream's own",
    )


class DataSpec(Contract):
    """The `[data]` section of a recipe: what is read, and what is computed while reading."""

    dataset: Name = Field(
        description="name known to `gem data prepare`, or that of the data set in `folder`"
    )
    folder: str | None = Field(
        default=None, description="folder of a prepared data set; none: made on the first run"
    )
    source: str | None = Field(
        default=None, description="folder that holds the raw files, for data that is not fetched"
    )
    inputs: tuple[Name, ...] | None = Field(
        default=None, description="inputs at rest that are read; none given: all"
    )
    streams: dict[str, StreamRead] | None = Field(
        default=None, description="streams that are read; none given: all, with defaults"
    )
    derived: tuple[DerivedSpec, ...] = ()
    statistics: tuple[StatisticSpec, ...] = ()
    transforms: dict[str, NumberTransform] = Field(
        default_factory=dict, description="per continuous input"
    )
    running_scale: RunningScale | None = Field(
        default=None, description="scale the continuous inputs of the examples by what came before"
    )
    user_embeddings: dict[Name, UserEmbeddingRead] = Field(
        default_factory=dict, description="cached embeddings of the users, by another model"
    )
    teacher: TeacherRead | None = Field(
        default=None, description="predictions that the model learns from as well"
    )
    hash_rows: dict[str, int] = Field(
        default_factory=dict, description="rows of a table with hashed ids, instead of its own"
    )
    max_rows: int | None = Field(
        default=None, gt=0, description="read only the first so many examples of each split"
    )
    synthetic: SyntheticSpec | None = Field(
        default=None, description="options of the generator, for dataset = 'synthetic'"
    )
    memory_mib: int = Field(
        default=4096,
        ge=8,
        le=2**30,
        description="memory of a rank for columns of the log; a log that needs more is streamed",
    )
    workers: int = Field(
        default=0,
        ge=0,
        le=256,
        description="processes of a rank that join batches, and one more for the statistics if "
        "there are any; 0: a thread does",
    )
    index_folder: str | None = Field(
        default=None,
        description="where the index of a streamed log lies; none: beside its data set",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "DataSpec":
        _unique("derived input", (derived.name for derived in self.derived))
        _unique("statistic", (statistic.name for statistic in self.statistics))
        if self.folder is not None and self.source is not None:
            raise ValueError(
                f"source: raw files are read to make a data set, and the one in folder = "
                f"{self.folder!r} is made already; remove one of the two"
            )
        if self.synthetic is not None and self.dataset != "synthetic":
            raise ValueError(
                f"synthetic: options of the generator need dataset = 'synthetic'; "
                f"got {self.dataset!r}"
            )
        return self


def _no_label_is_read(examples: ExamplesSpec) -> None:
    """A label that is also an input would be learned from itself, and nothing would show it."""
    roles = {examples.user, examples.time, examples.domain, examples.weight}
    read = roles | {field.name for field in (*examples.ids, *examples.numbers)}
    for label in examples.labels:
        if label.name in read:
            raise ValueError(
                f"label {label.name!r} must be a column that is nothing else; got one that is also "
                f"an input, the user, the time, the domain or the weight; remove it there"
            )
    fields = {field.name for field in (*examples.ids, *examples.numbers)}
    for word, name in (("time", examples.time), ("weight", examples.weight)):
        if name in fields:
            raise ValueError(
                f"examples: {word} {name!r} must be no input as well; give the input a column of "
                f"its own"
            )


def _check_id_field(owner: str, field: IdField | EventIdField, tables: dict[str, IdTable]) -> None:
    if field.table not in tables:
        raise ValueError(
            f"{owner}: table of field {field.name!r} must be declared; got {field.table!r}"
            f"{nearest(field.table, tables)}"
        )
    table = tables[field.table]
    special = {"fill": field.fill}
    if isinstance(field, EventIdField):
        special["unknown"] = field.unknown
    for word, value in special.items():
        if table.id_space == "row" and not 0 <= value < table.num_embeddings:
            raise ValueError(
                f"{owner}: {word} of field {field.name!r} must be a row of table "
                f"{table.name!r}, 0 .. {table.num_embeddings - 1}; got {value}"
            )


def _check_union(stream: StreamSpec, also: UnionSpec, streams: dict[str, StreamSpec]) -> None:
    """A union reads every field of its own from the other stream, and learns nothing earlier."""
    where, other = f"stream {stream.name!r}: also", streams.get(also.stream)
    if other is None or other.also is not None or other is stream:
        raise ValueError(
            f"{where}.stream must be another stream that is no union itself; got {also.stream!r}"
            f"{nearest(also.stream, (name for name in streams if name != stream.name))}"
        )
    test = next((field for field in other.ids if field.name == also.field), None)
    if test is None:
        raise ValueError(
            f"{where}.field must be an id field of the stream {other.name!r}; got {also.field!r}"
            f"{nearest(also.field, (field.name for field in other.ids))}"
        )
    if test.visible_after_ms and test.unknown in also.values:
        raise ValueError(
            f"{where}.values must be ids that the field shows once it is visible; got "
            f"{test.unknown}, which stands for unknown; remove it"
        )
    known = {field.name: field for field in (*other.ids, *other.numbers)}
    for field in (*stream.ids, *stream.numbers):
        if known.get(field.name) != field:
            raise ValueError(
                f"{where}: field {field.name!r} must be declared as in the stream {other.name!r}, "
                f"whose events are taken; got another declaration or none there"
            )


def _unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name!r} must be declared once; got it twice; rename one")
        seen.add(name)


def _pick(what: str, name: str, things: tuple[_Named, ...]) -> _Named:
    for thing in things:
        if thing.name == name:
            return thing
    raise ConfigError(
        refusal(
            "DatasetSpec",
            what,
            must="be declared in dataset.toml",
            got=repr(name) + nearest(name, (thing.name for thing in things)),
            fix="correct the name",
        )
    )

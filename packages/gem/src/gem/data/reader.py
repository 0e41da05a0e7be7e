"""Batches of a data set, in time order, joined with histories and statistics.

`open_reader` resolves a recipe's `[data]` section against a data set once and derives the
`BatchSchema`; `Reader.batches` then yields the batches of a split. Order and content depend on
nothing but the folder, the section and the batch size: a reader on rank r of W yields the r-th
slice of each batch, all ranks yield the same number of batches, and starting at step k yields
exactly the batches from k on.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gem.data.batch import ExampleBatch
from gem.data.dataset import Dataset
from gem.data.entity_table import Ids
from gem.data.features import DatasetSpec, DataSpec, StreamRead
from gem.data.names import nearest
from gem.data.schema import BatchSchema
from gem.data.sources import Sources
from gem.data.statistics.engine import StatisticsBlock, StatisticsEngine
from gem.data.stream_reader import StreamReader, id_input
from gem.data.transforms import apply_transforms, resolved_transforms
from gem_jagged.batch import Jagged, Layout
from gem_opkit.errors import ConfigError, refusal


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
    return Reader(Sources(Dataset.open(folder), data), batch_size, rank, world_size)


class Reader:
    """Yields the batches of a data set's splits. Made by `open_reader`.

    Attributes:
        schema: what the batches hold, in order.
        dataset: the contract of the data set.
    """

    def __init__(self, sources: Sources, batch_size: int, rank: int, world_size: int) -> None:
        self._sources = sources
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self.dataset: DatasetSpec = sources.dataset.spec
        data = sources.data
        self._id_names, numbers = self._chosen_inputs()
        self._transforms = resolved_transforms(self.dataset, data)
        # A running scale walks over the log as the statistics do, and takes all numbers along.
        scaled = numbers if data.running_scale is not None else ()
        self._statistics: StatisticsEngine | None = None
        if data.statistics or scaled:
            self._statistics = StatisticsEngine(sources, self._bounds("train"), plain=scaled)
        self._streams = self._open_streams()
        self._ids = {name: sources.ids(name) for name in self._id_names}
        self._numbers = {name: sources.numbers(name) for name in numbers if name not in scaled}
        computed = self._statistics.example_names if self._statistics else ()
        self.schema = BatchSchema(
            streams=tuple(stream.schema for stream in self._streams.values()),
            ids=tuple(id_input(name, sources.id_info(name)) for name in self._id_names),
            numbers=(*self._numbers, *computed),
            item=self._item(),
            labels=tuple(label.name for label in self.dataset.examples.labels),
            domains=self.dataset.domains,
        )
        self._check_transforms()

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

    def batches(self, split: str, *, start_step: int = 0) -> Iterator[ExampleBatch]:
        """The batches of a split in time order.

        Args:
            split: its name.
            start_step: first step that is yielded, 0 .. steps. Statistics are brought to that
                point first, by replaying the rows before it.

        Returns:
            one batch a step, this rank's contiguous slice of it. The last may be partial, and on
            some ranks empty.

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
        start, stop = self._bounds(split)
        if start_step == steps:
            return
        engine = self._statistics
        cursor = engine.cursor(start + start_step * self._batch_size) if engine else None
        try:
            for step in range(start_step, steps):
                first = start + step * self._batch_size
                count = min(self._batch_size, stop - first)
                low = first + count * self._rank // self._world_size
                high = first + count * (self._rank + 1) // self._world_size
                yield self._batch(low, high, cursor.rows(low, high) if cursor else None)
        finally:
            if engine and cursor:
                engine.release(cursor)

    def _bounds(self, split: str) -> tuple[int, int]:
        declared = self.dataset.split(split)
        stop, limit = declared.stop, self._sources.data.max_rows
        return declared.start, stop if limit is None else min(stop, declared.start + limit)

    # -- one batch -----------------------------------------------------------------------------
    def _batch(self, low: int, high: int, statistics: StatisticsBlock | None) -> ExampleBatch:
        sources, examples = self._sources, self.dataset.examples
        rows = np.arange(low, high)
        one_each = Layout.constant(len(rows), 1)
        labels_BA = np.stack(
            [sources.example_column(name).values[low:high] for name in self.schema.labels], axis=1
        )
        known_BA = ~np.isnan(labels_BA)
        domains = (
            np.zeros(len(rows), np.int64)
            if examples.domain is None
            else sources.example_column(examples.domain).values[low:high].copy()
        )
        weights = (
            np.ones(len(rows), np.float32)
            if examples.weight is None
            else sources.example_column(examples.weight).values[low:high].copy()
        )
        return ExampleBatch(
            streams={
                name: stream.batch(
                    low,
                    high,
                    statistics.events.get(name) if statistics else None,
                    self._transforms,
                )
                for name, stream in self._streams.items()
            },
            ids={name: _jagged(ids(rows), one_each) for name, ids in self._ids.items()},
            numbers_BD=self._number_block(rows, statistics),
            labels_BA=torch.from_numpy(np.where(known_BA, labels_BA, np.float32(0))),
            label_mask_BA=torch.from_numpy(known_BA),
            weights_B=torch.from_numpy(weights),
            domains_B=torch.from_numpy(domains),
            user_B=torch.from_numpy(sources.users[low:high].copy()),
            row_B=torch.from_numpy(rows),
        )

    def _number_block(self, rows: np.ndarray, statistics: StatisticsBlock | None) -> Tensor:
        block = np.empty((len(rows), len(self.schema.numbers)), np.float32)
        for place, values in enumerate(self._numbers.values()):
            block[:, place] = values(rows)
        apply_transforms(block, tuple(self._numbers), self._transforms)
        if statistics is not None:
            block[:, len(self._numbers) :] = statistics.numbers
        return torch.from_numpy(block)

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

    def _open_streams(self) -> dict[str, StreamReader]:
        reads = self._sources.data.streams
        if reads is None:
            reads = {stream.name: StreamRead() for stream in self.dataset.streams}
        statistics = self._statistics
        return {
            name: StreamReader(
                self._sources,
                name,
                read,
                statistics.event_names(name) if statistics else (),
            )
            for name, read in reads.items()
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


def _jagged(ids: Ids, one_each: Layout) -> Jagged:
    values = torch.from_numpy(ids.values)
    if ids.offsets is None:
        return Jagged.from_layout(values, one_each)
    return Jagged.from_lengths(values, torch.from_numpy(np.diff(ids.offsets)))

"""The log of a data set as a recipe reads it: decoded whole, or streamed with bounded memory.

What a row or an event holds is the same in both. A log that fits into the recipe's `memory_mib` is
decoded when it is opened. A longer one, and any log that worker processes read, is streamed:
examples come from Parquet piece by piece, and events from an index on disk (`gem.data.log_index`)
that all processes share. Entities, one row a user or an item, are held whole in both.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from gem.data.columns import ColumnRequest, count_rows
from gem.data.dataset import Dataset
from gem.data.example_rows import ExampleRows, StreamedExamples, WholeExamples, bytes_a_row
from gem.data.features import DataSpec
from gem.data.log_index import LogIndex
from gem.data.stream_source import StreamSource, whole_stream


class Log(Protocol):
    """Examples and events of a data set.

    Attributes:
        examples: the examples, by row.
        times: time of every example in ms, int64, not falling; not to be written to.
    """

    examples: ExampleRows
    times: np.ndarray

    def stream(self, name: str) -> StreamSource:
        """A stream, indexed; a ConfigError names the nearest to one that there is not."""
        ...


def open_log(dataset: Dataset, data: DataSpec) -> Log:
    """Open the log of a data set.

    Args:
        dataset: the data set.
        data: says how much memory there is, and how many processes share it.

    Returns:
        the log, whole or streamed.

    Raises:
        DataError: the data set is malformed, or an index cannot be written.
    """
    budget = data.memory_mib << 20
    if not data.workers and log_bytes(dataset, data) <= budget:
        return WholeLog(dataset)
    # The index is made by one process, while all others wait or are not there yet.
    return StreamedLog(
        dataset, data, budget_bytes=budget // reading_processes(data), making_bytes=budget
    )


def log_bytes(dataset: Dataset, data: DataSpec) -> int:
    """About what a log would take in memory, decoded whole.

    Args:
        dataset: the data set.
        data: says which streams are read.

    Returns:
        bytes of all examples and of the events of those streams, by the row counts of the files
        and the declared columns.
    """
    examples = dataset.example_requests().values()
    total = dataset.spec.examples.rows * _bytes_of_all(examples)
    for stream in dataset.spec.streams:
        if data.streams is None or stream.name in data.streams:
            events = count_rows(dataset.event_files(stream.name))
            total += events * _bytes_of_all(dataset.event_requests(stream).values())
    return total


def _bytes_of_all(requests: Iterable[ColumnRequest]) -> int:
    return sum(bytes_a_row(request) for request in requests)


def reading_processes(data: DataSpec) -> int:
    """Processes of a rank that read the log.

    Args:
        data: the recipe's section.

    Returns:
        the rank itself, its workers, and one for statistics where workers have company.
    """
    return 1 + data.workers + int(data.workers > 0 and computes_statistics(data))


def computes_statistics(data: DataSpec) -> bool:
    """Whether a recipe has numbers that depend on all rows before.

    Args:
        data: the recipe's section.
    """
    return bool(data.statistics) or data.running_scale is not None


class WholeLog:
    """A log whose columns are held in memory.

    Args:
        dataset: the data set.
    """

    def __init__(self, dataset: Dataset) -> None:
        spec = dataset.spec.examples
        # At least user, time and labels are always needed, so one pass over the files reads them.
        needed = dict.fromkeys([spec.user, spec.time, *(label.name for label in spec.labels)])
        self._dataset = dataset
        self.examples: ExampleRows = WholeExamples(dataset, tuple(needed))
        self.times = self.examples.column(spec.time)[:]

    def stream(self, name: str) -> StreamSource:
        """A stream, indexed in memory.

        Args:
            name: of the stream.

        Returns:
            its events.

        Raises:
            ConfigError, DataError: as `Dataset.events`.
        """
        return whole_stream(self._dataset, self._dataset.spec.stream(name))


class StreamedLog:
    """A log of any length, read with bounded memory.

    Args:
        dataset: the data set.
        data: says where its index lies.
        budget_bytes: memory of this process for columns of the log, > 0.
        making_bytes: memory for making its index, > 0.
    """

    def __init__(
        self, dataset: Dataset, data: DataSpec, *, budget_bytes: int, making_bytes: int
    ) -> None:
        self._dataset = dataset
        self._index = LogIndex(dataset, data, budget_bytes=making_bytes)
        self.examples: ExampleRows = StreamedExamples(dataset, budget_bytes=budget_bytes // 2)
        self.times = self._index.times()

    def stream(self, name: str) -> StreamSource:
        """A stream, from the index on disk.

        Args:
            name: of the stream.

        Returns:
            its events, mapped.

        Raises:
            ConfigError, DataError: as `gem.data.log_index.LogIndex.stream`.
        """
        return self._index.stream(self._dataset.spec.stream(name))

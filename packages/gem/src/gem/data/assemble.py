"""A batch in two steps: what the log says of some rows, and the tensors that are made of it.

The first step gives plain arrays and depends on the log alone, so any process may take it, for
any rows, in any order. The second adds the statistics, which depend on everything before.
"""

from collections.abc import Mapping

import numpy as np
import torch

from gem.data.batch import ExampleBatch, StepWork
from gem.data.features import NumberTransform
from gem.data.schema import BatchSchema
from gem.data.sources import Sources
from gem.data.statistics.engine import StatisticsBlock
from gem.data.stream_reader import StreamReader
from gem.data.teacher import Teacher
from gem.data.transforms import apply_transforms
from gem_jagged.batch import Jagged, Layout

Arrays = dict[str, np.ndarray]


class Assembler:
    """Joins the rows of a data set and makes batches of them.

    Args:
        sources: of the data set and the recipe.
        schema: what the batches hold.
        streams: readers of its streams.
        numbers: continuous inputs that are no statistics, the first ones of the schema.
        transforms: of continuous inputs, by name.
        taught: rows whose teacher is read, first and end; None for no teacher.
    """

    def __init__(
        self,
        sources: Sources,
        schema: BatchSchema,
        streams: Mapping[str, StreamReader],
        numbers: tuple[str, ...],
        transforms: Mapping[str, NumberTransform],
        *,
        taught: tuple[int, int] | None = None,
    ) -> None:
        self._taught = taught
        self._teacher: Teacher | None = None
        self._schema, self._streams, self._sources = schema, streams, sources
        self._transforms = transforms
        self._names = numbers
        self._ids = {field.name: sources.ids(field.name) for field in schema.ids}
        self._numbers = [sources.numbers(name) for name in numbers]
        self._labels = [sources.example_column(name) for name in schema.labels]
        examples = sources.dataset.spec.examples
        self._domain = self._weight = None
        if examples.domain is not None:
            self._domain = sources.example_column(examples.domain)
        if examples.weight is not None:
            self._weight = sources.example_column(examples.weight)

    def arrays(self, low: int, high: int) -> Arrays:
        """What the log says of rows low .. high-1.

        Args:
            low: first example row.
            high: end of the rows, exclusive.

        Returns:
            arrays by name, for `batch`; the columns of the statistics are left empty.

        Raises:
            DataError: a streamed log turns out to be malformed there.
        """
        rows, count = np.arange(low, high), high - low
        found: Arrays = {"rows": rows, "users": self._sources.users[rows]}
        found["labels"] = np.stack([column[rows] for column in self._labels], axis=1)
        found["domains"] = np.zeros(count, np.int64)
        if self._domain is not None:
            found["domains"] = self._domain[rows]
        found["weights"] = np.ones(count, np.float32)
        if self._weight is not None:
            found["weights"] = self._weight[rows]
        numbers = np.empty((count, len(self._schema.numbers)), np.float32)
        for place, values in enumerate(self._numbers):
            numbers[:, place] = values(rows)
        apply_transforms(numbers, self._names, self._transforms)
        found["numbers"] = numbers
        if self._schema.vectors:
            found["vectors"] = self._sources.vectors(rows)
        if self._taught is not None:
            found["teacher"] = self._said_of(rows)
        for name, take in self._ids.items():
            ids = take(rows)
            found[f"id:{name}"] = ids.values
            if ids.offsets is not None:
                found[f"lengths:{name}"] = np.diff(ids.offsets)
        for name, stream in self._streams.items():
            of_stream = stream.arrays(low, high, self._transforms)
            found |= {f"stream:{name}:{key}": values for key, values in of_stream.items()}
        return found

    def _said_of(self, rows: np.ndarray) -> np.ndarray:
        """Logits of the teacher, which is opened when a row is taught; others need none."""
        read, examples = self._sources.data.teacher, self._sources.dataset.spec.examples
        found = np.full((len(rows), len(self._schema.labels)), np.nan, np.float32)
        low, high = self._taught or (0, 0)
        taught = (rows >= low) & (rows < high)
        if read is None or examples.item is None or not taught.any():
            return found
        if self._teacher is None:
            self._teacher = Teacher(read, self._schema.labels)
        items = self._sources.example_column(examples.item)[rows]
        said = self._teacher.logits(self._sources.users[rows], items, self._sources.times[rows])
        return np.where(taught[:, None], said, found)

    def batch(self, arrays: Arrays, statistics: StatisticsBlock | None) -> ExampleBatch:
        """Make a batch.

        Args:
            arrays: of `arrays`; they become the batch's tensors.
            statistics: of the same rows; None where the recipe has none.

        Returns:
            the batch.
        """
        rows, labels_BA, numbers_BD = arrays["rows"], arrays["labels"], arrays["numbers"]
        if statistics is not None:
            numbers_BD[:, len(self._names) :] = statistics.numbers
        one_each = Layout.constant(len(rows), 1)
        known_BA = ~np.isnan(labels_BA)
        return ExampleBatch(
            streams={
                name: stream.batch(
                    _under(f"stream:{name}:", arrays),
                    statistics.events.get(name) if statistics else None,
                    self._transforms,
                )
                for name, stream in self._streams.items()
            },
            ids={name: _jagged(arrays, name, one_each) for name in self._ids},
            numbers_BD=torch.from_numpy(numbers_BD),
            labels_BA=torch.from_numpy(np.where(known_BA, labels_BA, np.float32(0))),
            label_mask_BA=torch.from_numpy(known_BA),
            weights_B=torch.from_numpy(arrays["weights"]),
            domains_B=torch.from_numpy(arrays["domains"]),
            user_B=torch.from_numpy(arrays["users"]),
            row_B=torch.from_numpy(rows),
            work=StepWork.from_array(arrays["work"]) if "work" in arrays else None,
            vectors_BV=torch.from_numpy(arrays["vectors"]) if "vectors" in arrays else None,
            teacher_BA=torch.from_numpy(arrays["teacher"]) if "teacher" in arrays else None,
        )


def _under(prefix: str, arrays: Arrays) -> Arrays:
    return {
        name.removeprefix(prefix): values
        for name, values in arrays.items()
        if name.startswith(prefix)
    }


def _jagged(arrays: Arrays, name: str, one_each: Layout) -> Jagged:
    values = torch.from_numpy(arrays[f"id:{name}"])
    lengths = arrays.get(f"lengths:{name}")
    if lengths is None:
        return Jagged.from_layout(values, one_each)
    return Jagged.from_lengths(values, torch.from_numpy(lengths))

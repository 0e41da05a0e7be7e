"""A request that stands for rows of a log, to try a ranker with or to compare it.

What is asked is what the rows asked in training: the user, the time, the context, the events of the
user before that time, and as candidates the rows' items.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gem.data.columns import Column
from gem.data.dataset import Dataset
from gem.data.features import DataSpec, StreamRead
from gem.data.fields import StreamSpec
from gem.data.prepare import default_folder
from gem.data.statistics.spec import EventStatistic, HistoryCount, HistoryGap, HistoryStatistic
from gem.data.user_embeddings import HOUR_MS, UserEmbeddings
from gem.serving.request import GivenVector, ScoreRequest
from gem.train.run import DATA_ROOT
from gem.train.run_folder import CONFIG_FILE, read_run_config
from gem.train.whole_file import check_new, write_whole
from gem_opkit.errors import ConfigError, refusal


class RequestMaker:
    """Makes requests of rows of a data set, whose columns it holds.

    Args:
        folder: of the data set.
        data: the recipe's section; says how long histories have to be.
    """

    def __init__(self, folder: Path, data: DataSpec) -> None:
        self._dataset = dataset = Dataset.open(folder)
        self._data = data
        reads = data.user_embeddings
        self._embeddings = {name: UserEmbeddings(name, read) for name, read in reads.items()}
        self._examples = dataset.examples(dataset.example_requests())
        self._events: dict[str, dict[str, Column]] = {}
        self._order: dict[str, np.ndarray] = {}
        for stream in dataset.spec.streams:
            self._events[stream.name] = columns = dataset.events(stream.name)
            users, times = columns[stream.user].values, columns[stream.time].values
            # By user and time; of one time in the order of the files.
            self._order[stream.name] = np.lexsort((times, users))

    def request(self, rows: Sequence[int]) -> ScoreRequest:
        """A request whose candidates are some rows.

        Args:
            rows: of the examples, of one user, one time and one domain.

        Returns:
            the request.

        Raises:
            ConfigError: the rows are of different users, times or domains.
        """
        spec = self._dataset.spec.examples
        of_all = [spec.user, spec.time, *([] if spec.domain is None else [spec.domain])]
        for name in of_all:
            values = {int(self._examples[name].values[row]) for row in rows}
            if len(values) != 1:
                raise ConfigError(
                    refusal(
                        "request",
                        "rows",
                        must=f"have one {name}",
                        got=sorted(values)[:5],
                        fix="make a request of each",
                    )
                )
        user, time_ms = (int(self._examples[n].values[rows[0]]) for n in (spec.user, spec.time))
        domain = None
        if spec.domain is not None:
            domain = self._dataset.spec.domains[int(self._examples[spec.domain].values[rows[0]])]
        inputs = [field.name for field in (*spec.ids, *spec.numbers) if field.name != spec.user]
        return ScoreRequest(
            user=user,
            time_ms=time_ms,
            domain=domain,
            candidates={name: _taken(self._examples[name], rows) for name in inputs},
            history={
                stream.name: self._history(stream, user, time_ms)
                for stream in self._dataset.spec.streams
            },
            vectors=self._vectors(user, time_ms),
        )

    def _vectors(self, user: int, time_ms: int) -> dict[str, GivenVector]:
        """The cached embeddings that the user had by then."""
        users, times = np.asarray([user]), np.asarray([time_ms])
        found = {}
        for name, cached in self._embeddings.items():
            place, age_hours = cached.rows_at(users, times)
            if place[0] >= 0:
                found[name] = GivenVector(
                    vector=tuple(cached.columns(users, times)[0, :-1].tolist()),
                    fingerprint=cached.fingerprint,
                    valid_from_ms=time_ms - round(float(age_hours[0]) * HOUR_MS),
                )
        return found

    def example(self) -> ScoreRequest:
        """A request of the first row behind the training rows whose user has a history.

        Returns:
            the request; of the first of these rows where none of a thousand has one, or of the
            last row of the log where nothing is behind training.
        """
        spec = self._dataset.spec
        first = min(spec.split("train").stop, spec.examples.rows - 1)
        for row in range(first, min(first + 1_000, spec.examples.rows)):
            request = self.request(self.at_one_time(row))
            if any(len(next(iter(columns.values()))) for columns in request.history.values()):
                return request
        return self.request(self.at_one_time(first))

    def at_one_time(self, row: int, most: int = 64) -> list[int]:
        """Rows that can be asked for together with a row.

        Args:
            row: of the examples.
            most: how many at most.

        Returns:
            the row and those that follow it, of its user, time and domain.
        """
        spec, rows = self._dataset.spec.examples, [row]
        names = [n for n in (spec.user, spec.time, spec.domain) if n is not None]
        while len(rows) < most and rows[-1] + 1 < spec.rows:
            columns = (self._examples[name].values for name in names)
            if any(column[rows[-1] + 1] != column[row] for column in columns):
                break
            rows.append(rows[-1] + 1)
        return rows

    def _history(self, stream: StreamSpec, user: int, time_ms: int) -> dict[str, list[Any]]:
        columns, order = self._events[stream.name], self._order[stream.name]
        users = columns[stream.user].values[order]
        low, high = (int(np.searchsorted(users, user, side)) for side in ("left", "right"))
        events = order[low:high]
        before = columns[stream.time].values[events] < time_ms
        events = events[before]
        if (most := self._most_events()) is not None:
            events = events[-most:]
        names = [name for name in columns if name != stream.user]
        return {name: _taken(columns[name], events) for name in names}

    def _most_events(self) -> int | None:
        """Enough of each stream for what is read; None where that needs all of it."""
        # What a union shows late, and what has no time, may lie as far back as one likes.
        if any(stream.also or stream.untimed for stream in self._dataset.spec.streams):
            return None
        reads = self._data.streams or {s.name: StreamRead() for s in self._dataset.spec.streams}
        most = max((read.max_events for read in reads.values()), default=1)
        for one in self._data.statistics:
            if isinstance(one, HistoryCount | HistoryGap):
                most = max(most, one.max_events)
            elif isinstance(one, HistoryStatistic | EventStatistic) or one.kind == "pair":
                most = max(most, one.feedback.max_events)
        return most


def write_example(run: Path, out: Path, *, data_root: Path = DATA_ROOT) -> ScoreRequest:
    """Write a request of the first rows after the training rows of a run's data set.

    Args:
        run: the run's folder, or one of its checkpoints.
        out: file to write; must not be there.
        data_root: as in `gem.train.loop.train`.

    Returns:
        the request: a user with history, where the next thousand rows have one.

    Raises:
        ConfigError: no run there, or the file is there.
        DataError: the data set is missing or malformed.
    """
    check_new(out, command="gem export", option="--example")
    folder = run if (run / CONFIG_FILE).is_file() else run.parent.parent
    data = read_run_config(folder).data
    maker = RequestMaker(default_folder(data, data_root), data)
    request = maker.example()
    write_whole(out, request.model_dump_json(exclude_defaults=True) + "\n")
    return request


def _taken(column: Column, rows: Sequence[int] | np.ndarray) -> list[Any]:
    if column.offsets is None:
        return column.values[np.asarray(rows, np.int64)].tolist()
    starts, ends = column.offsets[:-1], column.offsets[1:]
    return [column.values[starts[row] : ends[row]].tolist() for row in rows]

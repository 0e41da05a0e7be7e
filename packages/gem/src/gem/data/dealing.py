"""Which rows of a step this rank reads where ranks share their work out evenly.

Every rank looks up how long the histories are of all rows that it could get, which takes no event,
and deals them as all others do (`gem_parallel.balance`). Then it reads its own rows, in the order
of the log, and puts them into the order in which it runs them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from gem.data.batch import StepWork
from gem.data.spans import Span
from gem.data.stream_reader import StreamReader
from gem_parallel.balance.step import Dealing, arrange, part_loads
from gem_parallel.balance.work import WorkModel, max_over_mean

Run = tuple[int, int]
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Balance:
    """What a reader has to know to deal. Can be pickled.

    Attributes:
        dealing: how base batches are dealt.
        work: what an example costs by the lengths of its histories.
    """

    dealing: Dealing
    work: WorkModel


@dataclass(frozen=True, slots=True)
class Dealt:
    """The rows of this rank in a step.

    Attributes:
        first: first row of the step.
        runs: first row and end of each stretch of rows, in the order in which they are run.
        work: how even the step has become.
    """

    first: int
    runs: tuple[Run, ...]
    work: StepWork


class Dealer:
    """Deals the rows of steps.

    Args:
        balance: how.
        streams: of the reader.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(
        self,
        balance: Balance,
        streams: Mapping[str, StreamReader],
        rank: int,
        world_size: int,
    ) -> None:
        self._balance, self._streams = balance, streams
        self._rank, self._world_size = rank, world_size
        self._last: tuple[Span, Dealt] | None = None

    def deal(self, span: Span) -> Dealt:
        """Find the rows of this rank.

        Args:
            span: of a step.

        Returns:
            its rows; on all ranks together they are those of the step, each once.

        Cost: a bisection for each stream and row of the step; of the rank for ``local``, of its
            group for ``within_group``.
        """
        if self._last is None or self._last[0] != span:
            self._last = span, self._dealt(span)
        return self._last[1]

    def _dealt(self, span: Span) -> Dealt:
        dealing = self._balance.dealing
        first, last, world_size, rank = self._sharing(span)
        lengths = {name: stream.lengths(first, last) for name, stream in self._streams.items()}
        # Without streams every row costs the same.
        work_B = self._balance.work.of(lengths or {"": np.zeros(last - first, np.int64)})
        found = arrange(work_B, world_size, dealing)
        runs = found.runs(rank)
        own = [(span.low - first, span.high - first)]
        before, after = (
            max_over_mean(part_loads(work_B, some, dealing.parts)) for some in (own, runs)
        )
        alone = world_size < self._world_size
        work = StepWork(
            ranks_before=None if alone else max_over_mean(found.before_W),
            ranks=None if alone else max_over_mean(found.after_W),
            parts_before=before,
            parts=after,
            moved_frac=found.moved / (len(found.edges_N1) - 1),
        )
        return Dealt(first, tuple((first + low, first + high) for low, high in runs), work)

    def _sharing(self, span: Span) -> tuple[int, int, int, int]:
        """First row and end of those that some ranks share, how many, and this one's place."""
        dealing, count = self._balance.dealing, span.last - span.first
        if dealing.variant == "local":
            return span.low, span.high, 1, 0
        if dealing.variant != "within_group":
            return span.first, span.last, self._world_size, self._rank
        begin = self._rank - self._rank % dealing.group_ranks
        end = min(begin + dealing.group_ranks, self._world_size)
        low, high = (span.first + count * edge // self._world_size for edge in (begin, end))
        return low, high, end - begin, self._rank - begin


def in_batch_order(dealt: Dealt, read: Callable[[int, int], Read]) -> list[Read]:
    """Read the rows of a rank in the order of the log, and give them in that of its batch.

    Args:
        dealt: the rows.
        read: first row and end of a run -> what is read of it.

    Returns:
        one for each run, at least one: that of no row where the rank has none.
    """
    runs = dealt.runs or ((dealt.first, dealt.first),)
    order = sorted(range(len(runs)), key=lambda place: runs[place])
    found = {place: read(*runs[place]) for place in order}
    return [found[place] for place in range(len(runs))]


def joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Put what was read of several runs one behind the other.

    Args:
        parts: at least one, all with the same names; arrays are packed along their first axis.

    Returns:
        arrays by the same names.
    """
    if len(parts) == 1:
        return dict(parts[0])
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

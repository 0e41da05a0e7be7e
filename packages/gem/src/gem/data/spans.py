"""Which rows of a split a rank reads in which step."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of a step.

    Attributes:
        first: first row of the step over all ranks.
        low: first row of this rank.
        high: end of its rows, exclusive.
        begins: whether a reading begins here.
    """

    first: int
    low: int
    high: int
    begins: bool


class StepSpans:
    """The rows of a rank in each step of a split, one at a time: there may be very many.

    Args:
        bounds: first and end row of the split.
        batch_size: examples of a step over all ranks, > 0.
        rank: this rank.
        world_size: number of ranks.
        begin: the first step.
    """

    def __init__(
        self, bounds: tuple[int, int], batch_size: int, rank: int, world_size: int, begin: int = 0
    ) -> None:
        self._bounds, self._batch_size = bounds, batch_size
        self._rank, self._world_size, self._begin = rank, world_size, begin

    def after(self, steps: int) -> "StepSpans":
        """The same from a step on.

        Args:
            steps: how many are left out at the beginning of the split.
        """
        return StepSpans(self._bounds, self._batch_size, self._rank, self._world_size, steps)

    def __iter__(self) -> Iterator[Span]:
        start, stop = self._bounds
        begin = start + self._begin * self._batch_size
        for first in range(begin, stop, self._batch_size):
            count = min(self._batch_size, stop - first)
            yield Span(
                first=first,
                low=first + count * self._rank // self._world_size,
                high=first + count * (self._rank + 1) // self._world_size,
                begins=first == begin,
            )

    def __len__(self) -> int:
        start, stop = self._bounds
        return max(0, -(-(stop - start) // self._batch_size) - self._begin)

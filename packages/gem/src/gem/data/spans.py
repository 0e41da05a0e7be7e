"""Which rows of a split a rank reads in which step."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of a step.

    Attributes:
        first: first row of the step over all ranks.
        last: end of the rows of the step over all ranks, exclusive.
        low: first row of this rank.
        high: end of its rows, exclusive.
        begins: whether a reading begins here.
        dealt: whether ranks exchange rows within the step so that their work is even; `low` and
            `high` are then what the rank would have without that.
    """

    first: int
    last: int
    low: int
    high: int
    begins: bool
    dealt: bool = False


class StepSpans:
    """The rows of a rank in each step of a split, one at a time: there may be very many.

    Args:
        bounds: first and end row of the split.
        batch_size: examples of a step over all ranks, > 0.
        rank: this rank.
        world_size: number of ranks.
        begin: the first step.
        dealt: whether ranks exchange rows within a step.
    """

    def __init__(
        self,
        bounds: tuple[int, int],
        batch_size: int,
        rank: int,
        world_size: int,
        *,
        begin: int = 0,
        dealt: bool = False,
    ) -> None:
        self._bounds, self._batch_size = bounds, batch_size
        self._rank, self._world_size = rank, world_size
        self._begin, self._dealt = begin, dealt

    def after(self, steps: int) -> "StepSpans":
        """The same from a step on.

        Args:
            steps: how many are left out at the beginning of the split.
        """
        return StepSpans(
            self._bounds,
            self._batch_size,
            self._rank,
            self._world_size,
            begin=steps,
            dealt=self._dealt,
        )

    def __iter__(self) -> Iterator[Span]:
        start, stop = self._bounds
        begin = start + self._begin * self._batch_size
        for first in range(begin, stop, self._batch_size):
            count = min(self._batch_size, stop - first)
            yield Span(
                first=first,
                last=first + count,
                low=first + count * self._rank // self._world_size,
                high=first + count * (self._rank + 1) // self._world_size,
                begins=first == begin,
                dealt=self._dealt,
            )

    def __len__(self) -> int:
        start, stop = self._bounds
        return max(0, -(-(stop - start) // self._batch_size) - self._begin)

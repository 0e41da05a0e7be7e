"""Which ranks are slower than the rest, by what each spent on its own: pure numbers, no clocks.

A rank that waits in a collective spends as long in it as the slowest one, so the length of a step
says nothing. Compared are the times in which no rank waits for another one. A rank that had more
work is no straggler for it: its time for each unit of work counts as well, and the smaller of both
ratios decides. Waiting for data is told by itself, as that has another remedy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gem_opkit.errors import ConfigError, refusal

Cause = Literal["compute", "data"]
# A step that is longer than that of the others by less is not looked at.
_LEAST_MS = 1.0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that has been slower than the rest for some time.

    Attributes:
        rank: which.
        cause: what it is slow in.
        ratio: its time over the median of the other ranks; of data: its step, with what it waits
            for data beyond them, over a step.
        rows: rows of the log in a row, up to this one, in which it was slower.
    """

    rank: int
    cause: Cause
    ratio: float
    rows: int


class StragglerWatch:
    """Judges ranks, row by row of a log.

    Args:
        ratio: from which on a rank is slower than the rest, > 1.
        rows: rows in a row after which it is a straggler, > 0.

    Raises:
        ConfigError: a number that makes no sense.
    """

    def __init__(self, ratio: float, rows: int) -> None:
        if not ratio > 1.0 or rows < 1:
            raise ConfigError(
                refusal(
                    "StragglerWatch",
                    "ratio and rows",
                    must="be above 1 and above 0",
                    got=f"{ratio:g} and {rows}",
                    fix="raise them",
                )
            )
        self._ratio, self._rows = ratio, rows
        self._seen: dict[tuple[int, Cause], int] = {}

    def judge(
        self,
        compute_ms: Sequence[float],
        work: Sequence[float],
        data_ms: Sequence[float],
        step_ms: float,
        *,
        steps: int = 1,
    ) -> list[Straggler]:
        """Look at the time since the last row.

        Args:
            compute_ms: rank -> time in which it computed and waited for nobody, in all steps.
            work: rank -> work of its examples in that time, in any unit.
            data_ms: rank -> time that it waited for its own data.
            step_ms: time of all these steps together.
            steps: how many there were, > 0.

        Returns:
            the ranks that have been slower for as many rows as asked for, slowest first.
        """
        compute = np.asarray(compute_ms, np.float64)
        # What a step of a tiny model takes is noise.
        enough = steps * _LEAST_MS
        for_work = compute / np.maximum(np.asarray(work, np.float64), 1e-30)
        slow = np.minimum(_over_others(compute), _over_others(for_work))
        # A rank without work computes nothing that could be slow.
        longer = compute - _median_of_others(compute) >= enough
        slow = np.where(longer & (np.asarray(work) > 0), slow, 0.0)
        waited = np.asarray(data_ms, np.float64)
        extra = waited - _median_of_others(waited)
        late = np.where(extra >= enough, 1.0 + extra / max(step_ms, 1e-9), 0.0)
        ratios: dict[Cause, np.ndarray] = {"compute": slow, "data": late}
        found: list[Straggler] = []
        seen: dict[tuple[int, Cause], int] = {}
        for cause, values in ratios.items():
            for rank in np.flatnonzero(values >= self._ratio):
                key = (int(rank), cause)
                seen[key] = self._seen.get(key, 0) + 1
                if seen[key] >= self._rows:
                    found.append(Straggler(key[0], cause, float(values[rank]), seen[key]))
        self._seen = seen
        return sorted(found, key=lambda one: -one.ratio)

    def is_new(self, rows: int) -> bool:
        """Whether a rank has just become a straggler, so that it is told once.

        Args:
            rows: of it, in the newest row.
        """
        return rows == self._rows


def _median_of_others(values: np.ndarray) -> np.ndarray:
    """Median of all other ranks, for each rank; of itself where it is alone."""
    count = len(values)
    if count == 1:
        return values
    order = np.argsort(values, kind="stable")
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    ranked = values[order]
    # The sorted others are the sorted ranks without one: beyond it, all move down by one place.
    low, high = (count - 2) // 2, (count - 1) // 2
    first = ranked[low + (place <= low)]
    second = ranked[high + (place <= high)]
    return (first + second) / 2


def _over_others(values: np.ndarray) -> np.ndarray:
    return values / np.maximum(_median_of_others(values), 1e-30)

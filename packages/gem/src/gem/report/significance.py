"""Whether recipes differ by more than chance: each one beside the first, on the same test rows.

A paired bootstrap of NE (`gem.report.paired`), the loss of a row averaged over the seeds of a
recipe. It needs the predictions of the runs. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gem.report.compare import Group
from gem.report.paired import RESAMPLES, Losses, paired_bootstraps, task_losses
from gem_opkit.errors import DataError

# Resamples of a whole page's worth of rows: a second for each 10^8 drawn rows, about.
_MOST_DRAWN = 2 * 10**9
_FEWEST = 400


@dataclass(frozen=True, slots=True)
class Beside:
    """One recipe beside the first in one task.

    Attributes:
        task: name.
        label: of the recipe.
        against: label of the first one.
        place: of the recipe among all.
        difference: of NE, below 0 where the recipe is better.
        low: lower end of its 95 % interval.
        high: upper end.
        better_frac: share of resamples in which it is better.
        rows: that both have predicted.
        resamples: of them.
    """

    task: str
    label: str
    against: str
    place: int
    difference: float
    low: float
    high: float
    better_frac: float
    rows: int
    resamples: int

    @property
    def verdict(self) -> str:
        """What the interval says."""
        if self.low <= 0.0 <= self.high:
            return "not told apart"
        return "better" if self.high < 0.0 else "worse"

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of a row: difference, interval, share, rows, verdict."""
        return (
            f"{self.difference:+.5f}",
            f"{self.low:+.5f} to {self.high:+.5f}",
            f"{100 * self.better_frac:.1f} %",
            f"{self.rows:,}",
            self.verdict,
        )

    def line(self) -> str:
        """The same for a terminal."""
        gap, interval, _, rows, verdict = self.cells
        return (
            f"{self.task}: {self.label} against {self.against}: NE {gap} ({interval}, 95 % of "
            f"{self.resamples:,} resamples of {rows} test rows): {verdict}"
        )

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "task": self.task,
            "recipe": self.label,
            "against": self.against,
            "ne_difference": self.difference,
            "low_95": self.low,
            "high_95": self.high,
            "first_better_frac": self.better_frac,
            "rows": self.rows,
            "resamples": self.resamples,
            "verdict": self.verdict,
        }


def beside_the_first(
    groups: Sequence[Group], tasks: Sequence[str]
) -> tuple[list[Beside], list[str]]:
    """Compare every recipe with the first one.

    Args:
        groups: of runs on one data set.
        tasks: their names.

    Returns:
        comparisons, and a sentence on each one that cannot be made.

    Cost: a second or two for each 10,000 test rows and task.
    """
    found: list[Beside] = []
    missing: list[str] = []
    for task in tasks if len(groups) > 1 else ():
        read = [_losses(group, task, missing) for group in groups]
        base = read[0]
        others = [(place, own) for place, own in enumerate(read) if place and own]
        if not base or not others:
            continue
        try:
            resamples = max(_FEWEST, min(RESAMPLES, _MOST_DRAWN // len(base[0]["row"])))
            told = paired_bootstraps([own for _, own in others], base, resamples=resamples)
        except DataError as fault:
            missing.append(f"{task}: {fault}")
            continue
        found += [
            Beside(
                task=task,
                label=groups[place].label,
                against=groups[0].label,
                place=place,
                difference=one["ne_difference"],
                low=one["low_95"],
                high=one["high_95"],
                better_frac=one["first_better_frac"],
                rows=one["rows"],
                resamples=one["resamples"],
            )
            for (place, _), one in zip(others, told, strict=True)
        ]
    return found, list(dict.fromkeys(missing))


def _losses(group: Group, task: str, missing: list[str]) -> list[Losses]:
    """Losses of all seeds, or none where one of them is not there."""
    try:
        return [task_losses(run.folder, task) for run in group.runs]
    except DataError as fault:
        missing.append(str(fault))
        return []

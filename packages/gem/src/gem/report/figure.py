"""A figure of a report, and what all figures share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gem.report.compare import Group
from gem.report.read import RunRecord
from gem.report.svg import NARROW, Plot, Size

NOT_RECORDED = "this run has not recorded it"


class Safe(str):
    """Text of this package's own, which a template takes as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with everything that is said of it.

    Attributes:
        title: what it shows.
        text: how it is read, in a sentence or two.
        drawings: SVG, one for each width; none where there is nothing to draw.
        legend: style and name of each series; empty where there is only one.
        headers: of the numbers below the figure.
        rows: of the numbers below the figure.
        wide: takes the whole width of the page.
        empty: why there is nothing to draw.
    """

    title: str
    text: str
    drawings: tuple[str, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    wide: bool = False
    empty: str = NOT_RECORDED


def draw(size: Size, make: Callable[[Size], Plot]) -> tuple[str, ...]:
    """Draw a figure twice: at the width that it takes on a wide page, and for a narrow one.

    Args:
        size: on a wide page.
        make: draws it.

    Returns:
        Both drawings.
    """
    return (make(size).svg(), make(NARROW).svg())


def thinned(items: Sequence, most: int) -> list:
    """Every n-th of many things, with the first and the last.

    Args:
        items: in order.
        most: that are kept.
    """
    if len(items) <= most:
        return list(items)
    step = (len(items) - 1) / (most - 1)
    return [items[round(i * step)] for i in range(most)]


def run_name(run: RunRecord, groups: Sequence[Group]) -> str:
    """Name a run among others.

    Args:
        run: one of theirs.
        groups: all that the report shows.
    """
    group = next(group for group in groups if run in group.runs)
    return f"{group.label}, seed {run.seed}" if len(groups) > 1 else f"seed {run.seed}"


def group_legend(groups: Sequence[Group]) -> tuple[tuple[str, str], ...]:
    """Styles and names of groups whose lines stand in one figure.

    Args:
        groups: all that the report shows.
    """
    if len(groups) == 1:
        seeds = ", ".join(run.seed for run in groups[0].runs)
        return (("c0", f"{groups[0].label}, a line for each seed ({seeds})"),)
    return tuple((f"c{g % 6}", group.label) for g, group in enumerate(groups))

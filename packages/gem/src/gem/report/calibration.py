"""The figure of calibration: predicted against observed rates, with intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from gem.report.compare import Group, wilson
from gem.report.figure import NOT_RECORDED, Figure, draw, group_legend
from gem.report.read import RunRecord, number, pick
from gem.report.svg import HALF, Axis, Plot, Size
from gem.report.words import count, percent

_MOST_ROWS = 90  # of the numbers below the figure


def reliability_figure(groups: Sequence[Group], period: str, task: str) -> Figure:
    """Predicted against observed rates of a task in a period.

    Args:
        groups: of runs.
        period: one of those of a summary.
        task: its name.
    """
    runs = [run for group in groups for run in group.runs]
    single = len(groups) == 1
    title = f"Calibration of {task}, {period} period"
    text = (
        "Examples in order of their prediction, cut into groups of about equal size. A dot above "
        "the dashed line: more positives came than predicted."
    )
    if single:
        text += (
            " The upright lines hold the true rate in 95 of 100 cases; the bars at the bottom "
            "show where predictions lie."
        )
    parts_of = [[_parts_of(run, period, task) for run in group.runs] for group in groups]
    if any(len(known) > 1 for known in parts_of):
        text += (
            " Each dot is the mean over the seeds."
            if all(_same_groups(known) for known in parts_of)
            else " Of seeds whose groups differ in number, the first one is shown."
        )
    pooled = [(g, _pooled(known)) for g, known in enumerate(parts_of)]
    series = [(g, parts) for g, parts in pooled if parts]
    if not series:
        reasons = (
            pick(r.diagnostics, "reliability", period, task, "all", "null_reason") for r in runs
        )
        why = next((str(reason) for reason in reasons if reason), NOT_RECORDED)
        return Figure(title, text, empty=why)

    def make(size: Size) -> Plot:
        parts = [part for _, found in series for part in found]
        rates = [rate for part in parts for rate in (part.predicted, part.observed)]
        if single:
            rates += [rate for part in parts for rate in part.interval]
        x = _within(Axis.around([part.predicted for part in parts], "mean prediction", "percent"))
        y = _within(Axis.around(rates, "observed rate", "percent"))
        alt = (
            f"Calibration of {task} in the {period} period: mean predictions from "
            f"{percent(min(part.predicted for part in parts))} to "
            f"{percent(max(part.predicted for part in parts))} against observed rates from "
            f"{percent(min(part.observed for part in parts))} to "
            f"{percent(max(part.observed for part in parts))}"
        )
        plot = Plot(size, x, y, alt)
        if single:
            _density(plot, series[0][1])
        plot.line_between((0.0, 0.0), (1.0, 1.0), "baseline")
        for g, found in series:
            style = f"c{g % 6}"
            if single:
                for part in found:
                    plot.whisker(part.predicted, *part.interval, style)
            else:
                plot.line([(part.predicted, part.observed) for part in found], f"{style} thin")
            plot.dots([((part.predicted, part.observed), part.text) for part in found], style)
        return plot

    rows = [
        (
            *(() if single else (groups[g].label,)),
            percent(part.predicted, 2),
            percent(part.observed, 2),
            f"{percent(part.interval[0], 2)} – {percent(part.interval[1], 2)}",
            count(part.examples),
        )
        for g, found in series
        for part in found
    ]
    headers = ("mean prediction", "observed rate", "95 % interval", "examples")
    return Figure(
        title,
        text,
        draw(HALF, make),
        () if single else group_legend(groups),
        headers if single else ("recipe", *headers),
        tuple(rows[:_MOST_ROWS]),
    )


def _within(axis: Axis) -> Axis:
    """The axis without what is no rate."""
    return Axis(max(0.0, axis.low), min(1.0, axis.high), axis.label, axis.kind)


@dataclass(frozen=True, slots=True)
class _Part:
    """A group of a reliability plot."""

    low: float
    high: float
    predicted: float
    examples: float
    positives: float

    @property
    def observed(self) -> float:
        return self.positives / self.examples

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.positives, self.examples)

    @property
    def text(self) -> str:
        return (
            f"predicted {percent(self.predicted, 2)}, observed {percent(self.observed, 2)} of "
            f"{count(self.examples)} examples"
        )


def _parts_of(run: RunRecord, period: str, task: str) -> list[_Part]:
    found = pick(run.diagnostics, "reliability", period, task, "all", "groups")
    parts = []
    for group in found if isinstance(found, list) else ():
        low, high, predicted, examples, positives = (
            number(pick(group, key))
            for key in ("low", "high", "predicted", "examples", "positives")
        )
        if None not in (low, high, predicted, positives) and examples:
            parts.append(_Part(low, high, predicted, examples, positives))  # type: ignore[arg-type]
    return parts


def _same_groups(runs: Sequence[Sequence[_Part]]) -> bool:
    return len({len(parts) for parts in runs if parts}) < 2


def _pooled(runs: Sequence[Sequence[_Part]]) -> Sequence[_Part]:
    """The mean of each group over runs; the first run's where they have not as many groups."""
    known = [parts for parts in runs if parts]
    if not known or not _same_groups(runs):
        return known[0] if known else ()
    return [
        _Part(
            min(part.low for part in same),
            max(part.high for part in same),
            fmean(part.predicted for part in same),
            fmean(part.examples for part in same),
            fmean(part.positives for part in same),
        )
        for same in zip(*known, strict=True)
    ]


def _density(plot: Plot, parts: Sequence[_Part]) -> None:
    """Small bars at the bottom: how many examples a unit of prediction."""
    ends = [*((a.high + b.low) / 2 for a, b in pairwise(parts))]
    edges = [parts[0].low, *ends, parts[-1].high]
    narrowest = 0.004 * (plot.x.high - plot.x.low)
    heights = [
        part.examples / max(right - left, narrowest)
        for part, left, right in zip(parts, edges, edges[1:], strict=False)
    ]
    top = 0.16 * (plot.y.high - plot.y.low) / max(heights)
    for left, right, height in zip(edges, edges[1:], heights, strict=False):
        plot.bar(left, max(right, left + narrowest), plot.y.low + top * height, "faint")

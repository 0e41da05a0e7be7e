"""The figure of label rates over the time of the data, observed and predicted."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gem.report.compare import Group, wilson
from gem.report.figure import Figure, draw, thinned
from gem.report.read import RunRecord, number, pick, table
from gem.report.svg import FULL, Axis, Plot, Size
from gem.report.words import count, moment, percent

_INTERVALS = 24
_SEEN = "examples trained on"


def label_rate_figure(groups: Sequence[Group], task: str) -> Figure:
    """Observed and predicted rate of a task over the time of the data.

    Args:
        groups: of runs, of which the first run of each is shown.
        task: its name.
    """
    first = groups[0].runs[0]
    timed = any(number(row.get("time_ms")) is not None for row in first.rows)
    intervals = _intervals(first, task, timed=timed)
    title = f"Rate of {task} over time"
    text = (
        "Share of positives, with the band that holds the true rate in 95 of 100 cases, and the "
        "mean of the predictions made before training on them. Tinted: the held-out periods, "
        "each as one mean."
    )
    if not intervals:
        return Figure(title, text, wide=True)
    predicted = [
        [
            (i.middle, i.predicted)
            for i in _intervals(group.runs[0], task, timed=timed)
            if i.predicted is not None
        ]
        for group in groups
    ]
    held = _held_out_periods(first, task, timed=timed)
    # A recipe has its colour of the other figures; what was observed is nobody's.
    observed = "c0" if len(groups) == 1 else "ink"
    styles = ["c1"] if len(groups) == 1 else [f"c{g % 6}" for g in range(len(groups))]
    xs = [intervals[0].start, intervals[-1].end, *(v for h in held for v in (h.start, h.end))]
    values = [v for i in intervals for v in i.band] + [y for line in predicted for _, y in line]
    values += [v for h in held for v in h.band]

    def make(size: Size) -> Plot:
        y = Axis.around(values, "rate", "percent", room=0.12)
        x = Axis(
            min(xs),
            max(max(xs), min(xs) + 1),
            _time_label(xs) if timed else _SEEN,
            "time" if timed else "number",
        )
        plot = Plot(
            size,
            x,
            Axis(max(0.0, y.low), min(1.0, y.high), "rate", "percent"),
            f"Rate of {task} over time: observed between "
            f"{percent(min(i.observed for i in intervals))} and "
            f"{percent(max(i.observed for i in intervals))} in training",
        )
        for h in held:
            plot.shade(h.start, h.end, h.name)
        lower = [(i.middle, i.band[0]) for i in intervals]
        plot.band(lower, [(i.middle, i.band[1]) for i in intervals], observed)
        plot.line([(i.middle, i.observed) for i in intervals], observed)
        for style, line in zip(styles, predicted, strict=True):
            plot.line(line, f"{style} dashed")
        for h in held:
            plot.whisker(h.middle, *h.band, observed)
            plot.dots([((h.middle, h.observed), f"{h.name}: {percent(h.observed, 2)}")], observed)
        for style, group in zip(styles, groups, strict=True):
            for h in _held_out_periods(group.runs[0], task, timed=timed):
                if h.predicted is not None:
                    words = f"{h.name}, predicted: {percent(h.predicted, 2)}"
                    plot.dots([((h.middle, h.predicted), words)], f"{style} hollow")
        return plot

    names = [(observed, "observed")]
    for style, group in zip(styles, groups, strict=True):
        tail = f", {group.label}" if len(groups) > 1 else ""
        names.append((f"{style} dashed", f"predicted{tail}"))
    rows = tuple(
        (
            i.name or (moment(i.middle) if timed else count(i.middle)),
            percent(i.observed, 2),
            percent(i.predicted, 2),
            count(i.examples),
        )
        for i in (*intervals, *held)
    )
    headers = ("middle of the stretch", "observed", "predicted", "known labels")
    return Figure(title, text, draw(FULL, make), tuple(names), headers, rows, wide=True)


@dataclass(frozen=True, slots=True)
class _Interval:
    """A stretch of examples with its rate."""

    start: float
    end: float
    examples: float
    positives: float
    predicted: float | None
    name: str = ""

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2

    @property
    def observed(self) -> float:
        return self.positives / self.examples

    @property
    def band(self) -> tuple[float, float]:
        return wilson(self.positives, self.examples)


def _intervals(run: RunRecord, task: str, *, timed: bool) -> list[_Interval]:
    """What lies between rows of the log, as differences of the sums since the beginning."""
    key = "time_ms" if timed else "examples"
    start = number(pick(run.diagnostics, "data", "splits", "train", "first_ms")) if timed else 0.0
    marks = [(start, 0.0, 0.0, 0.0)] if start is not None else []
    for row in run.rows:
        found = table(pick(row, "lifetime", task))
        place = number(row.get(key))
        known, positives = number(found.get("examples")), number(found.get("positives"))
        ratio = number(found.get("calibration"))
        if place is None or known is None or positives is None:
            continue
        predictions = ratio * positives if ratio is not None and positives else None
        if not marks or known > marks[-1][1]:
            marks.append((place, known, positives, predictions))  # type: ignore[arg-type]
    found_intervals = []
    kept = thinned(marks, _INTERVALS + 1)
    # The last row of a log comes early: what it adds is too little to stand by itself.
    if len(kept) > 2 and kept[-1][1] - kept[-2][1] < 0.5 * (kept[-2][1] - kept[-3][1]):
        del kept[-2]
    for before, after in pairwise(kept):
        examples = after[1] - before[1]
        predicted = None
        if before[3] is not None and after[3] is not None:
            predicted = (after[3] - before[3]) / examples
        positives = min(max(after[2] - before[2], 0.0), examples)
        found_intervals.append(_Interval(before[0], after[0], examples, positives, predicted))
    return found_intervals


def _held_out_periods(run: RunRecord, task: str, *, timed: bool) -> list[_Interval]:
    found = [_held_out(run, period, task) for period in ("valid", "test") if timed]
    return [interval for interval in found if interval is not None]


def _held_out(run: RunRecord, period: str, task: str) -> _Interval | None:
    found = table(pick(run.summary, period, task))
    span = table(pick(run.diagnostics, "data", "splits", period))
    start, end = number(span.get("first_ms")), number(span.get("last_ms"))
    examples, positives = number(found.get("examples")), number(found.get("positives"))
    if start is None or end is None or not examples or positives is None:
        return None
    ratio = number(found.get("calibration"))
    predicted = None if ratio is None else ratio * positives / examples
    return _Interval(start, end, examples, min(positives, examples), predicted, period)


def _time_label(xs: Sequence[float]) -> str:
    years = sorted(
        {moment(x).split(" ")[2] for x in (min(xs), max(xs)) if moment(x).count(" ") > 2}
    )
    return "time of the example, UTC" + (f", {' – '.join(years)}" if years else "")

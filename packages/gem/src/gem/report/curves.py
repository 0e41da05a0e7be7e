"""Figures of a run's progress: loss and normalised entropy over the examples trained on."""

from collections.abc import Sequence
from statistics import fmean

from gem.report.compare import Group
from gem.report.figure import Figure, draw, group_legend, run_name, thinned
from gem.report.read import RunRecord, number, pick
from gem.report.svg import FULL, HALF, Axis, Plot, Point, Size
from gem.report.words import metric, short

_MOST_POINTS = 240  # of a line
_SMOOTHED = 5  # rows of the log
_MOST_ROWS = 20  # of the numbers below a figure
# Share of a run whose first values do not stretch the axis: a model that has seen nothing yet.
_BEGINNING = 0.1
_SEEN = "examples trained on"


def _curve(run: RunRecord, *path: str) -> list[Point]:
    """A number of every row of the log, against the examples seen by then."""
    points = []
    for row in run.rows:
        x, y = number(row.get("examples")), number(pick(row, *path))
        if x is not None and y is not None:
            points.append((x, y))
    return points


def _smoothed(points: Sequence[Point]) -> list[Point]:
    parts = [points[max(0, i - _SMOOTHED + 1) : i + 1] for i in range(len(points))]
    return [(part[-1][0], fmean(y for _, y in part)) for part in parts]


def _settled(curves: Sequence[Sequence[Point]]) -> list[float]:
    """The values that the vertical axis has to hold."""
    found = []
    for points in curves:
        if points:
            start = points[0][0] + _BEGINNING * (points[-1][0] - points[0][0])
            found += [y for x, y in points if x >= start]
    return found


def _x_axis(curves: Sequence[Sequence[Point]], label: str) -> Axis:
    values = [x for points in curves for x, _ in points]
    axis = Axis.around([0.0, *values], label, room=0.0)
    return Axis(0.0, 1.01 * axis.high, label)


def loss_figure(groups: Sequence[Group], *, wide: bool = False) -> Figure:
    """The training loss over the run.

    Args:
        groups: of runs.
        wide: take the whole width of the page.
    """
    several = len([run for group in groups for run in group.runs]) > 1
    series = [
        (f"c{g % 6}", run, _curve(run, "loss"))
        for g, group in enumerate(groups)
        for run in group.runs
    ]
    text = (
        "What training makes small: the mean log loss of each stretch between two rows of the "
        "log, weighted and summed over tasks. Lower is better."
    )
    curves = [points for _, _, points in series]
    if not any(curves):
        return Figure("Training loss", text, wide=wide)
    y = Axis.around(_settled(curves), "loss")
    if any(value > y.high for points in curves for _, value in points):
        text += " What lies above the plot comes from the first tenth."

    def make(size: Size) -> Plot:
        plot = Plot(size, _x_axis(curves, _SEEN), y, f"Training loss {_fall(curves[0])}")
        for style, _, points in series:
            plot.line(thinned(points, _MOST_POINTS), f"{style} {'thin' if several else 'pale'}")
        if not several:
            plot.line(thinned(_smoothed(curves[0]), _MOST_POINTS), "c0")
        return plot

    one_run = (("c0 pale", "each row of the log"), ("c0", f"mean of the newest {_SMOOTHED} rows"))
    return Figure(
        "Training loss",
        text,
        draw(FULL if wide else HALF, make),
        group_legend(groups) if several else one_run,
        (_SEEN, *(run_name(run, groups) for _, run, _ in series)),
        _joined(curves),
        wide,
    )


def ne_figure(groups: Sequence[Group], task: str) -> Figure:
    """Normalised entropy of a task over the run: whole and newest part.

    Args:
        groups: of runs.
        task: its name.
    """
    runs = [(g, run) for g, group in enumerate(groups) for run in group.runs]
    single = len(runs) == 1
    lifetime = [_curve(run, "lifetime", task, "ne") for _, run in runs]
    window = [_curve(run, "window", task, "ne") for _, run in runs] if single else []
    text = (
        "Log loss over the log loss of always predicting the mean rate (NE), on examples that "
        "were scored before they were trained on. Below the dashed line at 1 the model beats "
        "the mean rate. "
    ) + (
        "Whole run: everything so far; newest part: the last steps only."
        if single
        else "Of everything so far."
    )
    title = f"Normalised entropy of {task}"
    if not any(lifetime):
        return Figure(title, text)
    curves = [*lifetime, *window]

    def make(size: Size) -> Plot:
        y = Axis.around([1.0, *_settled(curves)], "normalised entropy (NE)")
        x = _x_axis(curves, _SEEN)
        plot = Plot(size, x, y, f"Normalised entropy of {task} {_fall(lifetime[0])}")
        plot.line_between((0.0, 1.0), (x.high, 1.0), "baseline")
        plot.note(x.high, 1.0, "mean rate", anchor="end")
        for points in window:
            plot.line(thinned(points, _MOST_POINTS), "c1 thin")
        for (g, _), points in zip(runs, lifetime, strict=True):
            plot.line(thinned(points, _MOST_POINTS), f"c{g % 6} {'' if single else 'thin'}")
        return plot

    legend = (("c0", "whole run"), ("c1", "newest part")) if single else group_legend(groups)
    names = ("whole run", "newest part") if single else [run_name(r, groups) for _, r in runs]
    return Figure(title, text, draw(HALF, make), legend, (_SEEN, *names), _joined(curves))


def _fall(points: Sequence[Point]) -> str:
    """From where to where a curve went, in words."""
    if not points:
        return "has no values"
    return f"goes from {metric(points[0][1])} to {metric(points[-1][1])}"


def _joined(curves: Sequence[Sequence[Point]]) -> tuple[tuple[str, ...], ...]:
    """Rows of a table over curves that share their horizontal places, or nearly so."""
    places = thinned(sorted({x for points in curves for x, _ in points}), _MOST_ROWS)
    known = [dict(points) for points in curves]
    return tuple((short(x), *(metric(points.get(x)) for points in known)) for x in places)

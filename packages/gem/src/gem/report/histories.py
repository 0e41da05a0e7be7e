"""The figure of history lengths: how many events the model was given before an example."""

from collections.abc import Sequence

from gem.report.figure import Figure, draw
from gem.report.read import RunRecord, number, pick
from gem.report.svg import FULL, HALF, Axis, Plot, Size
from gem.report.words import count, percent

_BARS = 20


def history_figure(run: RunRecord, stream: str, *, wide: bool = False) -> Figure:
    """How long the histories of a stream were.

    Args:
        run: of which the counts are.
        stream: its name.
        wide: take the whole width of the page.
    """
    pairs = [
        (int(length), n)
        for pair in pick(run.diagnostics, "histories", stream) or ()
        if (length := number(pick(pair, 0))) is not None
        and (n := number(pick(pair, 1))) is not None
    ]
    total = sum(n for _, n in pairs)
    most = number(pick(run.diagnostics, "data", "streams", stream, "max_events"))
    title = f"History length: {stream}"
    if not total:
        return Figure(title, "Events before an example that the model was given.", wide=wide)
    longest = int(most if most is not None else max(length for length, _ in pairs))
    events = sum(length * n for length, n in pairs)
    none = sum(n for length, n in pairs if length == 0) / total
    full = sum(n for length, n in pairs if length >= longest) / total
    text = (
        f"Events before an example that the model was given: {events / total:.1f} on average, "
        f"none for {percent(none)} of the examples, and the most that are read "
        f"({count(longest)}) for {percent(full)}."
    )
    bars = _bars(pairs, longest)

    def make(size: Size) -> Plot:
        step = max(1, -(-len(bars) // (size.x_ticks + 2)))
        # The last bar has a name of its own, so the one before it stays clear of it.
        marked = [i for i in range(0, len(bars), step) if i <= len(bars) - 1 - step]
        ticks = [(i + 0.5, bars[i][0]) for i in (*marked, len(bars) - 1)]
        top = max(n for _, n in bars) / total
        plot = Plot(
            size,
            Axis(0.0, float(len(bars)), "events"),
            Axis(0.0, top * 1.08, "share of the examples", "percent"),
            f"Distribution of the history length of {stream}: {events / total:.1f} events on "
            f"average",
            x_ticks=ticks,
        )
        for i, (name, n) in enumerate(bars):
            style = "c1" if i == len(bars) - 1 and longest else "c0"
            plot.bar(i, i + 1, n / total, style, f"{name} events: {percent(n / total, 2)}")
        return plot

    rows = tuple((name, count(n), percent(n / total, 2)) for name, n in bars)
    legend = (("c0", "whole history"), ("c1", "at the limit: older events are not read"))
    headers = ("events", "examples", "share")
    return Figure(
        title, text, draw(FULL if wide else HALF, make), legend if full else (), headers, rows, wide
    )


def _bars(pairs: Sequence[tuple[int, float]], longest: int) -> list[tuple[str, float]]:
    """Examples by ranges of lengths: 0, equal ranges, and the longest by itself."""
    counts = dict(pairs)
    bars = [("0", counts.get(0, 0.0))]
    step = max(1, -(-(longest - 1) // _BARS))
    for start in range(1, longest, step):
        end = min(start + step, longest)
        name = str(start) if end == start + 1 else f"{start}–{end - 1}"
        bars.append((name, sum(counts.get(length, 0.0) for length in range(start, end))))
    if longest > 0:
        bars.append((f"{longest}", sum(n for length, n in pairs if length >= longest)))
    return bars

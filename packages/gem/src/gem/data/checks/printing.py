"""A `DatasetReport` for a person: tables of what is there, then the findings."""

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gem.data.checks.report import DatasetReport, DayReport, Finding, HistoryReport, PartReport

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_MOST_PERIODS = 16
_BLOCKS = " ▏▎▍▌▋▊▉█"
_BAR_CELLS = 12
_INDENT = (0, 0, 0, 4)


def print_report(console: Console, report: DatasetReport) -> None:
    """Print what a data set holds and what was found.

    Args:
        console: where to.
        report: of the data set.
    """
    title = Text(f"{report.name} in {report.folder}", style="bold")
    sections: list[RenderableType] = [title, _parts(report.parts)]
    if report.labels:
        sections.append(_labels(report))
    if report.days:
        sections.append(_days(report.days))
    if report.histories:
        sections.append(_histories(report.histories))
    for section in sections:
        console.print(section)
        console.print()
    for finding in report.findings:
        console.print(_finding(finding))
    console.print(_verdict(report))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.title_style = "bold"
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    return table


def _parts(parts: Sequence[PartReport]) -> RenderableType:
    table = _table("Parts", "part", "rows", "files", "row groups")
    table.add_column("missing, filled with", overflow="fold")
    for part in parts:
        missing = [
            f"{name} {count:,} ({_fill(part.fills.get(name))})"
            for name, count in part.missing.items()
        ]
        table.add_row(
            Text(part.part),
            f"{part.rows:,}",
            f"{part.files:,}",
            f"{part.row_groups:,}",
            Text(", ".join(missing)),
        )
    return table


def _fill(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"


def _labels(report: DatasetReport) -> RenderableType:
    table = _table("Labels", "split", "label", "examples", "known", "rate")
    table.columns[1].justify = "left"
    for one in report.labels:
        rate = f"{one.positives / one.known:.4f}" if one.known else "–"
        table.add_row(Text(one.split), Text(one.label), f"{one.examples:,}", f"{one.known:,}", rate)
    return table


def _days(days: Sequence[DayReport]) -> RenderableType:
    """One line a day, or a period of days where there are many."""
    width = -(-len(days) // _MOST_PERIODS)
    periods = [days[start : start + width] for start in range(0, len(days), width)]
    labels = list(days[0].rates)
    unit = "day" if width == 1 else f"{width} days with examples"
    table = _table(f"Label rates by {unit}, UTC", "from", "examples")
    for label in labels:
        table.add_column(Text(label), justify="right", overflow="fold")
        table.add_column("", justify="left", no_wrap=True)
    rates = {label: [_rate(period, label) for period in periods] for label in labels}
    tops = {label: max((r for r in rates[label] if r is not None), default=0) for label in labels}
    for place, period in enumerate(periods):
        cells = [period[0].day, f"{sum(day.examples for day in period):,}"]
        for label in labels:
            rate = rates[label][place]
            cells += ["–", ""] if rate is None else [f"{rate:.4f}", _bar(rate, tops[label])]
        table.add_row(*cells)
    return table


def _rate(days: Sequence[DayReport], label: str) -> float | None:
    known = sum(day.known[label] for day in days)
    if not known:
        return None
    return sum((day.rates[label] or 0.0) * day.known[label] for day in days) / known


def _bar(value: float, top: float) -> str:
    eighths = round(8 * _BAR_CELLS * value / top) if top else 0
    return _BLOCKS[8] * (eighths // 8) + _BLOCKS[eighths % 8].strip()


def _histories(histories: Sequence[HistoryReport]) -> RenderableType:
    columns = ("stream", "events", "never seen", "median", "95 %", "longest", "no history")
    table = _table("Events before an example, without a limit", *columns)
    for one in histories:
        table.add_row(
            Text(one.stream),
            f"{one.events:,}",
            f"{one.never_seen:,}",
            f"{one.median:,.0f}",
            f"{one.p95:,.0f}",
            f"{one.longest:,}",
            f"{one.empty_frac:.1%}",
        )
    return table


def _finding(finding: Finding) -> RenderableType:
    head = Text()
    head.append(f"{finding.grade}: ", style=_STYLES[finding.grade])
    # A fault of reading names file and column itself.
    if finding.kind != "unreadable":
        head.append(f"{finding.where}: ")
    head.append(finding.found)
    lines: list[RenderableType] = [head]
    if finding.how:
        lines.append(Padding(Text(f"how sure: {finding.how}", style="dim"), _INDENT, expand=False))
    if finding.fix:
        lines.append(Padding(Text(f"to do: {finding.fix}"), _INDENT, expand=False))
    return Group(*lines)


def _verdict(report: DatasetReport) -> Text:
    counts = [
        f"{number} {grade}{'' if number == 1 else 's'}"
        for grade in ("error", "warning", "note")
        if (number := report.count(grade))
    ]
    verdict = "is not sound" if report.problems else "is sound"
    style = "bold red" if report.problems else "bold green"
    return Text(f"{report.name} {verdict}" + (f": {', '.join(counts)}" if counts else ""), style)

"""What a person sees of a run: its stages, a progress line, and a table at the end.

On a terminal the line moves; elsewhere a plain line comes every few seconds. All of it fits into
80 columns. Names and paths are printed as they are: none of them is rich's markup.
"""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

PLAIN_LINE_EVERY_S = 5.0
# Steps from which on the time left is told: the first ones are the slowest.
_STEPS_TO_JUDGE = 3
PERIODS = ("progressive", "valid", "test")
# Seconds since the start stand in it, and a bar; all text is to the right of it.
_GUTTER = 10


class Display:
    """Prints a run.

    Args:
        console: where to print; None prints nothing.
    """

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self._began = time.monotonic()

    def stage(self, text: str) -> None:
        """Say what happens next.

        Args:
            text: one line.
        """
        if self.console is None:
            return
        elapsed = Text(f"{time.monotonic() - self._began:6.1f} s", style="dim")
        if not self.console.is_terminal:  # a file has no edge: one line stays one line
            self.console.print(elapsed, f" {text}", highlight=False, markup=False, soft_wrap=True)
            return
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_column(width=_GUTTER - 2)
        line.add_column(overflow="fold")
        line.add_row(elapsed, Text(text))
        self.console.print(line)

    def bar(self, title: str, steps: int, done: int = 0) -> "StepBar":
        """A progress line over steps, to be used in a ``with`` block.

        Args:
            title: what the steps are.
            steps: how many there are.
            done: how many of them are done already.
        """
        return StepBar(self.console, title, steps, done)

    def results(self, summary: Mapping[str, Any], *, domains: str | None = None) -> None:
        """Print the table of a summary.

        Args:
            summary: as in ``summary.json``.
            domains: where the metrics by domain can be read; they are left out of the table then.
        """
        if self.console is None:
            return
        self.console.print(results_table(summary, domains=domains is None))
        if domains is not None and _has_domains(summary):
            self.console.print(
                f"by domain: {domains}", highlight=False, markup=False, soft_wrap=True
            )

    def costs(self, summary: Mapping[str, Any], time_frac: Mapping[str, float | None]) -> None:
        """Print speed, memory and where the time of training went.

        Args:
            summary: as in ``summary.json``.
            time_frac: section -> share of the time.
        """
        if self.console is None or not any(time_frac.values()):
            return  # no step was taken: there is no speed to speak of
        shares = ", ".join(f"{name} {100 * (s or 0.0):.1f} %" for name, s in time_frac.items())
        self.console.print(
            f"{summary['throughput']['examples_per_s']:,.0f} examples/s, "
            f"{summary['throughput']['tokens_per_s']:,.0f} events/s, "
            f"peak memory {summary['memory']['peak_bytes'] / 2**30:.2f} GiB\n"
            f"time: {shares}",
            highlight=False,
            markup=False,
        )


class StepBar:
    """A progress line. Made by `Display.bar`."""

    def __init__(self, console: Console | None, title: str, steps: int, done: int) -> None:
        self._console, self._title, self._steps = console, title, steps
        self._first = self._done = done
        self._facts = self._said = ""
        self._began = self._printed = time.monotonic()
        self._progress = None
        if console is not None and console.is_terminal:
            self._progress = Progress(
                BarColumn(bar_width=_GUTTER - 2),
                TextColumn("{task.description}", markup=False, table_column=_whole()),
                TextColumn(" left", style="dim", table_column=_whole()),
                TimeRemainingColumn(compact=True, table_column=_whole()),
                console=console,
                transient=False,
            )
            self._task = self._progress.add_task(self._line(), total=steps, completed=done)

    def update(self, done: int, **facts: float | None) -> None:
        """Show how far it is.

        Args:
            done: steps done.
            facts: numbers to show beside it, in the order given; None shows as n/a.
        """
        self._done = done
        if facts:
            self._facts = "".join(f"  {_fact(name, value)}" for name, value in facts.items())
        if self._progress is not None:
            self._progress.update(self._task, completed=done, description=self._line())
        elif time.monotonic() - self._printed >= PLAIN_LINE_EVERY_S:
            self._plain()

    def _line(self) -> str:
        return f"{self._title} {self._done}/{self._steps}{self._facts}"

    def _plain(self) -> None:
        if self._console is None:
            return
        self._printed, self._said = time.monotonic(), self._line()
        elapsed_s = self._printed - self._began
        gone = self._done - self._first
        to_come = self._steps - self._done
        told = gone >= _STEPS_TO_JUDGE and to_come > 0
        left = f"  left {elapsed_s / gone * to_come:.0f} s" if told else ""
        self._console.print(
            f"{'':{_GUTTER}}{self._line()}{left}", highlight=False, markup=False, soft_wrap=True
        )

    def __enter__(self) -> "StepBar":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        elif self._said != self._line():
            self._plain()


def results_table(summary: Mapping[str, Any], *, domains: bool = True) -> Table:
    """Metrics of every period, task and domain as a table.

    Args:
        summary: as in ``summary.json``; periods that are absent are left out.
        domains: a row for each domain as well, below that of its task.
    """
    title = f"{summary['recipe']} on {summary['dataset']}, seed {summary['seed']}"
    table = Table(title=Text(title, style="table.title"), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("period", no_wrap=True)
    table.add_column("task", overflow="fold")
    for column in ("labels", "NE", "AUC", "GAUC", "loss", "calib."):
        table.add_column(column, justify="right", no_wrap=True)
    for period in PERIODS:
        named = False
        for task, found in summary.get(period, {}).items():
            several = found["domains"] if domains and len(found["domains"]) > 1 else {}
            rows = {task: found, **{f"  {name}": values for name, values in several.items()}}
            for label, values in rows.items():
                keys = ("ne", "auc", "gauc", "logloss", "calibration")
                cells = [_metric(values[key]) for key in keys]
                first = "" if named else period
                table.add_row(first, Text(label), f"{values['examples']:,}", *cells)
                named = True
    return table


def _whole() -> Column:
    return Column(no_wrap=True)


def _has_domains(summary: Mapping[str, Any]) -> bool:
    return any(
        len(found["domains"]) > 1
        for period in PERIODS
        for found in summary.get(period, {}).values()
    )


def _metric(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def _fact(name: str, value: float | None) -> str:
    """A number with its name before it, or behind it with its unit."""
    if name == "examples_per_s":
        return f"{'n/a' if value is None else f'{value:,.0f}'} ex/s"
    return f"{name} {_number(value)}"


def _number(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4f}"

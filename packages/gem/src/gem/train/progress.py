"""What a person sees of a run: its stages, a progress line, and a table at the end.

On a terminal the line moves; elsewhere a plain line comes every few seconds.
"""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

PLAIN_LINE_EVERY_S = 5.0


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
        if self.console is not None:
            elapsed_s = time.monotonic() - self._began
            self.console.print(f"[dim]{elapsed_s:6.1f} s[/dim]  {text}", highlight=False)

    def bar(self, title: str, steps: int, done: int = 0) -> "StepBar":
        """A progress line over steps, to be used in a ``with`` block.

        Args:
            title: what the steps are.
            steps: how many there are.
            done: how many of them are done already.
        """
        return StepBar(self.console, title, steps, done)

    def results(self, summary: Mapping[str, Any]) -> None:
        """Print the table of a summary.

        Args:
            summary: as in ``summary.json``.
        """
        if self.console is not None:
            self.console.print(results_table(summary))

    def costs(self, summary: Mapping[str, Any], time_frac: Mapping[str, float | None]) -> None:
        """Print speed, memory and where the time of training went.

        Args:
            summary: as in ``summary.json``.
            time_frac: section -> share of the time.
        """
        if self.console is None or summary["throughput"]["examples_per_s"] is None:
            return
        shares = ", ".join(f"{name} {100 * (s or 0.0):.1f} %" for name, s in time_frac.items())
        self.console.print(
            f"{summary['throughput']['examples_per_s']:,.0f} examples/s, "
            f"{summary['throughput']['tokens_per_s']:,.0f} events/s, "
            f"peak memory {summary['memory']['peak_bytes'] / 2**30:.2f} GiB\n"
            f"time of training: {shares}",
            highlight=False,
        )


class StepBar:
    """A progress line. Made by `Display.bar`."""

    def __init__(self, console: Console | None, title: str, steps: int, done: int) -> None:
        self._console, self._title, self._steps = console, title, steps
        self._first = self._done = done
        self._facts = ""
        self._began = self._printed = time.monotonic()
        self._progress = None
        if console is not None and console.is_terminal:
            self._progress = Progress(
                TextColumn("          {task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TextColumn("[dim]elapsed"),
                TimeElapsedColumn(),
                TextColumn("[dim]left"),
                TimeRemainingColumn(),
                console=console,
                transient=False,
            )
            self._task = self._progress.add_task(title, total=steps, completed=done, facts="")

    def update(self, done: int, **facts: float | None) -> None:
        """Show how far it is.

        Args:
            done: steps done.
            facts: numbers to show beside it, in the order given; None shows as n/a.
        """
        self._done = done
        if facts:
            self._facts = "  ".join(
                f"{name.replace('_per_', '/')} {_number(v)}" for name, v in facts.items()
            )
        if self._progress is not None:
            self._progress.update(self._task, completed=done, facts=self._facts)
        elif time.monotonic() - self._printed >= PLAIN_LINE_EVERY_S:
            self._plain()

    def _plain(self) -> None:
        if self._console is None:
            return
        self._printed = time.monotonic()
        elapsed_s = self._printed - self._began
        gone = self._done - self._first
        left = "" if not gone else f"  left {elapsed_s / gone * (self._steps - self._done):.0f} s"
        facts = f"  {self._facts}" if self._facts else ""
        self._console.print(
            f"          {self._title} {self._done}/{self._steps}{facts}{left}", highlight=False
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
        else:
            self._plain()


def results_table(summary: Mapping[str, Any]) -> Table:
    """Metrics of every period, task and domain as a table.

    Args:
        summary: as in ``summary.json``; periods that are absent are left out.
    """
    table = Table(
        title=f"{summary['recipe']} on {summary['dataset']}, seed {summary['seed']}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("period", "task", "domain"):
        table.add_column(column)
    for column in ("examples", "NE", "AUC", "GAUC", "log loss", "calib."):
        table.add_column(column, justify="right")
    for period in ("progressive", "valid", "test"):
        for task, found in summary.get(period, {}).items():
            domains = found["domains"] if len(found["domains"]) > 1 else {}
            for domain, values in {"all": found, **domains}.items():
                keys = ("ne", "auc", "gauc", "logloss", "calibration")
                cells = [_metric(values[key]) for key in keys]
                table.add_row(period, task, domain, f"{values['examples']:,}", *cells)
    return table


def _metric(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def _number(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4f}"

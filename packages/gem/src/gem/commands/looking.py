"""Commands that look: at runs, at the installation."""

from pathlib import Path
from typing import Annotated

import typer

from gem.commands.arguments import JsonFlag
from gem.commands.printing import console_of, print_json, say_line


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Folders of runs on one data set."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Page to write; default report.html, in RUN if there is only one."
        ),
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Write a page that shows a run, or compares several; gem train writes that of its run.

    Runs that differ in their seed alone become mean and spread, other recipes stand side by side.
    Where the runs have their predictions, each recipe is compared with the first one on the same
    test rows, by a paired bootstrap of NE.
    """
    from gem.report.page import compared, write_report

    beside = compared(runs)
    page = write_report(runs, out, beside=beside)
    if as_json:
        found = {"report": str(page), "runs": [str(run) for run in runs]}
        found |= {"compared": [each.plain() for each in beside[0]]}
        print_json(found | {"not_compared": list(beside[1])})
    else:
        for each in beside[0]:
            say_line(console_of(as_json=False), each.line())
        for reason in beside[1]:
            say_line(console_of(as_json=False), f"not compared: {reason}")
        say_line(console_of(as_json=False), f"report: {page}")


def doctor(
    runs: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the runs, whose disk is looked at.")
    ] = Path("runs"),
    *,
    as_json: JsonFlag = False,
) -> None:
    """Show what is installed, which kernel and number format runs where, and what is missing."""
    from dataclasses import asdict

    from gem.doctor.examine import examine
    from gem.doctor.page import page

    found = examine(runs)
    if as_json:
        print_json(asdict(found))
    else:
        console_of(as_json=False).print(page(found))
    if found.problems:
        raise typer.Exit(1)

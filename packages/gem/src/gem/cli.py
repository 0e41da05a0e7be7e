"""The command `gem`: train, evaluate, prepare data, look at the installation.

Each command imports what it needs when it runs, so that `gem --help` answers at once. What ends a
command early is told by `gem.faults`.
"""

import os
import sys
from typing import Annotated

import typer

from gem.command_help import Command, Commands
from gem.commands.benching import bench_ablation_of, bench_step_of
from gem.commands.datasets import data_check, data_prepare, data_slice
from gem.commands.looking import doctor, report
from gem.commands.planning import memory, plan
from gem.commands.serving import export, export_items_of, nearest, score, serve
from gem.commands.studies import scaling, stages
from gem.commands.training import evaluate_run, export_weights_of, predict, train
from gem.faults import run_app

app = typer.Typer(
    name="gem",
    cls=Commands,
    help="Train ads foundation models over jagged event sequences and non-sequence features.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(
    cls=Commands,
    help="Make a data set, or check one.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
bench_app = typer.Typer(
    cls=Commands,
    help="Measure how fast a recipe trains.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")


def _version(show: bool) -> None:  # noqa: FBT001 - typer calls it with the flag
    if show:
        from gem import __version__

        typer.echo(f"gem {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    context: typer.Context,
    *,
    debug: Annotated[
        bool, typer.Option("--debug", metavar="", help="Show the traceback above an error.")
    ] = False,
    version: Annotated[  # acted on by the callback
        bool,
        typer.Option(
            "--version", metavar="", callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    context.obj.debug, context.obj.command = debug, f"gem {context.invoked_subcommand}"


app.command(cls=Command)(train)
app.command("eval", cls=Command)(evaluate_run)
app.command(cls=Command)(predict)
app.command("export-weights", cls=Command)(export_weights_of)
app.command(cls=Command)(export)
app.command(cls=Command)(score)
app.command(cls=Command)(serve)
app.command("export-items", cls=Command)(export_items_of)
app.command(cls=Command)(nearest)
app.command(cls=Command)(report)
data_app.command("prepare", cls=Command)(data_prepare)
data_app.command("slice", cls=Command)(data_slice)
data_app.command("check", cls=Command)(data_check)
app.command(cls=Command)(plan)
bench_app.command("step", cls=Command)(bench_step_of)
bench_app.command("ablation", cls=Command)(bench_ablation_of)
app.command(cls=Command)(memory)
app.command(cls=Command)(scaling)
app.command(cls=Command)(stages)
app.command(cls=Command)(doctor)


def main() -> None:
    """Run the command line of this process. Ends it."""
    try:
        run_app(app)
    except SystemExit as ending:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and isinstance(ending.code, int | None):
            # One of several ranks: everything is written and closed by now, and the usual way out
            # can hang or abort in the destructors of the process group's threads.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ending.code or 0)
        raise

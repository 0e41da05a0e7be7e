"""The command `gem`: train, evaluate, prepare data, look at the installation.

Each command imports what it needs when it runs, so that `gem --help` answers at once. A user's
error is one line and exit code 2; anything else is a bug and keeps its traceback.
"""

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from gem_opkit.errors import GemError

if TYPE_CHECKING:
    from gem.data.check import DatasetReport

app = typer.Typer(
    name="gem",
    help="Train ads foundation models over jagged event sequences and non-sequence features.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(
    help="Make a data set, or check one.", no_args_is_help=True, rich_markup_mode="rich"
)
app.add_typer(data_app, name="data")

_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace one key of the recipe, as in train.dense.lr=1e-3.",
    ),
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, the rest on stderr.")
]


def _console(*, as_json: bool) -> Any:
    from rich.console import Console

    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 120  # a file or a pipe: no reason to wrap at 80
    return console


def _print_json(content: dict[str, Any]) -> None:
    if os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps(content, indent=2))


def _version(show: bool) -> None:  # noqa: FBT001 - typer calls it with the flag
    if show:
        from gem import __version__

        typer.echo(f"gem {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    *,
    version: Annotated[  # acted on by the callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="Name of a shipped recipe, or a TOML file.")],
    settings: _Set = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; default runs/<recipe>-<seed>.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Replace the recipe's seed.")] = None,
    *,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Train a model in one pass over time-ordered data, then evaluate it.

    Missing data is prepared first, under runs/data. Start it with `torchrun --nproc-per-node N
    -m gem train ...` to train on several ranks.
    """
    from gem.config import load_recipe

    config = load_recipe(recipe, settings or (), seed=seed)
    folder = out if out is not None else Path("runs") / f"{config.name}-{config.seed}"

    from gem.train.interrupt import Interrupted
    from gem.train.loop import train as run_training
    from gem.train.progress import Display

    console = _console(as_json=as_json)
    try:
        summary = run_training(config, folder, resume=resume, display=Display(console))
    except Interrupted as stop:
        _end_early(f"stopped after step {stop.step}; the checkpoint is written", stop.signal_number)
    except KeyboardInterrupt:
        _end_early("interrupted", signal.SIGINT)
    if as_json:
        _print_json(summary)


def _end_early(what: str, signal_number: int) -> NoReturn:
    words = [w for w in sys.argv[1:] if w != "--resume"]
    command = shlex.join(["python", "-m", "gem", *words, "--resume"])
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"{what}. Continue with:\n\n    {command}\n", err=True)
    raise typer.Exit(128 + signal_number)


@app.command(name="eval")
def evaluate_run(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    *,
    predictions: Annotated[
        bool, typer.Option("--predictions", help="Also write predictions.parquet into it.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Evaluate the newest checkpoint of a run on the valid and test rows."""
    from gem.train.held_out import evaluate_folder
    from gem.train.progress import Display

    display = Display(_console(as_json=as_json))
    found = evaluate_folder(run, display=display, keep_predictions=predictions)
    if as_json:
        _print_json(found)


@data_app.command(name="prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(help="movielens-100k or synthetic.")],
    out: Annotated[Path, typer.Option(help="Folder of the data set.")],
    source: Annotated[
        Path | None, typer.Option(help="Folder with the raw files, where they are not fetched.")
    ] = None,
    *,
    as_json: _Json = False,
) -> None:
    """Make a data set: a folder of Parquet files and dataset.toml."""
    from gem.data.prepare import notice, prepare

    console = _console(as_json=as_json)
    spec = prepare(name, out, source=source)
    console.print(notice(spec), highlight=False, markup=False)
    console.print(f"{spec.examples.rows:,} examples in {out}", highlight=False)
    if as_json:
        _print_json({"name": spec.name, "folder": str(out), "examples": spec.examples.rows})


@data_app.command(name="check")
def data_check(
    folder: Annotated[Path, typer.Argument(help="Folder of a data set.")],
    *,
    as_json: _Json = False,
) -> None:
    """Read a data set whole and check it against its dataset.toml."""
    from gem.data.check import check

    report = check(folder)
    if as_json:
        _print_json(report.model_dump(mode="json"))
    else:
        _print_report(report)
    if report.problems:
        raise typer.Exit(1)


def _print_report(report: "DatasetReport") -> None:
    console = _console(as_json=False)
    for part in report.parts:
        missing = ", ".join(f"{name} {count:,}" for name, count in part.missing.items())
        filled = f"; missing values filled: {missing}" if missing else ""
        console.print(f"{part.part}: {part.rows:,} rows{filled}", highlight=False)
    for label in report.labels:
        console.print(
            f"{label.split}, {label.label}: {label.known:,} of {label.examples:,} known, "
            f"{label.positives:,.0f} positive",
            highlight=False,
        )
    for problem in report.problems:
        console.print(f"problem: {problem}", highlight=False, markup=False)
    if not report.problems:
        console.print(f"{report.name} in {report.folder} is sound", highlight=False)


@app.command()
def doctor(*, as_json: _Json = False) -> None:
    """Show versions, devices and memory, and say what is missing and how to get it."""
    from gem.doctor import examine, findings_table

    found = examine()
    if as_json:
        _print_json(found)
    else:
        _console(as_json=False).print(findings_table(found))
    if found["problems"]:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line of this process. Ends it."""
    try:
        _run()
    except SystemExit as ending:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and isinstance(ending.code, int | None):
            # One of several ranks: everything is written and closed by now, and the usual way out
            # can hang or abort in the destructors of the process group's threads.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ending.code or 0)
        raise


def _run() -> None:
    from pydantic import ValidationError

    try:
        app()
    except (GemError, ValidationError, OSError) as error:
        rank = os.environ.get("RANK")
        where = f"rank {rank}: " if rank not in (None, "0") else ""
        # One line, whatever the message: pydantic's has several.
        text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        typer.echo(f"error: {where}{text}", err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise SystemExit(130) from None

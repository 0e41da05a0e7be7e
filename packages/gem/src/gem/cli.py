"""The command `gem`: train, evaluate, prepare data, look at the installation.

Each command imports what it needs when it runs, so that `gem --help` answers at once. A user's
error, a wrong option too, is one line and exit code 2; anything else is a bug and keeps its
traceback.
"""

import difflib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from gem_opkit.errors import ConfigError, GemError, refusal

# typer brings its own copy of click's errors in some versions and click itself in others.
_UsageFault: Any = typer.BadParameter.__mro__[2]

if TYPE_CHECKING:
    from gem.data.check import DatasetReport


class _Commands(TyperGroup):
    """Commands of which an unknown one is refused with the nearest known one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first word names."""
        word = args[0]
        if word not in self.commands and not word.startswith("-") and not ctx.resilient_parsing:
            close = difflib.get_close_matches(word, list(self.commands), n=1, cutoff=0.5)
            raise ConfigError(
                refusal(
                    ctx.command_path,
                    "COMMAND",
                    must=f"be one of {', '.join(self.commands)}",
                    got=repr(word),
                    fix=f"did you mean {close[0]}?" if close else f"see {ctx.command_path} --help",
                )
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="gem",
    cls=_Commands,
    help="Train ads foundation models over jagged event sequences and non-sequence features.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(
    cls=_Commands,
    help="Make a data set, or check one.",
    no_args_is_help=True,
    rich_markup_mode="rich",
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
    bool,
    typer.Option(
        "--json", metavar="", help="Print one JSON document on stdout, the rest on stderr."
    ),
]


def _console(*, as_json: bool) -> Any:
    from rich.console import Console

    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 120  # a file or a pipe: no reason to wrap at 80
    return console


def _say(console: Any, text: str) -> None:
    """Print a line as it is: names and paths may hold what rich takes for its markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


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
        bool,
        typer.Option(
            "--version", metavar="", callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Name of a shipped recipe, or a TOML file.")
    ],
    settings: _Set = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; default runs/<recipe>-<seed>.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Replace the recipe's seed.")] = None,
    *,
    resume: Annotated[
        bool,
        typer.Option("--resume", metavar="", help="Continue from the newest complete checkpoint."),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Train a model in one pass over time-ordered data, then evaluate it.

    Missing data is prepared first, under runs/data. To train on several ranks:

    torchrun --nproc-per-node N -m gem train ...
    """
    from gem.config import load_recipe

    config = load_recipe(recipe, settings or (), seed=seed)
    folder = out if out is not None else Path("runs") / f"{config.name}-{config.seed}"

    from gem.train.interrupt import Interrupted
    from gem.train.loop import train as run_training
    from gem.train.progress import Display

    console = _console(as_json=as_json)
    try:
        with _terminate_by_exception():
            summary = run_training(config, folder, resume=resume, display=Display(console))
    except Interrupted as stop:
        _end_early(f"stopped after step {stop.step}; the checkpoint is written", stop.signal_number)
    except KeyboardInterrupt:
        _end_early("interrupted", signal.SIGINT)
    except _Terminated:
        _end_early("terminated", signal.SIGTERM)
    if as_json:
        _print_json(summary)


class _Terminated(BaseException):
    """SIGTERM came while no step ran: in preparation or in evaluation."""


@contextmanager
def _terminate_by_exception() -> Iterator[None]:
    """Turn SIGTERM into an exception, as Python does with SIGINT; the training loop has its own."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_early(what: str, signal_number: int) -> NoReturn:
    words = [w for w in sys.argv[1:] if w != "--resume"]
    command = shlex.join([*_this_program(), *words, "--resume"])
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"{what}. Continue with:\n\n    {command}\n", err=True)
    raise typer.Exit(128 + signal_number)


def _this_program() -> list[str]:
    """The words that start this program again: in this environment, on as many ranks."""
    python, found = Path(sys.executable), shutil.which("python")
    # As paths, not as files: the Python of every virtual environment links to the same file.
    if found is not None and Path(found).absolute() == python.absolute():
        word = "python"
    elif python.is_relative_to(Path.cwd()):
        word = str(python.relative_to(Path.cwd()))
    else:
        word = str(python)
    ranks = os.environ.get("WORLD_SIZE", "1")
    launch = ["torch.distributed.run", "--nproc-per-node", ranks, "-m"] if ranks != "1" else []
    return [word, "-m", *launch, "gem"]


@app.command(name="eval")
def evaluate_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    *,
    predictions: Annotated[
        bool,
        typer.Option("--predictions", metavar="", help="Also write predictions.parquet into it."),
    ] = False,
    domains: Annotated[
        bool, typer.Option("--domains", metavar="", help="Show the metrics of each domain too.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Evaluate the newest checkpoint of a run on the valid and test rows."""
    from gem.train.held_out import evaluate_folder
    from gem.train.progress import Display

    display = Display(_console(as_json=as_json))
    found = evaluate_folder(
        run, display=display, keep_predictions=predictions, show_domains=domains
    )
    if as_json:
        _print_json(found)


@data_app.command(name="prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(metavar="NAME", help="movielens-100k or synthetic.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the data set.")],
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
    _say(console, notice(spec))
    _say(console, f"{spec.examples.rows:,} examples in {out}")
    if as_json:
        _print_json({"name": spec.name, "folder": str(out), "examples": spec.examples.rows})


@data_app.command(name="check")
def data_check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a data set.")],
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
        _say(console, f"{part.part}: {part.rows:,} rows{filled}")
    for label in report.labels:
        _say(
            console,
            f"{label.split}, {label.label}: {label.known:,} of {label.examples:,} known, "
            f"{label.positives:,.0f} positive",
        )
    for problem in report.problems:
        _say(console, f"problem: {problem}")
    if not report.problems:
        _say(console, f"{report.name} in {report.folder} is sound")


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
        code = app(prog_name="gem", standalone_mode=False)
    except _UsageFault as fault:
        if type(fault).__name__ == "NoArgsIsHelpError":  # typer has printed the help by now
            raise SystemExit(2) from None
        typer.echo(f"error: {_usage_line(fault)}", err=True)
        raise SystemExit(2) from None
    except (GemError, ValidationError, OSError) as error:
        rank = os.environ.get("RANK")
        where = f"rank {rank}: " if rank not in (None, "0") else ""
        # One line, whatever the message: pydantic's has several.
        text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        typer.echo(f"error: {where}{text}", err=True)
        raise SystemExit(2) from None
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted", err=True)
        raise SystemExit(130) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _usage_line(fault: Any) -> str:
    """What is wrong with the words of a command, in the form of all errors."""
    context: Any = fault.ctx
    where = "gem" if context is None else context.command_path
    name, must = "arguments", "be as the help says"
    got = " ".join(fault.format_message().split()).rstrip(".")
    got, fix = got[:1].lower() + got[1:], f"see {where} --help"
    match type(fault).__name__:
        case "MissingParameter":
            name, must, got = got.split("'")[1], "be given", "nothing"
        case "NoSuchOption" if context is not None:
            known = [word for param in context.command.get_params(context) for word in param.opts]
            known = [word for word in known if word.startswith("--")]
            close = difflib.get_close_matches(fault.option_name, known, n=1, cutoff=0.5)
            name, must, got = "OPTION", f"be one of {', '.join(known)}", fault.option_name
            fix = f"did you mean {close[0]}?" if close else fix
    return refusal(where, name, must=must, got=got.removeprefix("got "), fix=fix)

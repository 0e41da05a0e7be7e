"""The command `gem`: train, evaluate, prepare data, look at the installation.

Each command imports what it needs when it runs, so that `gem --help` answers at once. What ends a
command early is told by `gem.faults`.
"""

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from gem.command_help import Command, Commands
from gem.faults import run_app
from gem.quick_exit import interrupts_end_at_once

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
app.add_typer(data_app, name="data")
bench_app = typer.Typer(
    cls=Commands,
    help="Measure how fast a recipe trains.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(bench_app, name="bench")

_Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A TOML file or a shipped recipe.")]
_RankBatch = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Examples of a rank; default: the recipe's batch on each rank."
    ),
]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace one key of the recipe, as in train.dense.lr=1e-3; may be repeated.",
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
        console.width = 10_000  # a file or a pipe has no edge: what is searched for is one line
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


@app.command(cls=Command)
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A TOML file, or one of complete-journey, criteo, h200, h200-long, kuairand-days, "
            "kuairand-student, kuairand-user, ml-latest-time, ml100k-din, ml100k-time, ml1m-time, "
            "own-log, synthetic-debug, synthetic-user, taobao-ads, taobao-behavior.",
        ),
    ],
    settings: _Set = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Folder of the run; default runs/<recipe>-<seed>."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Replace the recipe's seed.")
    ] = None,
    *,
    resume: Annotated[
        bool,
        typer.Option("--resume", metavar="", help="Continue from the newest complete checkpoint."),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", metavar="", help="Write a trace of a few steps into profile/."),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Train a model in one pass over time-ordered data, then evaluate it.

    Missing data is prepared first, under runs/data. On SIGTERM, and when train.wall_limit_s is up,
    a checkpoint is written and the exit code is 0; --resume goes on. To train on several ranks:

    torchrun --nproc-per-node N -m gem train ...
    """
    from gem.config import load_recipe

    config = load_recipe(recipe, settings or (), seed=seed)
    folder = out if out is not None else Path("runs") / f"{config.name}-{config.seed}"

    with interrupts_end_at_once():
        from gem.train.interrupt import TIME_IS_UP, Interrupted
        from gem.train.loop import train as run_training
        from gem.train.progress import Display

        _settle_arrow()
    console = _console(as_json=as_json)
    try:
        with _terminate_by_exception():
            summary = run_training(
                config, folder, resume=resume, profile=profile, display=Display(console)
            )
    except Interrupted as stop:
        why = "time is up: " if stop.reason == TIME_IS_UP else ""
        what = f"{why}stopped after step {stop.step}; the checkpoint is written"
        if as_json and stop.reason != signal.SIGINT:
            _print_json({"finished": False, "steps": stop.step, "folder": str(folder)})
        _end_early(what, stop.reason)
    except KeyboardInterrupt:
        _end_early("interrupted", signal.SIGINT)
    except _Terminated:
        _end_early("terminated", signal.SIGTERM)
    if as_json:
        _print_json(summary)


def _settle_arrow() -> None:
    """Have Arrow look for pandas now, and not amid the reading, where Ctrl-C would break that."""
    import pyarrow

    pyarrow.array([0])


class _Terminated(BaseException):
    """SIGTERM came while a run was set up, or in a command that does not train."""


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


@contextmanager
def _terminated_cleanly(left: str = "nothing was written") -> Iterator[None]:
    """Have SIGTERM undo what is half written and end with a word and its own exit code."""
    try:
        with _terminate_by_exception():
            yield
    except _Terminated:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(f"terminated; {left}", err=True)
        raise SystemExit(128 + signal.SIGTERM) from None


def _refuse_ranks(where: str, given: str, fix: str) -> None:
    """Refuse several ranks where each would do, and write, the same."""
    from gem_opkit.errors import UnsupportedError, refusal

    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UnsupportedError(
            refusal(where, given, must="run in one process", got=f"{ranks} ranks", fix=fix)
        )


def _end_early(what: str, reason: int, more: Sequence[str] = ("--resume",)) -> NoReturn:
    """Say how to go on. Only a person's Ctrl-C is no success: all that was done is kept."""
    words = [w for w in sys.argv[1:] if w not in more]
    command = shlex.join([*_this_program(), *words, *more])
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"{what}. Continue with:\n\n    {command}\n", err=True)
    raise SystemExit(128 + reason if reason == signal.SIGINT else 0)


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
    if ranks == "1":
        return [word, "-m", "gem"]
    hosts = os.environ.get("GROUP_WORLD_SIZE", "1")
    launch = ["torch.distributed.run", *(["--nnodes", hosts] if hosts != "1" else [])]
    # Where the hosts met is known to the launcher alone.
    here = os.environ.get("LOCAL_WORLD_SIZE", ranks)
    return [word, "-m", *launch, "--nproc-per-node", here, "-m", "gem"]


@app.command(name="eval", cls=Command)
def evaluate_run(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or one of its checkpoints.")
    ],
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
    """Evaluate a run on the valid and test rows, at its newest complete checkpoint.

    RUN may also be one of the checkpoints in it. Which one it is and whether the run was finished
    by then is said first. The metrics of the training rows, each scored before it was trained on,
    are in the run's summary.json and report.html.
    """
    with interrupts_end_at_once():
        from gem.train.held_out import evaluate_folder
        from gem.train.progress import Display

    display = Display(_console(as_json=as_json))
    with _terminated_cleanly():
        found = evaluate_folder(
            run, display=display, keep_predictions=predictions, show_domains=domains
        )
    if as_json:
        _print_json(found)


@app.command(cls=Command)
def predict(  # noqa: PLR0913 - each is an option of the command
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or one of its checkpoints.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for the predictions.")],
    splits: Annotated[
        list[str] | None,
        typer.Option(
            "--split",
            metavar="NAME",
            help="Split to predict, may be repeated; default valid and test.",
        ),
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(
            "--every",
            metavar="HOURS",
            help="Of user embeddings: hours between refreshes of users with news; default 24.",
        ),
    ] = None,
    refresh_on: Annotated[
        str | None,
        typer.Option(
            "--refresh-on",
            metavar="STREAM.FIELD=ID,ID",
            help="Of user embeddings: events that refresh their user at once.",
        ),
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(
            metavar="MS",
            help="Of user embeddings: last refresh, in ms since 1970; default the last example.",
        ),
    ] = None,
    *,
    embeddings: Annotated[
        bool,
        typer.Option(
            "--embeddings",
            metavar="",
            help="Also write what the heads read of each example; of a model of users, write user "
            "embeddings in time instead, or continue a folder of them.",
        ),
    ] = False,
    progressive: Annotated[
        bool,
        typer.Option(
            "--progressive",
            metavar="",
            help="Predict each training row by the newest checkpoint that had not learned from it.",
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Write a probability for each example and task to Parquet, whole or not at all.

    With --embeddings, the run of a model of users (model.user_model) writes the embedding of every
    user with the time from which it is valid. Called again with the same folder, only users with
    newer events are embedded.
    """
    if embeddings and _is_user_model(run):
        refresh = (every, refresh_on, until)
        _embed_users(run, out, refresh, splits or progressive, as_json=as_json)
        return
    _refuse_refresh(every, refresh_on, until)
    with interrupts_end_at_once():
        from gem.train.predict import HELD_OUT
        from gem.train.predict import predict as predict_run
        from gem.train.progress import Display

    display = Display(_console(as_json=as_json))
    with _terminated_cleanly():
        found = predict_run(
            run,
            out,
            embeddings=embeddings,
            splits=splits or (("train", *HELD_OUT) if progressive else HELD_OUT),
            progressive=progressive,
            display=display,
        )
    if as_json:
        _print_json(found)


def _is_user_model(run: Path) -> bool:
    from gem.train.run_folder import CONFIG_FILE, read_run_config

    folder = run if (run / CONFIG_FILE).is_file() else run.parent.parent
    model = read_run_config(folder).model if (folder / CONFIG_FILE).is_file() else None
    return getattr(model, "user_model", None) is not None


def _embed_users(
    run: Path,
    out: Path,
    refresh: tuple[float | None, str | None, int | None],
    rows: object,
    *,
    as_json: bool,
) -> None:
    from gem_opkit.errors import ConfigError, refusal

    if rows:
        raise ConfigError(
            refusal(
                "gem predict --embeddings",
                "--split and --progressive",
                must="be left out for a model of users, whose embeddings are of times, not of rows",
                got="one of them",
                fix="remove it, or leave --embeddings out",
            )
        )
    with interrupts_end_at_once():
        from gem.stages.embed import Refresh, embed_users
        from gem.train.progress import Display
    every, refresh_on, until = refresh
    asked = Refresh(24.0 if every is None else every, refresh_on, until)
    with _terminated_cleanly("parts that are listed in embeddings.json are whole"):
        found = embed_users(run, out, asked, display=Display(_console(as_json=as_json)))
    if as_json:
        _print_json(found.model_dump(mode="json"))


def _refuse_refresh(every: object, refresh_on: object, until: object) -> None:
    from gem_opkit.errors import ConfigError, refusal

    given = {"--every": every, "--refresh-on": refresh_on, "--until": until}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                refusal(
                    "gem predict",
                    name,
                    must="come with --embeddings and a run of a model of users",
                    got=value,
                    fix="remove it",
                )
            )


@app.command(name="export-weights", cls=Command)
def export_weights_of(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or one of its checkpoints.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="SafeTensors file to write.")],
    *,
    last: Annotated[
        bool,
        typer.Option(
            "--last", metavar="", help="The newest weights, where the recipe averages them."
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Write the dense weights of a run to one SafeTensors file; needs no data set.

    They are those that evaluation uses: the averages, where the recipe keeps them.
    """
    with interrupts_end_at_once():
        from gem.train.export_weights import export_weights

    with _terminated_cleanly():
        found = export_weights(run, out, averaged=not last)
    if as_json:
        _print_json(found)
    else:
        text = f"{found['tensors']} tensors, {found['bytes']:,} bytes in {out}"
        _say(_console(as_json=False), f"{text}, of {found['checkpoint']}")


@app.command(cls=Command)
def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or one of its checkpoints.")
    ],
    out: Annotated[Path, typer.Option(metavar="ARTEFACT", help="New folder for the artefact.")],
    example: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write a request as JSON, made of the first row after the training rows; it "
            "holds the history of a user.",
        ),
    ] = None,
    *,
    last: Annotated[
        bool,
        typer.Option(
            "--last", metavar="", help="The newest weights, where the recipe averages them."
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Write a trained model as a folder that scores without the run and without the log.

    It holds the weights, the tables, the static features of users and items, and what the
    statistics held at the end of training; not the histories, which come with each request. Load it
    with gem score, gem serve or gem.serving.ranker.Ranker.
    """
    with interrupts_end_at_once():
        from gem.serving.example import write_example
        from gem.serving.export import export as export_run

    _refuse_ranks("gem export", "RUN", "leave torchrun out")
    with _terminated_cleanly():
        if example is not None:
            write_example(run, example)
        found = export_run(run, out, averaged=not last)
    if as_json:
        _print_json({"folder": str(out)} | found.model_dump(mode="json", exclude={"files"}))
        return
    size = sum(facts.bytes for facts in found.files.values())
    text = f"{out}: {size:,} bytes, after {found.steps} steps of {found.recipe}"
    state = "" if found.finished else ", which was not finished"
    _say(_console(as_json=False), f"{text}{state}; fingerprint {found.fingerprint[:12]}")


_Artefact = Annotated[
    Path, typer.Argument(metavar="ARTEFACT", help="Folder that gem export wrote.")
]
_Formats = Annotated[
    str,
    typer.Option(
        metavar="FORMAT",
        help="trained, the number formats of the recipe; fp32; or bf16.",
    ),
]
_Device = Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:N.")]


@app.command(cls=Command)
def score(
    artefact: _Artefact,
    request: Annotated[
        Path, typer.Argument(metavar="FILE", help="A request as JSON; - reads it from stdin.")
    ],
    precision: _Formats = "trained",
    device: _Device = "cpu",
) -> None:
    """Score one request: prints the answer that gem serve would give, as JSON."""
    from gem.serving.ranker import Ranker, precision_named

    body = sys.stdin.buffer.read() if str(request) == "-" else request.read_bytes()
    ranker = Ranker.load(artefact, precision=precision_named(precision), device=device)
    typer.echo(ranker.score(body).model_dump_json(indent=2))


@app.command(cls=Command)
def serve(
    artefact: _Artefact,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65_535, help="0 takes any free one.")
    ] = 8000,
    precision: _Formats = "trained",
    device: _Device = "cpu",
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Threads of torch; default: its own.")
    ] = None,
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=VALUE",
            help="One of max_candidates, max_events, max_body_bytes, max_waiting, max_batch and "
            "max_wait_ms; may be repeated.",
        ),
    ] = None,
) -> None:
    """Serve an artefact over HTTP: POST /score, GET /health, /metadata and /schema.

    Needs the extra gem-trainer[serve]. A request that finds the line full is refused at once.
    SIGTERM ends it once the answers under way are given.
    """
    with interrupts_end_at_once():
        from gem.serving.limits import limits_named
        from gem.serving.ranker import Ranker, precision_named
        from gem.serving.server import serve as serve_ranker

        sizes, spec = limits_named(limits or (), host=host, port=port)
        ranker = Ranker.load(
            artefact,
            precision=precision_named(precision),
            device=device,
            limits=sizes,
            threads=threads,
        )
    for stream, why in ranker.told_apart.items():
        typer.echo(f"stream {stream} is computed for each candidate from {why}", err=True)
    serve_ranker(ranker, spec, told=lambda at: typer.echo(f"serving {artefact} at {at}", err=True))


@app.command(cls=Command)
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
    as_json: _Json = False,
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
        _print_json(found | {"not_compared": list(beside[1])})
    else:
        for each in beside[0]:
            _say(_console(as_json=False), each.line())
        for reason in beside[1]:
            _say(_console(as_json=False), f"not compared: {reason}")
        _say(_console(as_json=False), f"report: {page}")


@data_app.command(name="prepare", cls=Command)
def data_prepare(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="complete-journey, criteo, kuairand, movielens-100k, movielens-1m, "
            "movielens-latest, synthetic, taobao-ads, taobao-behavior; or a TOML file that says "
            "what columns a log of your own has.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the data set.")],
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the raw files. complete-journey and movielens-100k are fetched without "
            "it, kuairand takes GEM_KUAIRAND, and a log of your own lies beside its TOML file.",
        ),
    ] = None,
    *,
    as_json: _Json = False,
) -> None:
    """Make a data set: a folder of Parquet files and dataset.toml."""
    from gem.data.dataset import SPEC_FILE
    from gem.data.prepare import notice, prepare

    console = _console(as_json=as_json)
    there = (out / SPEC_FILE).is_file()
    spec = prepare(name, out, source=source)
    if owner := notice(spec):
        _say(console, owner)
    made = ", which was made before" if there else ""
    _say(console, f"{spec.examples.rows:,} examples in {out}{made}")
    if as_json:
        _print_json({"name": spec.name, "folder": str(out), "examples": spec.examples.rows})


@data_app.command(name="slice", cls=Command)
def data_slice(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a data set.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the slice.")],
    where: Annotated[
        list[str],
        typer.Option(
            "--where",
            metavar="COLUMN=ID,ID",
            help="Ids of an id column of the examples that are kept; may be repeated.",
        ),
    ],
    *,
    as_json: _Json = False,
) -> None:
    """Make a data set of some of the examples of another, with all events and entities."""
    from gem.data.slice import slice_dataset
    from gem_opkit.errors import ConfigError, refusal

    wanted: dict[str, list[int]] = {}
    for text in where:
        column, equals, ids = text.partition("=")
        parts = [part.strip() for part in ids.split(",")]
        if not equals or not all(p.lstrip("-").isdigit() and len(p) < 20 for p in parts):
            raise ConfigError(
                refusal(
                    "gem data slice",
                    "--where",
                    must="look like COLUMN=ID,ID",
                    got=repr(text),
                    fix="give such as --where tab=1,4",
                )
            )
        wanted.setdefault(column.strip(), []).extend(int(part) for part in parts)
    spec = slice_dataset(folder, out, wanted)
    _say(_console(as_json=as_json), f"{spec.examples.rows:,} examples in {out}")
    if as_json:
        _print_json({"name": spec.name, "folder": str(out), "examples": spec.examples.rows})


@data_app.command(name="check", cls=Command)
def data_check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a data set.")],
    *,
    as_json: _Json = False,
) -> None:
    """Read a data set whole: faults, leaking columns, label rates by day, histories.

    Errors keep a run from starting or make it worthless (exit code 1); a warning is likely a
    mistake; a note is worth knowing.
    """
    from gem.data.check import check
    from gem.data.checks.printing import print_report

    report = check(folder)
    if as_json:
        _print_json(report.model_dump(mode="json"))
    else:
        print_report(_console(as_json=False), report)
    if report.problems:
        raise typer.Exit(1)


@app.command(cls=Command)
def plan(  # noqa: PLR0913 - each is an option of the command
    recipe: _Recipe = "h200",
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", min=1, help="Number of ranks.")] = 1,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            metavar="FILE",
            help="TOML file of hosts and links, or one of h200, h200x2, h200x8, gem4096; default: "
            "the smallest of these that has the ranks.",
        ),
    ] = None,
    settings: _Set = None,
    axes: Annotated[
        list[str] | None,
        typer.Option(
            "--axis",
            metavar="AXIS=SIZE",
            help="What every plan must have, as in expert=2; may be repeated.",
        ),
    ] = None,
    batch: _RankBatch = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STREAM=LOW:HIGH",
            help="Fewest and most events of a history, where the data does not say; repeatable.",
        ),
    ] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INPUT=MEAN", help="Ids of an example, for inputs with several; repeatable."
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Results file of bench_step.py or collectives.py to fit rates to."
        ),
    ] = None,
    most: Annotated[int, typer.Option("--plans", metavar="N", min=1, help="Plans to list.")] = 5,
    *,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            metavar="",
            help="Run a step of one rank of the recipe's plan, or of the best one, with ranks and "
            "numbers in name only; compare its bytes and memory. Needs torch.",
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Forecast step time, memory and MFU of a recipe on N ranks; list the best parallel plans.

    Needs no GPU and no torch. docs/scaling.md says what the forecast assumes.
    """
    from gem.planning.answer import as_json as planned_json
    from gem.planning.answer import as_text as planned_text
    from gem.planning.command import Asked, plan_recipe

    asked = Asked(
        recipe=recipe,
        gpus=gpus,
        topology=topology,
        settings=tuple(settings or ()),
        axes=tuple(axes or ()),
        batch=batch,
        lengths=tuple(lengths or ()),
        ids=tuple(ids or ()),
        calibrate=calibrate,
        most=most,
    )
    planned = plan_recipe(asked)
    ran = _dry_run_beside(planned) if dry_run else None
    if as_json:
        _print_json(planned_json(planned) | ({"dry_run": ran[0]} if ran else {}))
    else:
        typer.echo(planned_text(planned) + (f"\n{ran[1]}" if ran else ""), nl=False)


def _dry_run_beside(planned: Any) -> tuple[dict[str, Any], str]:
    from gem.dry_run.beside import beside, beside_json, beside_text

    found = beside(planned)
    return beside_json(found), beside_text(found)


@bench_app.command(name="step", cls=Command)
def bench_step_of(  # noqa: PLR0913 - each is an option of the command
    context: typer.Context,
    recipe: _Recipe,
    settings: _Set = None,
    plan_axes: Annotated[
        list[str] | None,
        typer.Option(
            "--plan",
            metavar="AXIS=SIZE",
            help="Axis of the plan of several ranks, as in shard=2; may be repeated.",
        ),
    ] = None,
    examples: _RankBatch = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps to time.")] = 20,
    warmup: Annotated[int, typer.Option(metavar="N", min=1, help="Steps before them.")] = 4,
    profiled: Annotated[
        int,
        typer.Option("--profile", metavar="N", min=0, help="Steps to profile; 0 for none."),
    ] = 3,
    impl: Annotated[
        str,
        typer.Option(
            "--impl",
            metavar="IMPL",
            help="What computes: auto, or reference for plain torch in place of every kernel.",
        ),
    ] = "auto",
    check: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="In place of timing: train N steps with the kernels and with the references, and "
            "compare losses and NE; exit code 1 where they differ by more than roundings do.",
        ),
    ] = None,
    endure: Annotated[
        int,
        typer.Option(
            "--endure",
            metavar="N",
            min=0,
            help="With --check: N steps more with the kernels, whose losses have to be finite; "
            "by itself: N steps of that alone, in place of timing.",
        ),
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON document to write.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture of the step to write.")
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of results that a row is added to."),
    ] = None,
    *,
    device_batches: Annotated[
        bool,
        typer.Option(
            "--device-batches",
            help="Time steps on batches that lie on the device; else each is copied there from "
            "page-locked host memory while the step before it runs.",
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Time the training step of a recipe, and say where its time, FLOPs and memory go.

    The trainer's own step runs on random batches; no data set is read. Time is told by kind of work
    and by module, and adds up to the step; MFU is n/a on a device whose peak is not known, as that
    of a CPU. docs/performance.md says how it is measured. To measure several ranks:

    torchrun --nproc-per-node N -m gem bench step RECIPE --plan shard=N
    """
    from gem.bench.command import (
        asked_for,
        bench_check,
        bench_endure,
        bench_step,
        check_text,
        endured_text,
        refuse_mixed,
    )
    from gem.bench.page import as_text

    timing: dict[str, tuple[str, object]] = {
        "out": ("--out", out),
        "svg": ("--svg", svg),
        "steps": ("--steps", steps),
        "warmup": ("--warmup", warmup),
        "profiled": ("--profile", profiled),
        "device_batches": ("--device-batches", "on"),
    }
    # By its name: typer brings its own copy of click's sources in some versions.
    given = [n for n in timing if "DEFAULT" not in str(context.get_parameter_source(n))]
    refuse_mixed(check, endure=endure, given=dict(timing[n] for n in given))
    asked = asked_for(
        recipe,
        settings=settings or (),
        plan=plan_axes or (),
        examples=examples,
        steps=check or endure or steps,
        warmup=warmup,
        profiled=profiled,
        impl=impl,
        batches="device" if device_batches else "host",
    )
    console = _console(as_json=True)

    def told(stage: str) -> None:
        _say(console, stage)

    if check is not None:
        compared = bench_check(asked, further=endure, rows=rows, told=told)
        if as_json:
            _print_json(compared.model_dump(mode="json"))
        else:
            typer.echo(check_text(compared), nl=False)
        raise typer.Exit(0 if compared.agrees else 1)
    if endure:
        endured = bench_endure(asked, rows=rows, told=told)
        if as_json:
            _print_json(endured.model_dump(mode="json"))
        elif os.environ.get("RANK", "0") == "0":
            typer.echo(endured_text(endured), nl=False)
        raise typer.Exit(0 if endured.finite else 1)
    report = bench_step(asked, out=out, svg=svg, rows=rows, told=told)
    if report is None:
        return
    if as_json:
        _print_json(report.model_dump(mode="json"))
    else:
        typer.echo(as_text(report), nl=False)


@bench_app.command(name="ablation", cls=Command)
def bench_ablation_of(  # noqa: PLR0913 - each is an option of the command
    recipe: _Recipe,
    settings: _Set = None,
    seeds: Annotated[str, typer.Option(metavar="N,N", help="Seeds of every variant.")] = "1,2,3",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="NAME", help="Variant or element to train; may be repeated."
        ),
    ] = None,
    variants: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file of variants in place of the built-in ones."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the runs; default runs/ablation/<recipe>."),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of results that rows are added to."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=1, max=256, help="Runs at the same time.")
    ] = 1,
    *,
    finished: Annotated[
        bool, typer.Option("--finished", metavar="", help="Compare what is trained already.")
    ] = False,
    listed: Annotated[
        bool, typer.Option("--list", metavar="", help="Show the variants; train nothing.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Train a recipe without each of its elements, and published models, and compare them.

    One table: NE, AUC, FLOPs an example, examples/s, and the difference of NE to the recipe on the
    same test rows with its 95 % interval (paired bootstrap). Finished runs are kept: the command
    goes on where it ended. Speed is measured beside as many runs as --jobs says.
    """
    from gem.bench.variants import chosen, read_variants, variants_of
    from gem.config import load_recipe

    config = load_recipe(recipe, settings or ())
    known = variants_of(config) if variants is None else read_variants(variants)
    picked = chosen(known, only or ())
    if listed:
        for variant in picked:
            typer.echo(f"{variant.name}: {', '.join(variant.settings) or 'as the recipe is'}")
        return
    from gem.bench.ablation import (
        Ablation,
        compared,
        run_ablation,
        seeds_of,
        table,
        write_ablation,
    )
    from gem.train.interrupt import Interrupted

    if jobs > 1:
        _refuse_ranks("gem bench ablation", "--jobs", "leave torchrun or --jobs out")
    folder = out if out is not None else Path("runs") / "ablation" / config.name
    console = _console(as_json=True)
    asked = Ablation(
        recipe, tuple(picked), tuple(settings or ()), seeds_of(seeds), folder, jobs=jobs
    )
    try:
        with _terminated_cleanly("runs that have ended are kept"):
            make = compared if finished else run_ablation
            found = make(asked, lambda line: _say(console, line))
    except Interrupted as stop:
        _end_early(f"a run stopped after step {stop.step}", stop.reason, more=())
    if os.environ.get("RANK", "0") != "0":
        return
    write_ablation(found, folder, rows)
    if as_json:
        _print_json({"rows": found})
    else:
        typer.echo(table(found), nl=False)


@app.command(cls=Command)
def memory(
    recipe: _Recipe = "h200",
    settings: _Set = None,
    budgets: Annotated[
        list[float] | None,
        typer.Option(
            "--budget",
            metavar="GIB",
            help="GiB that activations may take; may be repeated. Default: memory.budget_gib.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Examples of a rank; default: the recipe's batch."),
    ] = None,
    *,
    as_json: _Json = False,
) -> None:
    """Say what a step keeps for its backward pass, and what it makes again under a budget.

    The table names for each part of the model what is kept, packed and made again, and why. Nothing
    is trained; on a machine with a GPU the operators are the GPU's own.
    """
    from gem.memory.command import answer_json, answer_text, memory_of

    answer = memory_of(recipe, settings or (), budgets_gib=budgets or (), batch=batch)
    if as_json:
        _print_json(answer_json(answer))
    else:
        typer.echo(answer_text(answer), nl=False)


@app.command(cls=Command)
def scaling(
    asked: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|LADDER",
            help="A recipe, a ladder file, or the shipped ladder planted.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the results; rungs in it are kept.")
    ],
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="auto, cpu or cuda; planted ladders alone.")
    ] = "auto",
    jobs: Annotated[
        int, typer.Option(metavar="N", min=1, help="Rungs that are trained at once.")
    ] = 1,
    *,
    as_json: _Json = False,
) -> None:
    """Train a ladder of models and show how NE falls with their FLOPs.

    A ladder file names models that grow in one direction, or in all together, and what they are
    trained on. Of a planted world a law is fitted, and the last rung is predicted, in writing,
    before it is run. Of a recipe, parts of its own sizes are trained on its own data and reported.
    Called again with the same folder, what is there is not run again.
    """
    from gem.scaling.ladder import climb
    from gem.scaling.picture import law_words
    from gem.scaling.read import read_ladder
    from gem.train.interrupt import Interrupted

    def tell(line: str) -> None:
        typer.echo(line, err=as_json)

    _refuse_ranks("gem scaling", "a ladder", "leave torchrun out; --jobs trains several rungs")
    spec = read_ladder(asked)
    try:
        with _terminated_cleanly("rungs that have ended are kept"):
            found = climb(spec, out, device=device, jobs=jobs, told=tell)
    except Interrupted as stop:
        _end_early(f"a rung stopped after step {stop.step}", stop.reason, more=())
    if as_json:
        _print_json(found)
        return
    for line in law_words(found):
        typer.echo(line)
    typer.echo(f"{out / 'report.html'} and {out / 'scaling.svg'} show it")


@app.command(cls=Command)
def stages(
    asked: Annotated[
        str,
        typer.Argument(
            metavar="STAGES",
            help="A TOML file of two stages, or one of kuairand-stages, synthetic-stages.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace one key of both recipes, as in data.folder=DIR; may be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the runs; default runs/stages/<name>."),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of results that rows are added to."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=1, max=256, help="Runs at the same time.")
    ] = 1,
    *,
    as_json: _Json = False,
) -> None:
    """Train a model of users, embed them in time order, train a ranker with and without that.

    The embedding of a time is made by a checkpoint that had learned from nothing later. Told are
    the NE of both stages on the test rows, the difference with its 95 % interval, and how much of
    the upstream gain reaches the ranker. Runs that have ended are kept: the command goes on where
    it was stopped.
    """
    from gem.stages.command import Stages, run_stages, table, write_stages
    from gem.stages.spec import read_stages

    _refuse_ranks("gem stages", "STAGES", "leave torchrun out; --jobs trains several runs")
    spec = read_stages(asked)
    folder = out if out is not None else Path("runs") / "stages" / spec.name
    console = _console(as_json=True)
    work = Stages(spec, tuple(settings or ()), folder, jobs)
    with _terminated_cleanly("runs that have ended are kept"):
        found = run_stages(work, lambda line: _say(console, line))
    write_stages(found, work, rows)
    if as_json:
        _print_json(found)
    else:
        typer.echo(table(found), nl=False)


@app.command(cls=Command)
def doctor(
    runs: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the runs, whose disk is looked at.")
    ] = Path("runs"),
    *,
    as_json: _Json = False,
) -> None:
    """Show what is installed, which kernel and number format runs where, and what is missing."""
    from dataclasses import asdict

    from gem.doctor.examine import examine
    from gem.doctor.page import page

    found = examine(runs)
    if as_json:
        _print_json(asdict(found))
    else:
        _console(as_json=False).print(page(found))
    if found.problems:
        raise typer.Exit(1)


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

"""Commands that train a model, and that take one from its run: scores, predictions, weights."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from gem.commands.arguments import JsonFlag, LastFlag, RunArgument, SetOption
from gem.commands.ending import Terminated, end_early, terminate_by_exception, terminated_cleanly
from gem.commands.printing import console_of, print_json, say_line
from gem.quick_exit import interrupts_end_at_once


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A TOML file, or one of complete-journey, complete-journey-user, criteo, h200, "
            "h200-long, kuairand-days, kuairand-student, kuairand-user, ml-latest-time, "
            "ml100k-cross, ml100k-din, ml100k-time, ml1m-time, own-log, synthetic-debug, "
            "synthetic-user, taobao-ads, taobao-behavior.",
        ),
    ],
    settings: SetOption = None,
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
    as_json: JsonFlag = False,
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
    console = console_of(as_json=as_json)
    try:
        with terminate_by_exception():
            summary = run_training(
                config, folder, resume=resume, profile=profile, display=Display(console)
            )
    except Interrupted as stop:
        why = "time is up: " if stop.reason == TIME_IS_UP else ""
        what = f"{why}stopped after step {stop.step}; the checkpoint is written"
        if as_json and stop.reason != signal.SIGINT:
            print_json({"finished": False, "steps": stop.step, "folder": str(folder)})
        end_early(what, stop.reason)
    except KeyboardInterrupt:
        end_early("interrupted", signal.SIGINT)
    except Terminated:
        end_early("terminated", signal.SIGTERM)
    if as_json:
        print_json(summary)


def _settle_arrow() -> None:
    """Have Arrow look for pandas now, and not amid the reading, where Ctrl-C would break that."""
    import pyarrow

    pyarrow.array([0])


def evaluate_run(
    run: RunArgument,
    *,
    predictions: Annotated[
        bool,
        typer.Option("--predictions", metavar="", help="Also write predictions.parquet into it."),
    ] = False,
    domains: Annotated[
        bool, typer.Option("--domains", metavar="", help="Show the metrics of each domain too.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate a run on the valid and test rows, at its newest complete checkpoint.

    RUN may also be one of the checkpoints in it. Which one it is and whether the run was finished
    by then is said first. The metrics of the training rows, each scored before it was trained on,
    are in the run's summary.json and report.html.
    """
    with interrupts_end_at_once():
        from gem.train.held_out import evaluate_folder
        from gem.train.progress import Display

    display = Display(console_of(as_json=as_json))
    with terminated_cleanly():
        found = evaluate_folder(
            run, display=display, keep_predictions=predictions, show_domains=domains
        )
    if as_json:
        print_json(found)


def predict(  # noqa: PLR0913 - each is an option of the command
    run: RunArgument,
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
            help="Of user embeddings: last refresh, in ms since 1970, at most the last example; "
            "default that.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Of user embeddings: a data set that is the run's own with newer rows behind it.",
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
    as_json: JsonFlag = False,
) -> None:
    """Write a probability for each example and task to Parquet, whole or not at all.

    With --embeddings, the run of a model of users (model.user_model) writes the embedding of every
    user with the time from which it is valid. Called again with the same folder, only users with
    newer events are embedded.
    """
    if embeddings and _is_user_model(run):
        refresh = (every, refresh_on, until, data)
        _embed_users(run, out, refresh, splits or progressive, as_json=as_json)
        return
    _refuse_refresh(
        {"--every": every, "--refresh-on": refresh_on, "--until": until, "--data": data}
    )
    with interrupts_end_at_once():
        from gem.train.predict import HELD_OUT
        from gem.train.predict import predict as predict_run
        from gem.train.progress import Display

    display = Display(console_of(as_json=as_json))
    with terminated_cleanly():
        found = predict_run(
            run,
            out,
            embeddings=embeddings,
            splits=splits or (("train", *HELD_OUT) if progressive else HELD_OUT),
            progressive=progressive,
            display=display,
        )
    if as_json:
        print_json(found)


def _is_user_model(run: Path) -> bool:
    from gem.train.run_folder import CONFIG_FILE, read_run_config

    folder = run if (run / CONFIG_FILE).is_file() else run.parent.parent
    model = read_run_config(folder).model if (folder / CONFIG_FILE).is_file() else None
    return getattr(model, "user_model", None) is not None


def _embed_users(
    run: Path,
    out: Path,
    refresh: tuple[float | None, str | None, int | None, Path | None],
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
    every, refresh_on, until, data = refresh
    asked = Refresh(24.0 if every is None else every, refresh_on, until)
    with terminated_cleanly("parts that are listed in embeddings.json are whole"):
        display = Display(console_of(as_json=as_json))
        found = embed_users(run, out, asked, grown=data, display=display)
    if as_json:
        print_json(found.model_dump(mode="json"))


def _refuse_refresh(given: dict[str, object]) -> None:
    from gem_opkit.errors import ConfigError, refusal

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


def export_weights_of(
    run: RunArgument,
    out: Annotated[Path, typer.Option(metavar="FILE", help="SafeTensors file to write.")],
    *,
    last: LastFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Write the dense weights of a run to one SafeTensors file; needs no data set.

    They are those that evaluation uses: the averages, where the recipe keeps them.
    """
    with interrupts_end_at_once():
        from gem.train.export_weights import export_weights

    with terminated_cleanly():
        found = export_weights(run, out, averaged=not last)
    if as_json:
        print_json(found)
    else:
        text = f"{found['tensors']} tensors, {found['bytes']:,} bytes in {out}"
        say_line(console_of(as_json=False), f"{text}, of {found['checkpoint']}")

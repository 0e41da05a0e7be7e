"""Commands that train several models to learn something of them: ladders, stages."""

from pathlib import Path
from typing import Annotated

import typer

from gem.commands.arguments import JsonFlag, RowsOption, RunsAtOnce
from gem.commands.ending import end_early, refuse_ranks, terminated_cleanly
from gem.commands.printing import console_of, print_json, say_line


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
    as_json: JsonFlag = False,
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

    refuse_ranks("gem scaling", "a ladder", "leave torchrun out; --jobs trains several rungs")
    spec = read_ladder(asked)
    try:
        with terminated_cleanly("rungs that have ended are kept"):
            found = climb(spec, out, device=device, jobs=jobs, told=tell)
    except Interrupted as stop:
        end_early(f"a rung stopped after step {stop.step}", stop.reason, more=())
    if as_json:
        print_json(found)
        return
    for line in law_words(found):
        typer.echo(line)
    typer.echo(f"{out / 'report.html'} and {out / 'scaling.svg'} show it")


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
    rows: RowsOption = None,
    jobs: RunsAtOnce = 1,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Train a model of users, embed them in time order, train a ranker with and without that.

    The embedding of a time is made by a checkpoint that had learned from nothing later. Told are
    the NE of both stages on the test rows, the difference with its 95 % interval, and how much of
    the upstream gain reaches the ranker. Runs that have ended are kept: the command goes on where
    it was stopped.
    """
    from gem.stages.command import Stages, run_stages, table, write_stages
    from gem.stages.spec import read_stages

    refuse_ranks("gem stages", "STAGES", "leave torchrun out; --jobs trains several runs")
    spec = read_stages(asked)
    folder = out if out is not None else Path("runs") / "stages" / spec.name
    console = console_of(as_json=True)
    work = Stages(spec, tuple(settings or ()), folder, jobs)
    with terminated_cleanly("runs that have ended are kept"):
        found = run_stages(work, lambda line: say_line(console, line))
    write_stages(found, work, rows)
    if as_json:
        print_json(found)
    else:
        typer.echo(table(found), nl=False)

"""Commands that say what a recipe will take, before it is run: `gem plan`, `gem memory`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gem.commands.arguments import JsonFlag, RankBatch, RecipeArgument, SetOption
from gem.commands.printing import print_json


def plan(  # noqa: PLR0913 - each is an option of the command
    recipe: RecipeArgument = "h200",
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
    settings: SetOption = None,
    axes: Annotated[
        list[str] | None,
        typer.Option(
            "--axis",
            metavar="AXIS=SIZE",
            help="What every plan must have, as in expert=2; may be repeated.",
        ),
    ] = None,
    batch: RankBatch = None,
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
    as_json: JsonFlag = False,
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
        print_json(planned_json(planned) | ({"dry_run": ran[0]} if ran else {}))
    else:
        typer.echo(planned_text(planned) + (f"\n{ran[1]}" if ran else ""), nl=False)


def _dry_run_beside(planned: Any) -> tuple[dict[str, Any], str]:
    from gem.dry_run.beside import beside, beside_json, beside_text

    found = beside(planned)
    return beside_json(found), beside_text(found)


def memory(
    recipe: RecipeArgument = "h200",
    settings: SetOption = None,
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
    as_json: JsonFlag = False,
) -> None:
    """Say what a step keeps for its backward pass, and what it makes again under a budget.

    The table names for each part of the model what is kept, packed and made again, and why. Nothing
    is trained; on a machine with a GPU the operators are the GPU's own.
    """
    from gem.memory.command import answer_json, answer_text, memory_of

    answer = memory_of(recipe, settings or (), budgets_gib=budgets or (), batch=batch)
    if as_json:
        print_json(answer_json(answer))
    else:
        typer.echo(answer_text(answer), nl=False)

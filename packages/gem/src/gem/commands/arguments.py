"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A TOML file or a shipped recipe.")
]


RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run, or one of its checkpoints.")
]


RankBatch = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Examples of a rank; default: the recipe's batch on each rank."
    ),
]


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace one key of the recipe, as in train.dense.lr=1e-3; may be repeated.",
    ),
]


RowsOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of results that rows are added to.")
]


RunsAtOnce = Annotated[
    int, typer.Option(metavar="N", min=1, max=256, help="Runs at the same time.")
]


LastFlag = Annotated[
    bool,
    typer.Option("--last", metavar="", help="The newest weights, where the recipe averages them."),
]


JsonFlag = Annotated[
    bool,
    typer.Option(
        "--json", metavar="", help="Print one JSON document on stdout, the rest on stderr."
    ),
]

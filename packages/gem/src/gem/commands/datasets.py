"""Commands that make, cut and check data sets."""

import re
from pathlib import Path
from typing import Annotated

import typer

from gem.commands.arguments import JsonFlag
from gem.commands.printing import console_of, print_json, say_line


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
    grown_from: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Data set of the same log at an earlier time, whose ids keep their meaning.",
        ),
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Make a data set: a folder of Parquet files and dataset.toml."""
    from gem.data.dataset import SPEC_FILE
    from gem.data.prepare import notice, prepare

    console = console_of(as_json=as_json)
    there = (out / SPEC_FILE).is_file()
    spec = prepare(name, out, source=source, grown_from=grown_from)
    if owner := notice(spec):
        say_line(console, owner)
    made = ", which was made before" if there else ""
    say_line(console, f"{spec.examples.rows:,} examples in {out}{made}")
    if as_json:
        print_json({"name": spec.name, "folder": str(out), "examples": spec.examples.rows})


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
    as_json: JsonFlag = False,
) -> None:
    """Make a data set of some of the examples of another, with all events and entities."""
    from gem.data.slice import slice_dataset
    from gem_opkit.errors import ConfigError, refusal

    wanted: dict[str, list[int]] = {}
    for text in where:
        column, equals, ids = text.partition("=")
        parts = [part.strip() for part in ids.split(",")]
        if not equals or not all(re.fullmatch("-?[0-9]{1,18}", part) for part in parts):
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
    say_line(console_of(as_json=as_json), f"{spec.examples.rows:,} examples in {out}")
    if as_json:
        print_json({"name": spec.name, "folder": str(out), "examples": spec.examples.rows})


def data_check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a data set.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Read a data set whole: faults, leaking columns, label rates by day, histories.

    Errors keep a run from starting or make it worthless (exit code 1); a warning is likely a
    mistake; a note is worth knowing.
    """
    from gem.data.check import check
    from gem.data.checks.printing import print_report

    report = check(folder)
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        print_report(console_of(as_json=False), report)
    if report.problems:
        raise typer.Exit(1)

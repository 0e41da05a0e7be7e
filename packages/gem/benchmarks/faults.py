"""A campaign of faults: a run ends with the metrics of the unbroken one, or stops with one line.

    python packages/gem/benchmarks/faults.py [--each 10] [--seed 1] [--only KIND ...]

Each fault strikes a fresh run at a place that the seed draws. What was damaged in files is then put
back, and the run goes on with --resume: its metrics have to equal those of the unbroken run in
every digit, and so have its numbers of steps and examples. One row a fault in
results/cpu/faults.jsonl, and the table of docs/faults.md; with --only, which is a part of them, the
table is printed and rows are written where --results says, or nowhere.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_kinds import KINDS
from fault_world import (
    EQUAL,
    LOST,
    OLDER,
    RESUMED,
    SKIPPED,
    STOPPED,
    Fault,
    LostError,
    World,
    make_world,
)
from faulty_runs import preload
from rich.console import Console
from rich.table import Table

from gem_opkit.bench import provenance, write_rows

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results" / "cpu" / "faults.jsonl"
PAGE = ROOT / "docs" / "faults.md"


def campaign(
    world: World, folder: Path, kinds: list[str], each: int, seed: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Let faults strike.

    Args:
        world: what each starts from.
        folder: for the copies.
        kinds: names in KINDS.
        each: faults of each kind.
        seed: of the places where they strike.
        say: is told what was lost.

    Returns:
        one row a fault.
    """
    rows = []
    for kind in kinds:
        for number in range(each):
            fault = Fault(world, folder / "fault", random.Random(f"{seed} {kind} {number}"))
            began = time.monotonic()
            try:
                outcome = KINDS[kind](fault)
            except LostError as lost:
                outcome, fault.message = LOST, str(lost)
                say(f"{kind} {number}, {fault.where}: {lost}")
            rows.append(
                {
                    "bench": "faults",
                    "case": f"{kind} {number}",
                    "kind": kind,
                    "seed": seed,
                    "where": fault.where,
                    "outcome": outcome,
                    "seconds": round(time.monotonic() - began, 3),
                    "message": fault.message.replace(str(folder), ".").replace(
                        sys.executable, "python"
                    ),
                }
            )
            shutil.rmtree(fault.place, ignore_errors=True)
    return rows


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Kinds and what became of them."""
    outcomes = sorted({row["outcome"] for row in rows})
    table = Table("kind", "faults", *outcomes, "seconds each")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        counts = [sum(row["outcome"] == outcome for row in mine) for outcome in outcomes]
        cells = [str(count) if count else "" for count in counts]
        seconds = sum(row["seconds"] for row in mine) / len(mine)
        table.add_row(kind, str(len(mine)), *cells, f"{seconds:.1f}")
    return table


def page_table(rows: list[dict[str, Any]]) -> str:
    """The same for docs/faults.md.

    Args:
        rows: of all faults.

    Returns:
        a table in Markdown.
    """
    outcomes = [EQUAL, RESUMED, STOPPED, OLDER, SKIPPED]
    lines = ["| kind | faults | " + " | ".join(outcomes) + " |", "| --- |" + " --- |" * 6]
    for kind in KINDS:
        mine = [row["outcome"] for row in rows if row["kind"] == kind]
        counts = [str(mine.count(outcome) or "") for outcome in outcomes]
        lines.append(f"| {kind} | {len(mine)} | " + " | ".join(counts) + " |")
    return "\n".join(lines) + "\n"


def write_page(rows: list[dict[str, Any]]) -> None:
    """Put the table into the page, between its marks."""
    head, mark, rest = PAGE.read_text(encoding="utf-8").partition("<!-- table faults -->\n")
    _, end, tail = rest.partition("<!-- end -->")
    PAGE.write_text(head + mark + page_table(rows) + end + tail, encoding="utf-8")


def main() -> None:
    """Run the campaign and write its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--each", type=int, default=10, help="faults of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), help="some kinds")
    parser.add_argument("--results", type=Path, help="file of the rows")
    chosen = parser.parse_args()
    kinds = chosen.only or list(KINDS)
    results = chosen.results or (RESULTS if chosen.only is None else None)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    preload()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        world = make_world(folder)
        rows = campaign(world, folder, kinds, chosen.each, chosen.seed, console.print)
    console.print(table_of(rows))
    if results is not None:
        origin = provenance()
        write_rows(results, [{**row, "device": "cpu", **origin} for row in rows])
    if results == RESULTS and chosen.only is None:
        write_page(rows)
    lost = sum(row["outcome"] == LOST for row in rows)
    place = "" if results is None else f"; rows in {results}"
    console.print(f"{len(rows)} faults, {lost} lost{place}")
    if lost:
        raise SystemExit(1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

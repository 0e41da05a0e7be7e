"""What 8-bit products do to what a model learns: NE beside bf16, on the same seeds and batches.

    python packages/gem/benchmarks/bench_precision_ne.py [--recipe A] [--seeds 1 2 3] [--set K=V]

Trains one recipe in bf16 and in each precision with each seed, through the same function as
`gem train`: the same initial weights, the same batches in the same order. Every linear layer but
heads and last layer computes in 8 bits, whatever its width (``least_width = 0``); ``naive`` is
``fp8_block`` without these exceptions. Into ``results/cpu/precision_ne.jsonl`` goes a row a
precision and task: the difference of NE to bf16 on the test rows, its 95 % interval by a paired
bootstrap, and beside it what another seed alone makes in bf16. Rows of the same case replace older
ones.
"""

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from bench_quality import paired_bootstrap, run_recipe, test_rows
from rich.console import Console

from gem.train.progress import Display
from gem_opkit.bench import provenance, write_rows

RESULTS = Path(__file__).resolve().parents[3] / "results" / "cpu" / "precision_ne.jsonl"
BASE = "bf16"
PRECISIONS: dict[str, list[str]] = {
    BASE: ["precision.recipe=bf16"],
    "fp8_block": ["precision.recipe=fp8_block", "precision.least_width=0"],
    "mxfp8_rceil": ["precision.recipe=mxfp8_rceil", "precision.least_width=0"],
    "mxfp8_floor": ["precision.recipe=mxfp8_floor", "precision.least_width=0"],
    "naive": [
        *("precision.recipe=fp8_block", "precision.least_width=0"),
        "precision.bf16_escapes=[]",
    ],
}
Tested = dict[str, list[dict[str, np.ndarray]]]


def runs_of(chosen: argparse.Namespace, precision: str, display: Display) -> tuple[Tested, Any]:
    """Train with every seed; the test rows of each task, one entry a seed, and a summary."""
    tested: Tested = {}
    summary: dict[str, Any] = {}
    for seed in chosen.seeds:
        display.stage(f"{chosen.recipe}, {precision}, seed {seed}")
        settings = [*chosen.settings, *PRECISIONS[precision]]
        summary, folder = run_recipe(chosen.recipe, seed, settings, chosen.out / precision, display)
        for task in summary["test"]:
            tested.setdefault(task, []).append(test_rows(folder, task))
    return tested, summary


def by_seed(runs: list[dict[str, np.ndarray]], base: list[dict[str, np.ndarray]]) -> list[float]:
    """The difference of NE of each seed."""
    return [paired_bootstrap([a], [b])["ne_difference"] for a, b in zip(runs, base, strict=True)]


def main() -> None:
    """Train, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="synthetic-debug")
    parser.add_argument("--precisions", nargs="+", default=[p for p in PRECISIONS if p != BASE])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--out", type=Path, default=Path("runs/precision"), help="of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    unknown = set(chosen.precisions) - set(PRECISIONS)
    if unknown:
        parser.error(f"--precisions: unknown {sorted(unknown)}; known: {', '.join(PRECISIONS)}")
    console = Console()
    display = Display(console)
    base, summary = runs_of(chosen, BASE, display)
    rows: list[dict[str, Any]] = []
    for precision in chosen.precisions:
        tested, summary = runs_of(chosen, precision, display)
        for task, runs in tested.items():
            found = paired_bootstrap(runs, base[task])
            each = by_seed(runs, base[task])
            others = [paired_bootstrap([a], [b])["ne_difference"] for a, b in pairwise(base[task])]
            rows.append(
                {
                    "bench": "precision_ne",
                    "case": f"{chosen.recipe}, {task}: {precision} against {BASE}",
                    "recipe": chosen.recipe,
                    "precision": precision,
                    "task": task,
                    "seeds": chosen.seeds,
                    **found,
                    "ne_difference_by_seed": each,
                    "bf16_between_seeds": statistics.fmean(map(abs, others)) if others else None,
                    "settings": [*chosen.settings, *PRECISIONS[precision]],
                    "device": summary["device"],
                }
            )
            told = (
                f"{found['ne_difference']:+.5f} [{found['low_95']:+.5f}, {found['high_95']:+.5f}]"
            )
            console.print(f"{rows[-1]['case']}: NE {told}, {found['rows']:,} rows a seed")
    rows = [{**row, **provenance()} for row in rows]
    json.dumps(rows, allow_nan=False)  # refuse to write what is not a number
    write_rows(chosen.results, rows)
    console.print(f"{len(rows)} rows in {chosen.results}")


if __name__ == "__main__":
    main()

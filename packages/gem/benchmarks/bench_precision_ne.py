"""What 8-bit products do to what a model learns: NE beside bf16, on the same seeds and batches.

    python packages/gem/benchmarks/bench_precision_ne.py [--recipes A] [--seeds 1 2 3] [--set K=V]

Trains recipes in bf16 and in each precision with each seed, through the same function as
`gem train`: the same initial weights, the same batches in the same order. Every linear layer but
heads and last layer computes in 8 bits, whatever its width (``least_width = 0``); ``naive`` is
``fp8_block`` without these exceptions. ``kept_fp8`` and ``kept_fp4`` compute as bf16 does and keep
every activation for the backward pass in 8 or 4 bits. Into
``results/<device>/precision_ne.jsonl`` goes a row a precision and task: the difference of NE to
bf16 on the test rows, its 95 % interval by a paired bootstrap over rows and another by Student over
seeds, and beside it what another seed alone makes in bf16. Rows of the same case replace older
ones.
"""

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from bench_quality import paired_bootstrap, run_recipe, test_rows
from known_rates_compare import over_seeds
from rich.console import Console

from gem.config import load_recipe
from gem.data.prepare import provide
from gem.train.progress import Display
from gem.train.run import DATA_ROOT
from gem_opkit.bench import device_folder, provenance, write_rows

RESULTS = Path(__file__).resolve().parents[3] / "results"
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
    # Products in bf16; what is kept for the backward pass in fewer bits, whatever its size.
    "kept_fp8": ["precision.recipe=bf16", "memory.kept=fp8", "memory.pack_above_bytes=1"],
    "kept_fp4": ["precision.recipe=bf16", "memory.kept=fp4", "memory.pack_above_bytes=1"],
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One run."""

    recipe: str
    precision: str
    seed: int
    settings: tuple[str, ...]
    out: Path


@dataclass(frozen=True, slots=True)
class Done:
    """What it leaves: a summary, and task -> its losses on the test rows."""

    summary: dict[str, Any]
    tested: dict[str, dict[str, np.ndarray]]


def run(asked: Asked) -> Done:
    """Train with one seed, unless a finished run is there."""
    settings = [*asked.settings, *PRECISIONS[asked.precision]]
    folder = asked.out / asked.precision
    summary, folder = run_recipe(asked.recipe, asked.seed, settings, folder, Display(None))
    return Done(summary, {task: test_rows(folder, task) for task in summary["test"]})


def rows_of(
    recipe: str, runs: dict[str, list[Done]], seeds: Sequence[int], settings: Sequence[str]
) -> list[dict[str, Any]]:
    """Compare each precision with bf16."""
    rows = []
    for precision, done in runs.items():
        if precision == BASE:
            continue
        for task in done[0].tested:
            own, base = ([run.tested[task] for run in side] for side in (done, runs[BASE]))
            each = [
                paired_bootstrap([a], [b])["ne_difference"] for a, b in zip(own, base, strict=True)
            ]
            others = [paired_bootstrap([a], [b])["ne_difference"] for a, b in pairwise(base)]
            rows.append(
                {
                    "bench": "precision_ne",
                    "case": f"{recipe}, {task}: {precision} against {BASE}",
                    "recipe": recipe,
                    "precision": precision,
                    "task": task,
                    "seeds": list(seeds),
                    **paired_bootstrap(own, base),
                    "ne_difference_by_seed": each,
                    "seeds_low_95": over_seeds(each)["low_95_frac"],
                    "seeds_high_95": over_seeds(each)["high_95_frac"],
                    "ne_bf16": [run.summary["test"][task]["ne"] for run in runs[BASE]],
                    "bf16_between_seeds": statistics.fmean(map(abs, others)) if others else None,
                    "steps": done[0].summary["steps"],
                    "settings": [*settings, *PRECISIONS[precision]],
                    "device": done[0].summary["device"],
                }
            )
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=["synthetic-debug"])
    parser.add_argument("--precisions", nargs="+", default=[p for p in PRECISIONS if p != BASE])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    parser.add_argument("--runs", type=Path, default=Path("runs/precision"), help="their folder")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    unknown = set(chosen.precisions) - set(PRECISIONS)
    if unknown:
        parser.error(f"--precisions: unknown {sorted(unknown)}; known: {', '.join(PRECISIONS)}")
    return chosen


def main() -> None:
    """Train, compare, write."""
    chosen = _arguments()
    console = Console(width=160)
    names = [BASE, *(p for p in chosen.precisions if p != BASE)]
    every = [
        Asked(recipe, precision, seed, tuple(chosen.settings), chosen.runs)
        for recipe in chosen.recipes
        for precision in names
        for seed in chosen.seeds
    ]
    for recipe in chosen.recipes:  # or several processes would prepare the data at once
        provide(load_recipe(recipe, chosen.settings).data, DATA_ROOT)
    # Forked processes could not use a GPU.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.processes, mp_context=context) as pool:
        found: dict[str, dict[str, list[Done]]] = {}
        for asked, done in zip(every, pool.map(run, every), strict=True):
            of_recipe = found.setdefault(asked.recipe, {})
            of_recipe.setdefault(asked.precision, []).append(done)
            console.print(f"{asked.recipe}, {asked.precision}, seed {asked.seed}: done")
            if asked.precision != BASE and asked.seed == chosen.seeds[-1]:
                # At once: what comes later may be cut off.
                both = {name: of_recipe[name] for name in (BASE, asked.precision)}
                rows = rows_of(asked.recipe, both, chosen.seeds, chosen.settings)
                write(rows, chosen.out, console)


def write(rows: list[dict[str, Any]], out: Path, console: Console) -> None:
    """Show rows, and put them into the file of their device."""
    for row in rows:
        numbers = (row[key] for key in ("ne_difference", "low_95", "high_95"))
        told = "{:+.5f} [{:+.5f}, {:+.5f}]".format(*numbers)
        console.print(f"{row['case']}: NE {told}, {row['rows']:,} rows a seed", highlight=False)
    rows = [{**row, **provenance()} for row in rows]
    json.dumps(rows, allow_nan=False)  # refuse to write what is not a number
    path = out / device_folder(rows[0]["device"]) / "precision_ne.jsonl"
    write_rows(path, rows)
    console.print(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    main()

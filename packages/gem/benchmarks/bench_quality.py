"""Quality of the shipped recipes over seeds, and whether their difference is more than chance.

    python packages/gem/benchmarks/bench_quality.py [--recipes A B] [--seeds 1 2 3] [--set K=V]

Trains each recipe with each seed through the same function as `gem train`, takes the predictions
of the test rows that it wrote, and puts into ``results/cpu/quality.jsonl``: one row a run and task,
the mean over seeds, and for every pair of recipes on the same data a paired bootstrap of the
difference in NE on the same rows. Rows of the same case replace older ones.
"""

import argparse
import json
import math
import statistics
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gem.config import load_recipe
from gem.report.paired import paired_bootstrap, row_losses, task_losses
from gem.train.loop import train
from gem.train.metrics import KEYS
from gem.train.progress import Display
from gem_opkit.bench import provenance, write_rows

RESULTS = Path(__file__).resolve().parents[3] / "results" / "cpu" / "quality.jsonl"
PERIODS = ("progressive", "valid", "test")
METRICS = KEYS
DEFAULT = ["ml100k-time", "ml100k-cross", "ml100k-din"]
# Others take them from here.
__all__ = ["METRICS", "RESULTS", "paired_bootstrap", "row_losses", "run_recipe", "test_rows"]
test_rows = task_losses


def run_recipe(
    recipe: str, seed: int, settings: list[str], out: Path, display: Display
) -> tuple[dict[str, Any], Path]:
    """Train one recipe with one seed, unless the folder holds that finished run."""
    config = load_recipe(recipe, [*settings, "train.predictions=true"], seed=seed)
    folder = out / f"{config.name}-{seed}"
    summary = train(config, folder, resume=folder.exists(), display=display)
    return summary, folder


def seed_rows(recipe: str, seed: int, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each task of one run."""
    several = len(summary["test"]) > 1
    return [
        {
            "bench": "quality",
            "case": f"{recipe}, seed {seed}" + (f", {task}" if several else ""),
            "recipe": recipe,
            "seed": seed,
            "task": task,
            **{s: summary[s][task] for s in PERIODS},
            **{k: summary[k] for k in ("device", "steps", "throughput", "memory")},
        }
        for task in summary["test"]
    ]


def mean_rows(
    recipe: str, seeds: list[int], summaries: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row for each task: every metric that all seeds have, its mean and half its range."""
    several = len(summaries[0]["test"]) > 1
    rows = []
    for task in summaries[0]["test"]:
        found = {
            split: {
                key: [float(s[split][task][key]) for s in summaries]
                for key in METRICS
                if all(s[split][task][key] is not None for s in summaries)
            }
            for split in PERIODS
        }
        case = f"{recipe}, mean of seeds {' '.join(map(str, seeds))}"
        rows.append(
            {
                "bench": "quality",
                "case": case + (f", {task}" if several else ""),
                "recipe": recipe,
                "seeds": seeds,
                "task": task,
                **{s: {k: statistics.fmean(v) for k, v in found[s].items()} for s in found},
                "half_range": {
                    s: {k: (max(v) - min(v)) / 2 for k, v in found[s].items()} for s in found
                },
                "device": summaries[0]["device"],
            }
        )
    return rows


def main() -> None:
    """Train, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=DEFAULT)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--out", type=Path, default=Path("runs/quality"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    console = Console()
    display = Display(console)
    rows: list[dict[str, Any]] = []
    tested: dict[str, dict[str, list[dict[str, np.ndarray]]]] = {}
    datasets: dict[str, str] = {}
    for recipe in chosen.recipes:
        summaries = []
        for seed in chosen.seeds:
            display.stage(f"{recipe}, seed {seed}")
            summary, folder = run_recipe(recipe, seed, chosen.settings, chosen.out, display)
            for task in summary["test"]:
                found = test_rows(folder, task)
                tested.setdefault(recipe, {}).setdefault(task, []).append(found)
            summaries.append(summary)
            rows += seed_rows(recipe, seed, summary)
        datasets[recipe] = summaries[0]["dataset"]
        means = mean_rows(recipe, chosen.seeds, summaries)
        for row in means:
            console.print(row["case"], {k: round(v, 4) for k, v in row["test"].items()})
        rows += means
    for one, other in combinations(chosen.recipes, 2):
        if datasets[one] != datasets[other]:
            continue
        for task in tested[one]:
            found = paired_bootstrap(tested[one][task], tested[other][task])
            several = "" if len(tested[one]) == 1 else f", {task}"
            rows.append(
                {
                    "bench": "quality",
                    "case": f"{one} against {other}{several}, paired bootstrap of NE",
                    "recipes": [one, other],
                    "task": task,
                    "seeds": chosen.seeds,
                    **found,
                    "device": "cpu",
                }
            )
            console.print(rows[-1]["case"], {k: v for k, v in found.items() if not math.isnan(v)})
    origin = provenance()
    # A row with settings is a case of its own and must not replace the shipped recipe's.
    suffix = f" with {', '.join(chosen.settings)}" if chosen.settings else ""
    rows = [
        {**row, "case": row["case"] + suffix, "settings": chosen.settings, **origin} for row in rows
    ]
    json.dumps(rows, allow_nan=False)  # refuse to write what is not a number
    write_rows(chosen.results, rows)
    console.print(f"{len(rows)} rows in {chosen.results}")


if __name__ == "__main__":
    main()

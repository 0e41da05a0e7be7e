"""What the metrics cost: AUC of a long stream, and the share of a training step.

    python packages/gem/benchmarks/bench_metrics.py [--samples 100000000] [--set KEY=VALUE]

The stream goes through one `AucState` and, where it is long, does not fit into memory. Its scores
are whole multiples of 2^-24, far more of them than the state has bins, so that an exact AUC can be
counted beside it in a plain histogram. The step is that of ``ml100k-time``: the real training
loop, with a clock around everything that `gem.train.metrics` is asked to do. Writes
``results/cpu/metrics.jsonl``.
"""

import argparse
import functools
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gem.config import load_recipe
from gem.train import loop
from gem.train.auc import AucState
from gem.train.metrics import MetricBlock, MetricStream
from gem.train.progress import Display
from gem_opkit.bench import provenance, write_rows

RESULTS = Path(__file__).resolve().parents[3] / "results" / "cpu" / "metrics.jsonl"
_GRID_BITS = 24
_BATCH = 1 << 14


def stream_auc(samples: int, *, seed: int = 1) -> dict[str, Any]:
    """Stream samples through the bounded AUC, and count the exact one beside it."""
    state = AucState()
    # Positives and negatives at every point of the grid: the oracle, 256 MiB.
    counts = np.zeros((2, (1 << _GRID_BITS) + 1), np.int64)
    rng = np.random.default_rng(seed)
    seconds = 0.0
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    peak = 0
    for start in range(0, samples, _BATCH):
        rows = min(_BATCH, samples - start)
        # Low rates, as of clicks: most scores are small and close to one another.
        point = (rng.beta(1.2, 20.0, rows) * (1 << _GRID_BITS)).astype(np.int64)
        score = (point / (1 << _GRID_BITS)).astype(np.float32)
        positive = rng.uniform(size=rows) < score
        for row, here in enumerate((~positive, positive)):
            np.add.at(counts[row], point[here], 1)
        del point
        tracemalloc.reset_peak()
        now, _ = tracemalloc.get_traced_memory()
        began = time.perf_counter()
        state.update(score, positive)
        seconds += time.perf_counter() - began
        held = now - before - score.nbytes - positive.nbytes
        peak = max(peak, held + tracemalloc.get_traced_memory()[1] - now)
    began = time.perf_counter()
    value = state.value()
    seconds += time.perf_counter() - began
    tracemalloc.stop()
    negatives, positives = counts
    below = np.cumsum(negatives) - negatives
    # Whole numbers: 2 x wins as Python integers, so the oracle rounds once.
    wins = sum(
        int(p) * (2 * int(b) + int(n))
        for p, b, n in zip(positives, below, negatives, strict=True)
        if p
    )
    exact = wins / (2 * int(positives.sum()) * int(negatives.sum()))
    if value.auc is None or abs(value.auc - exact) > value.error_bound:
        raise SystemExit(f"bench_metrics: {value} is not within its bound of {exact}")
    return {
        "bench": "metrics",
        "case": f"AUC of {samples:,} samples",
        "samples": samples,
        "distinct_scores": int(np.count_nonzero(negatives + positives)),
        "max_bins": state.max_bins,
        "bins_used": int(state.keys.size),
        "auc": value.auc,
        "exact_auc": exact,
        "error": abs(value.auc - exact),
        "error_bound": value.error_bound,
        "peak_bytes": peak,
        "state_bytes": sum(a.nbytes for a in state.to_arrays().values()),
        "seconds": seconds,
        "ns_per_sample": 1e9 * seconds / samples,
    }


def _timed(spent: dict[str, float], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, its time added to ``spent`` unless another timed call is around it."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if spent["depth"]:
            return call(*args, **kwargs)
        spent["depth"] += 1
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began
            spent["depth"] -= 1

    return run


def share_of_step(recipe: str, settings: list[str]) -> dict[str, Any]:
    """Train a recipe with a clock around the metrics."""
    spent: dict[str, float] = {"depth": 0}
    timed = [(MetricBlock, "update"), (MetricBlock, "report")]
    timed += [(MetricStream, "close"), (MetricStream, "window"), (MetricBlock, "to_bytes")]
    kept = [(owner, name, getattr(owner, name)) for owner, name in timed]
    at_end: dict[str, float] = {}
    finish = loop.finish

    def end_of_training(*args: Any) -> Any:
        at_end.update(spent)
        return finish(*args)

    for owner, name, call in kept:
        setattr(owner, name, _timed(spent, f"{owner.__name__}.{name}", call))
    loop.finish = end_of_training
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = load_recipe(recipe, settings)
            summary = loop.train(config, Path(folder) / "run", display=Display(Console()))
    finally:
        loop.finish = finish
        for owner, name, call in kept:
            setattr(owner, name, call)
    del at_end["depth"]
    total_s = summary["examples"] / summary["throughput"]["examples_per_s"]
    return {
        "bench": "metrics",
        "case": f"share of the step of {recipe}",
        "recipe": recipe,
        "settings": settings,
        "steps": summary["steps"],
        "step_ms_median": summary["throughput"]["step_ms_median"],
        "metrics_ms_per_step": 1e3 * sum(at_end.values()) / summary["steps"],
        "metrics_frac": sum(at_end.values()) / total_s,
        "parts_ms_per_step": {k: 1e3 * s / summary["steps"] for k, s in at_end.items()},
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--recipe", default="ml100k-time")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--only", choices=("auc", "step"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    console = Console()
    rows = []
    if chosen.only != "step":
        rows.append(stream_auc(chosen.samples))
    if chosen.only != "auc":
        rows.append(share_of_step(chosen.recipe, chosen.settings))
    origin = provenance()
    for row in rows:
        console.print(row)
    write_rows(chosen.results, [{**row, "device": "cpu", **origin} for row in rows])
    console.print(f"{len(rows)} rows in {chosen.results}")


if __name__ == "__main__":
    main()

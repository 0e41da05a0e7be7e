"""How even the work of ranks comes out, by way of dealing, base batch and number of ranks.

    python packages/parallel/benchmarks/balance.py [--out results]

Steps of 1,024 examples a rank are drawn from a Zipf law of history lengths, exponent 1.2. Each row
has the work of the heaviest rank over the mean, its mean and its greatest over the steps, for each
way: off; snake, the sorted base batches to and fro over the ranks; rounds, the heaviest of a round
to the rank with the least; global, that and swaps; within_group, the same for each group of ranks;
group, that and swaps between groups down to 1 %. ``ms`` is what dealing a step takes on a core,
median of steps, mean of these three. No step is counted before its rows were found to be dealt
once each. Writes ``results/cpu/balance.jsonl``.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gem_opkit.bench import provenance, write_rows
from gem_opkit.errors import MeasurementError, refusal
from gem_parallel.balance.contract import Variant
from gem_parallel.balance.dealing import deal_snake, deal_sorted, sums_of
from gem_parallel.balance.imbalance import zipf_lengths
from gem_parallel.balance.step import Arrangement, Dealing, arrange, piece_edges
from gem_parallel.balance.work import Kind, WorkModel, max_over_mean

RESULTS = Path(__file__).resolve().parents[3] / "results"
EXAMPLES, ALPHA, DRAWN = 1024, 1.2, 200_000
# Ranks, base batch, longest history, ranks of a group.
CASES = [
    *((ranks, base_batch, 2048, ranks // 2) for ranks in (2, 8) for base_batch in (64, 128, 512)),
    *((ranks, 128, 8192, ranks // 2) for ranks in (2, 8)),
    (64, 128, 2048, 8),
    (4096, 128, 2048, 64),
]
KINDS: tuple[Kind, ...] = ("linear", "quadratic")
VARIANTS: tuple[Variant, ...] = ("global", "group", "within_group")


def main() -> None:
    """Check, measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--dry", action="store_true", help="write no row")
    given = parser.parse_args()
    rows = [measure(*case, kind) for case in CASES for kind in KINDS]
    if not given.dry:
        origin = {"device": "cpu", **provenance()}
        write_rows(given.out / "cpu" / "balance.jsonl", [{**row, **origin} for row in rows])


def measure(ranks: int, base_batch: int, longest: int, group: int, kind: Kind) -> dict[str, Any]:
    """Deal drawn steps in every way."""
    lengths = zipf_lengths(DRAWN, alpha=ALPHA, longest=longest)
    work_L = WorkModel.of_kind(kind, longest).of({"events": lengths})
    random = np.random.default_rng(1)
    ways = {name: Dealing(name, base_batch, group_ranks=group) for name in VARIANTS}
    ratios: dict[str, list[float]] = {}
    seconds: list[float] = []
    between = 0.0
    steps = 64 if ranks <= 64 else 4
    for _ in range(steps):
        work_B = work_L[random.integers(0, DRAWN, ranks * EXAMPLES)]
        began = time.perf_counter()
        found = {name: arrange(work_B, ranks, dealing) for name, dealing in ways.items()}
        seconds.append((time.perf_counter() - began) / len(ways))
        for name, arrangement in found.items():
            check(arrangement, len(work_B))
            ratios.setdefault(name, []).append(max_over_mean(arrangement.after_W))
        anywhere, grouped = found["global"], found["group"]
        between += grouped.moved_between_groups / len(grouped.edges_N1) / steps
        ratios.setdefault("off", []).append(max_over_mean(anywhere.before_W))
        for name, way in (("snake", deal_snake), ("rounds", deal_sorted)):
            ratios.setdefault(name, []).append(dealt_by(way, work_B, ranks, ways["global"]))
    row = {
        "bench": "balance",
        "case": f"{kind}, {ranks} ranks, base batch {base_batch}, Zipf 1.2 up to {longest}",
        "kind": kind,
        "ranks": ranks,
        "examples_a_rank": EXAMPLES,
        "base_batch": base_batch,
        "length_alpha": ALPHA,
        "longest": longest,
        "group_ranks": group,
        "steps": steps,
        "max_over_mean": {name: float(np.mean(values)) for name, values in ratios.items()},
        "worst": {name: max(values) for name, values in ratios.items()},
        "moved_between_groups_frac": between,
        "ms": 1e3 * median(seconds),
    }
    shown = ", ".join(f"{name} {value:.4f}" for name, value in row["max_over_mean"].items())
    print(f"{row['case']}: {shown}; {row['ms']:.2f} ms a step", flush=True)
    return row


def dealt_by(
    way: Callable[[np.ndarray, int], np.ndarray], work_B: np.ndarray, ranks: int, dealing: Dealing
) -> float:
    """Heaviest over mean where base batches are dealt in a simpler way."""
    edges = piece_edges(len(work_B), ranks, dealing)
    work_N = np.add.reduceat(work_B, edges[:-1])
    return max_over_mean(sums_of(work_N, way(work_N, ranks), ranks))


def check(found: Arrangement, rows: int) -> None:
    """Refuse a dealing that loses a row, or gives one twice."""
    seen = np.zeros(rows, np.int64)
    for rank in range(len(found.pieces)):
        for low, high in found.runs(rank):
            seen[low:high] += 1
    if (seen != 1).any():
        raise MeasurementError(
            refusal(
                "balance",
                "rows",
                must="be dealt once each",
                got=f"{int((seen != 1).sum())} that are not",
                fix="mend gem_parallel.balance",
            )
        )


if __name__ == "__main__":
    main()

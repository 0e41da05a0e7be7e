"""What one precision does beside another, over seeds: the difference of NE and its intervals.

Runs of one seed are on the same batches, so the entropy of the labels cancels, and the difference
of NE as a share of it is that of the losses. Two trainings that differ by rounding alone part after
some steps, and from then on differ by chance as well. Each seed draws that chance anew, examples,
world and initial weights with it: the interval over seeds holds all of it. The one over blocks of
batches holds the chance of the examples alone.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from known_rates_run import BASE, PRECISIONS, Asked, Run

from gem.scaling.law import student_quantile
from gem.train.normalized_entropy import binary_entropy

# Pairs that make a row: the second is what the first is compared with.
PAIRS = {name: BASE for name in PRECISIONS if name != BASE}
BLOCKS, RESAMPLES = 32, 10_000
SPLITS = ("progressive", "second_half", "held_out")
_LOSS, _EXPECTED = 2, 3  # columns of a run's sums


def compare(
    first: Sequence[Run], second: Sequence[Run], task: int, split: str, column: int
) -> dict[str, Any] | None:
    """The difference of NE as a share of it, over all seeds; None where a run has no such split.

    ``low_95_frac`` and ``high_95_frac`` are Student's interval of the mean over seeds, for two
    seeds or more; ``blocks_...`` a bootstrap over blocks of batches, the seeds as they are.
    """
    if not all(len(run.of(split)) for run in (*first, *second)):
        return None
    gaps, bases, each = [], [], []
    for a, b in zip(first, second, strict=True):
        own, other = a.of(split)[:, task, column], b.of(split)[:, task, column]
        gap, base = own - other, other
        each.append(float(gap.sum() / base.sum()))
        for blocks, values in ((gaps, gap), (bases, base)):
            blocks += [part.sum() for part in np.array_split(values, min(BLOCKS, len(values)))]
    gap, base = np.array(gaps), np.array(bases)
    draw = np.random.default_rng(1)
    picked = draw.integers(0, len(gap), (RESAMPLES, len(gap)))
    found = gap[picked].sum(1) / base[picked].sum(1)
    low, high = np.quantile(found, [0.025, 0.975])
    return {
        **over_seeds(each),
        "blocks_low_95_frac": float(low),
        "blocks_high_95_frac": float(high),
        "by_seed_frac": each,
    }


def over_seeds(each: Sequence[float]) -> dict[str, float | None]:
    """Mean of the seeds' differences, its 95 % interval by Student, and their spread.

    The interval and the spread of one seed are None.
    """
    middle, half, spread = statistics.fmean(each), None, None
    if len(each) > 1:
        spread = statistics.stdev(each)
        half = student_quantile(0.95, len(each) - 1) * spread / math.sqrt(len(each))
    return {
        "difference_frac": middle,
        "low_95_frac": None if half is None else middle - half,
        "high_95_frac": None if half is None else middle + half,
        "between_seeds_frac": spread,
    }


def row(
    name: str, task: int, runs: Mapping[str, Mapping[int, Run]], asked: Asked
) -> dict[str, Any] | None:
    """Everything about one precision beside another, over the seeds that both have."""
    own, other = runs.get(name, {}), runs.get(PAIRS[name], {})
    seeds = sorted(own.keys() & other.keys())
    if not seeds:
        return None
    first, second = [own[seed] for seed in seeds], [other[seed] for seed in seeds]
    one = first[0]
    found: dict[str, Any] = {}
    for split in SPLITS:
        if not all(len(run.of(split)) for run in (*first, *second)):
            found[split] = None
            continue
        count, positive, loss, expected = np.sum([r.of(split)[:, task].sum(0) for r in first], 0)
        entropy = binary_entropy(positive / count)
        found[split] = {
            "labels": int(count),
            "ne": float(loss / count / entropy),
            "ne_of_rates": float(expected / count / entropy),
            "of_labels": compare(first, second, task, split, _LOSS),
            "of_rates": compare(first, second, task, split, _EXPECTED),
        }
    return {
        "bench": "known_rates",
        "case": f"{one.tasks[task]}: {name} against {PAIRS[name]}",
        "precision": name,
        "task": one.tasks[task],
        "seeds": seeds,
        "examples": min(sum(run.batches) for run in first),
        "batches": min(len(run.batches) for run in first),
        "batch_examples": [one.batches[0], one.batches[-1]],
        "blocks": BLOCKS,
        **found,
        "layers": one.layers,
        "settings": [*asked.settings, *PRECISIONS[name]],
        "beside": list(asked.precisions),
        "seconds": [run.seconds for run in first],
        "device": one.device,
    }


def told(each: Mapping[str, Any]) -> str:
    """A row in a line."""
    parts = [f"{each['case']}, {len(each['seeds'])} seeds of {each['examples']:,} examples"]
    for split in SPLITS:
        if each[split] is None:
            continue
        parts.append(f"{split} NE {each[split]['ne']:.4f}")
        for kind in ("of_labels", "of_rates"):
            found = each[split][kind]
            line = f"{kind} {found['difference_frac']:+.4%}"
            if found["low_95_frac"] is not None:
                line += f" [{found['low_95_frac']:+.4%}, {found['high_95_frac']:+.4%}]"
            parts.append(line)
    return "; ".join(parts)

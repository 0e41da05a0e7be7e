"""What every peer does alike: try the settings on the valid rows, keep the best, repeat over seeds.

A model sees labels of training rows only; the valid rows choose among its settings (and, for
trees, the number of trees). Test rows are predicted, never scored, here.
"""

import argparse
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from inputs import Inputs, read_inputs

Fit = Callable[[Inputs, dict[str, Any], int], dict[str, np.ndarray]]
# Under any number of passes: epochs of a neural model, which stops at the first that is no better
# on the valid rows.
MOST_EPOCHS = 5
EPOCHS = "epochs"


def run_peer(
    fit: Fit,
    settings: Sequence[dict[str, Any]],
    packages: Sequence[str],
    *,
    draws_numbers: bool = True,
    counts_epochs: bool = False,
) -> None:
    """Read the command line, train, and write predictions with a report beside them.

    Args:
        fit: trains with one setting and seed; returns predictions of the splits valid and test.
        settings: all that are tried, each with the first seed.
        packages: whose versions are reported.
        draws_numbers: whether the seed makes a difference; if not, one run stands for all seeds.
        counts_epochs: whether the model trains by epochs, of which it takes ``epochs`` at most;
            others see the rows as often as they like in any case.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--variant", choices=["statistics", "raw"], required=True)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True, help="predictions; report beside them")
    parser.add_argument("--passes", choices=["one", "any"], default="one")
    chosen = parser.parse_args()
    inputs = read_inputs(chosen.inputs, chosen.task, chosen.variant)
    label = inputs.splits["valid"].label
    if counts_epochs:
        most = 1 if chosen.passes == "one" else MOST_EPOCHS
        settings = [{**setting, EPOCHS: most} for setting in settings]
    first, seconds = chosen.seeds[0], []
    tried, found = [], []
    for setting in settings:
        began = time.perf_counter()
        found.append(fit(inputs, setting, first))
        seconds.append(time.perf_counter() - began)
        taken = {EPOCHS: int(found[-1].pop(EPOCHS))} if counts_epochs else {}
        loss = log_loss(label, found[-1]["valid"])
        tried.append({"setting": setting | taken, "valid_logloss": loss})
        print(json.dumps(tried[-1]), f"{seconds[-1]:.1f} s", flush=True)
    best = min(range(len(tried)), key=lambda place: tried[place]["valid_logloss"])
    runs = [found[best]]
    for seed in chosen.seeds[1:]:
        if not draws_numbers:
            runs.append(found[best])
            continue
        began = time.perf_counter()
        runs.append(fit(inputs, settings[best], seed))
        runs[-1].pop(EPOCHS, None)
        seconds.append(time.perf_counter() - began)
    report = {
        "setting": tried[best]["setting"],
        "tried": tried,
        "fit_s": float(np.median(seconds)),
        "draws_numbers": draws_numbers,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }
    splits = {name: np.stack([r[name] for r in runs]).astype(np.float32) for name in found[0]}
    np.savez(chosen.out, **splits, report=np.array(json.dumps(report)))


def best_epoch(
    label: np.ndarray,
    most: int,
    train: Callable[[], None],
    predict: Callable[[], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Train epoch by epoch until the valid rows get no better.

    Args:
        label: of the valid rows.
        most: epochs at most.
        train: trains one more.
        predict: predictions of the splits valid and test by the model as it is.

    Returns:
        the predictions of the best epoch, and ``epochs``, its number.
    """
    best: dict[str, np.ndarray] = {}
    for epoch in range(1, most + 1):
        train()
        found = predict()
        if best and log_loss(label, found["valid"]) >= log_loss(label, best["valid"]):
            break
        best = found | {EPOCHS: np.int64(epoch)}
    return best


def log_loss(label: np.ndarray, p: np.ndarray) -> float:
    """Mean log loss in nats, predictions clipped as GEM's metrics clip them.

    Args:
        label: 0 or 1.
        p: predicted probabilities.

    Returns:
        the mean.
    """
    p = np.clip(p.astype(np.float64), 1e-7, 1.0 - 1e-7)
    return float(-np.where(label > 0.5, np.log(p), np.log1p(-p)).mean())

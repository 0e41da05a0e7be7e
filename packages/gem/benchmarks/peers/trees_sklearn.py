"""scikit-learn's gradient-boosted trees (HistGradientBoosting) on numbers, statistics and ids."""

from typing import Any

import numpy as np
from inputs import Inputs, padded
from runner import log_loss, run_peer
from sklearn.ensemble import HistGradientBoostingClassifier

MOST_TREES = 600
PATIENCE = 40
MOST_VALUES = 255  # the most categories that it takes: ids of more values are left out

SETTINGS = [
    {"max_leaf_nodes": 8, "learning_rate": 0.06, "min_samples_leaf": 100},
    {"max_leaf_nodes": 16, "learning_rate": 0.06, "min_samples_leaf": 100},
    {"max_leaf_nodes": 16, "learning_rate": 0.03, "min_samples_leaf": 100},
    {"max_leaf_nodes": 31, "learning_rate": 0.03, "min_samples_leaf": 50},
]


def columns(inputs: Inputs, split: str, names: list[str]) -> np.ndarray:
    """Numbers, ids of few values, and one column for each value of the multi-valued inputs."""
    rows = inputs.splits[split]
    parts = [rows.numbers, *(rows.ids[name][:, None] for name in names)]
    for bag in inputs.multi:
        values = padded(rows.bags[bag], int(np.diff(rows.bags[bag][0]).max()))
        parts.append((values[:, :, None] == np.arange(2, inputs.bag_sizes[bag])).any(axis=1))
    return np.concatenate(parts, axis=1).astype(np.float32)


def fit(inputs: Inputs, setting: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Train on the training rows; the valid rows say after how many trees to stop."""
    names = [name for name, size in inputs.id_sizes.items() if size <= MOST_VALUES]
    first = len(inputs.number_names)
    data = {split: columns(inputs, split, names) for split in ("train", "valid", "test")}
    model = HistGradientBoostingClassifier(
        categorical_features=list(range(first, first + len(names))),
        max_iter=MOST_TREES,
        early_stopping=True,
        n_iter_no_change=PATIENCE,
        scoring="loss",
        l2_regularization=5.0,
        max_features=0.7,
        random_state=seed,
        **setting,
    )
    label = inputs.splits["valid"].label
    model.fit(data["train"], inputs.splits["train"].label, X_val=data["valid"], y_val=label)
    # The model keeps the trees that came after the best one.
    stages = [p[:, 1] for p in model.staged_predict_proba(data["valid"])]
    best = min(range(len(stages)), key=lambda stage: log_loss(label, stages[stage]))
    for stage, p in enumerate(model.staged_predict_proba(data["test"])):
        if stage == best:
            return {"valid": stages[best], "test": p[:, 1]}
    raise RuntimeError(f"no stage {best} of {len(stages)}")


if __name__ == "__main__":
    run_peer(fit, SETTINGS, ["scikit-learn", "numpy"])

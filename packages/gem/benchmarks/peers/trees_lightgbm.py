"""LightGBM's gradient-boosted trees on numbers, statistics and ids."""

from typing import Any

import lightgbm as lgb
import numpy as np
from inputs import Inputs, padded
from runner import run_peer

MOST_TREES = 2000
PATIENCE = 50  # trees without a better log loss on the valid rows
FEW_VALUES = 256

# "all" ids also offers inputs of many values (items, regions) as categories.
SETTINGS = [
    {"num_leaves": 8, "learning_rate": 0.05, "min_data_in_leaf": 100, "ids": "few"},
    {"num_leaves": 16, "learning_rate": 0.03, "min_data_in_leaf": 100, "ids": "few"},
    {"num_leaves": 31, "learning_rate": 0.03, "min_data_in_leaf": 50, "ids": "few"},
    {"num_leaves": 16, "learning_rate": 0.03, "min_data_in_leaf": 100, "ids": "all"},
]


def columns(inputs: Inputs, split: str, names: list[str]) -> np.ndarray:
    """Numbers, chosen ids, and one column for each value of the multi-valued inputs."""
    rows = inputs.splits[split]
    parts = [rows.numbers, *(rows.ids[name][:, None] for name in names)]
    for bag in inputs.multi:
        values = padded(rows.bags[bag], int(np.diff(rows.bags[bag][0]).max()))
        parts.append((values[:, :, None] == np.arange(2, inputs.bag_sizes[bag])).any(axis=1))
    return np.concatenate(parts, axis=1).astype(np.float32)


def fit(inputs: Inputs, setting: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Train on the training rows, stop by the valid rows."""
    names = [
        n for n, size in inputs.id_sizes.items() if setting["ids"] == "all" or size <= FEW_VALUES
    ]
    first = len(inputs.number_names)
    data = {split: columns(inputs, split, names) for split in ("train", "valid", "test")}
    train = lgb.Dataset(
        data["train"],
        inputs.splits["train"].label,
        categorical_feature=list(range(first, first + len(names))),
        free_raw_data=False,
    )
    valid = lgb.Dataset(data["valid"], inputs.splits["valid"].label, reference=train)
    parameters = {
        "objective": "binary",
        "seed": seed,
        "num_threads": 1,
        "verbosity": -1,
        "feature_fraction": 0.7,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "lambda_l2": 5.0,
        **{key: value for key, value in setting.items() if key != "ids"},
    }
    stop = lgb.early_stopping(PATIENCE, verbose=False)
    model = lgb.train(parameters, train, MOST_TREES, valid_sets=[valid], callbacks=[stop])
    return {
        split: np.asarray(model.predict(data[split], num_iteration=model.best_iteration))
        for split in ("valid", "test")
    }


if __name__ == "__main__":
    run_peer(fit, SETTINGS, ["lightgbm", "numpy"])

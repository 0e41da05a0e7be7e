"""Logistic regression on one-hot ids, pooled histories and numbers (scikit-learn)."""

from typing import Any

import numpy as np
from inputs import Inputs
from runner import run_peer
from scipy import sparse
from sklearn.linear_model import LogisticRegression

SETTINGS = [{"C": strength} for strength in (0.01, 0.03, 0.1, 0.3)]


def columns(inputs: Inputs, split: str) -> sparse.csr_matrix:
    """One column for each value of an id; numbers; histories pooled by kind of feedback.

    A value of a bag weighs 1 / sqrt(all events of its history), and each kind's share of them is a
    column too: it is how much of the candidates' kind the user liked.
    """
    rows = inputs.splits[split]
    parts = [sparse.csr_matrix(rows.numbers)] if inputs.number_names else []
    for name, size in inputs.id_sizes.items():
        ones = np.ones(rows.rows, np.float32)
        place = (np.arange(rows.rows), rows.ids[name])
        parts.append(sparse.csr_matrix((ones, place), (rows.rows, size)))
    for name in [*inputs.multi, *inputs.pooled]:
        offsets, values = rows.bags[name]
        counts = np.diff(offsets)
        whole = f"{name.partition('.')[0]}.items" if name in inputs.pooled else name
        total = np.maximum(np.diff(rows.bags[whole][0]), 1)
        weights = np.repeat(1.0 / np.sqrt(total), counts).astype(np.float32)
        bag = sparse.csr_matrix((weights, values, offsets), (rows.rows, inputs.bag_sizes[name]))
        share = sparse.csr_matrix((counts / total).astype(np.float32)[:, None])
        parts += [bag, share]
    return sparse.csr_matrix(sparse.hstack(parts))


def fit(inputs: Inputs, setting: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Train on the training rows until it converges."""
    model = LogisticRegression(solver="lbfgs", max_iter=500, random_state=seed, **setting)
    model.fit(columns(inputs, "train"), inputs.splits["train"].label)
    return {split: model.predict_proba(columns(inputs, split))[:, 1] for split in ("valid", "test")}


if __name__ == "__main__":
    run_peer(fit, SETTINGS, ["scikit-learn", "numpy", "scipy"], draws_numbers=False)

"""Deep Interest Network of DeepCTR-Torch: attention of the candidate over the whole history."""

from typing import Any

import numpy as np
import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat
from deepctr_torch.models import DIN
from inputs import Inputs, lengths, padded
from runner import EPOCHS, best_epoch, run_peer

EVENTS = 50
WIDTH = 16

SETTINGS = [
    {"lr": 1e-3, "dropout": 0.2, "batch": 256},
    {"lr": 3e-3, "dropout": 0.2, "batch": 256},
    {"lr": 1e-3, "dropout": 0.0, "batch": 256},
    {"lr": 1e-3, "dropout": 0.2, "batch": 128},
]


def features(inputs: Inputs) -> list[Any]:
    """Columns of the model. The candidate has a feedback too, of which nothing is known yet."""
    item = inputs.item
    found: list[Any] = [SparseFeat(name, size, WIDTH) for name, size in inputs.id_sizes.items()]
    found.append(SparseFeat("feedback", inputs.bag_sizes["history0.feedback"], WIDTH))
    if inputs.number_names:
        found.append(DenseFeat("numbers", len(inputs.number_names)))
    for name, key, table in (("items", item, item), ("feedback", "feedback", "feedback")):
        size = inputs.bag_sizes[f"history0.{name}"]
        event = SparseFeat(f"hist_{key}", size, WIDTH, embedding_name=table)
        found.append(VarLenSparseFeat(event, EVENTS, length_name="events"))
    for name in _bags(inputs):
        table = item if name in inputs.pooled else name
        value = SparseFeat(
            _plain(name), inputs.bag_sizes[name], WIDTH, embedding_name=_plain(table)
        )
        found.append(VarLenSparseFeat(value, _longest(inputs, name), "mean"))
    return found


def columns(inputs: Inputs, split: str) -> dict[str, np.ndarray]:
    """What the model reads of a split."""
    rows = inputs.splits[split]
    found: dict[str, np.ndarray] = dict(rows.ids)
    found["feedback"] = np.ones(rows.rows, np.int64)
    if inputs.number_names:
        found["numbers"] = rows.numbers
    found[f"hist_{inputs.item}"] = padded(rows.bags["history0.items"], EVENTS)
    found["hist_feedback"] = padded(rows.bags["history0.feedback"], EVENTS)
    found["events"] = lengths(rows.bags["history0.items"], EVENTS)
    for name in _bags(inputs):
        found[_plain(name)] = padded(rows.bags[name], _longest(inputs, name))
    return {name: values.astype(np.float32) for name, values in found.items()}


def fit(inputs: Inputs, setting: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Train in shuffled order, for one epoch or until the valid rows get no better."""
    torch.set_num_threads(1)
    model = DIN(
        features(inputs),
        [inputs.item, "feedback"],
        dnn_hidden_units=(256, 128, 64),
        dnn_use_bn=True,
        att_hidden_size=(32, 16),
        att_activation="relu",
        att_weight_normalization=True,
        dnn_dropout=setting["dropout"],
        init_std=0.01,
        seed=seed,
    )
    model.compile(torch.optim.Adam(model.parameters(), lr=setting["lr"]), "binary_crossentropy")
    label = inputs.splits["train"].label

    def train() -> None:
        model.fit(columns(inputs, "train"), label, batch_size=setting["batch"], epochs=1, verbose=0)

    def predict() -> dict[str, np.ndarray]:
        splits = ("valid", "test")
        return {split: model.predict(columns(inputs, split), 2048)[:, 0] for split in splits}

    return best_epoch(inputs.splits["valid"].label, setting[EPOCHS], train, predict)


def _bags(inputs: Inputs) -> list[str]:
    # What happened on the attended events is in the attention; other histories are pooled.
    return [*inputs.multi, *(n for n in inputs.pooled if not n.startswith("history0."))]


def _longest(inputs: Inputs, name: str) -> int:
    if name in inputs.pooled:
        return EVENTS
    return max(int(np.diff(rows.bags[name][0]).max()) for rows in inputs.splits.values())


def _plain(name: str) -> str:
    return name.replace(".", "_")  # a module's name holds no dot


if __name__ == "__main__":
    run_peer(fit, SETTINGS, ["deepctr-torch", "torch", "numpy"], counts_epochs=True)

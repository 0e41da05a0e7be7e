"""Reads the flat inputs in a peer's environment, where GEM is not installed. Needs numpy alone.

``flat_inputs.py`` of the benchmarks writes what this reads. Ids are positions in a vocabulary of
the training rows: 0 pads, 1 stands for whatever training has not seen.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LIMIT = 5.0  # scaled numbers are cut to [-LIMIT, LIMIT]


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of one split whose label is known, or all.

    Attributes:
        label: float32 (rows,).
        numbers: float32 (rows, columns).
        ids: single-valued input -> int64 (rows,).
        bags: name -> (offsets, values): multi-valued inputs and histories, oldest event first.
    """

    label: np.ndarray
    numbers: np.ndarray
    ids: dict[str, np.ndarray]
    bags: dict[str, tuple[np.ndarray, np.ndarray]]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.label)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a peer reads for one task.

    Attributes:
        number_names: of the columns of ``numbers``.
        id_sizes: single-valued input -> size of its vocabulary.
        bag_sizes: bag -> size of its vocabulary.
        item: the input that is the candidate, which shares its vocabulary with the histories.
        attended: bag of the candidate's kind that a model attends to, and the bag of the feedback
            on the same events.
        pooled: bags of the candidate's kind, one for each kind of feedback.
        splits: train, valid, test.
    """

    number_names: list[str]
    id_sizes: dict[str, int]
    bag_sizes: dict[str, int]
    item: str
    attended: tuple[str, str]
    pooled: list[str]
    splits: dict[str, Split]

    @property
    def multi(self) -> list[str]:
        """Bags that are inputs of the example and no history."""
        return [name for name in self.bag_sizes if not name.startswith("history")]


def read_inputs(folder: Path, task: str, variant: str) -> Inputs:
    """Read all splits for one task.

    Args:
        folder: where ``export_inputs`` wrote.
        task: label; rows where it is unknown are left out, so that all splits hold labelled rows.
        variant: ``statistics`` for all numbers, ``raw`` without the streaming statistics.

    Returns:
        the inputs, numbers scaled by mean and spread of the training rows.
    """
    meta = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))
    columns = {name: dict(np.load(folder / f"{name}.npz")) for name in ("train", "valid", "test")}
    kept = [
        place
        for place, name in enumerate(meta["numbers"])
        if variant == "statistics" or name not in meta["statistics"]
    ]
    place = meta["labels"].index(task)
    known = {name: ~np.isnan(c["labels"][:, place]) for name, c in columns.items()}
    numbers = _scaled({n: c["numbers"][known[n]][:, kept] for n, c in columns.items()})
    pooled = _split_by_feedback(meta, columns)
    bag_sizes = {f["name"]: f["size"] for f in meta["ids"] if f["multi"]}
    first = meta["histories"][0]
    bag_sizes |= {"history0.items": first["size"], "history0.feedback": first["feedback_size"]}
    bag_sizes |= pooled
    splits = {
        name: Split(
            label=c["labels"][known[name], place],
            numbers=numbers[name],
            ids={
                f["name"]: c[f"ids.{f['name']}"][known[name]] for f in meta["ids"] if not f["multi"]
            },
            bags={bag: _rows_of(_bag(c, bag), known[name]) for bag in bag_sizes},
        )
        for name, c in columns.items()
    }
    return Inputs(
        number_names=[meta["numbers"][k] for k in kept],
        id_sizes={f["name"]: f["size"] for f in meta["ids"] if not f["multi"]},
        bag_sizes=bag_sizes,
        item=meta["item"],
        attended=("history0.items", "history0.feedback"),
        pooled=list(pooled),
        splits=splits,
    )


def padded(bag: tuple[np.ndarray, np.ndarray], length: int) -> np.ndarray:
    """The last ``length`` values of each row, followed by zeros.

    Args:
        bag: offsets and values.
        length: columns of the result.

    Returns:
        int64 (rows, length).
    """
    offsets, values = bag
    counts = np.minimum(np.diff(offsets), length)
    place = np.arange(length)
    there = place < counts[:, None]
    source = (offsets[1:] - counts)[:, None] + place
    return np.where(there, values[np.where(there, source, 0)], 0) if len(values) else there * 0


def lengths(bag: tuple[np.ndarray, np.ndarray], length: int) -> np.ndarray:
    """Number of values of each row, at most ``length``; int64 (rows,)."""
    return np.minimum(np.diff(bag[0]), length)


def _bag(columns: dict[str, np.ndarray], name: str) -> tuple[np.ndarray, np.ndarray]:
    key = name if name.startswith("history") else f"ids.{name}"
    events = key.replace(".feedback", ".items")  # the feedback has the layout of its events
    return columns[f"{events}.offsets"], columns[key]


def _rows_of(
    bag: tuple[np.ndarray, np.ndarray], known: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    offsets, values = bag
    counts = np.where(known, np.diff(offsets), 0)
    kept = np.repeat(known, np.diff(offsets))
    return np.append(0, np.cumsum(counts[known])), values[kept]


def _scaled(numbers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    train = numbers["train"].astype(np.float64)
    mean, spread = train.mean(axis=0), train.std(axis=0)
    spread[spread == 0.0] = 1.0
    return {
        name: np.clip((values - mean) / spread, -LIMIT, LIMIT).astype(np.float32)
        for name, values in numbers.items()
    }


def _split_by_feedback(
    meta: dict[str, Any], columns: dict[str, dict[str, np.ndarray]]
) -> dict[str, int]:
    """Add a bag for each kind of feedback of each history; name -> size of its vocabulary."""
    sizes = {}
    for history in meta["histories"]:
        name = history["name"]
        if history["feedback_size"] is None:
            sizes[f"{name}.items"] = history["size"]
            continue
        for kind in range(2, history["feedback_size"]):  # 0 pads, 1 is unseen in training
            bag = f"{name}.kind{kind}"
            sizes[bag] = history["size"]
            for c in columns.values():
                offsets, items = c[f"{name}.items.offsets"], c[f"{name}.items"]
                of_kind = c[f"{name}.feedback"] == kind
                running = np.append(0, np.cumsum(of_kind))
                c[f"{bag}.offsets"], c[bag] = running[offsets], items[of_kind]
    return sizes

"""Inputs of a recipe as flat columns, for models that are not ours.

Reads every split through the reader that feeds `gem train`, so numbers, streaming statistics, ids
and histories are those of the recipe, row by row. Ids become positions in a vocabulary of the
training rows: 0 pads, 1 stands for whatever training has not seen. `peers/inputs.py` reads what
this writes, with numpy alone.

Left out: the continuous fields of single events and their ages; no peer takes them.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gem.config import RunConfig
from gem.data.batch import ExampleBatch
from gem.data.prepare import default_folder, provide
from gem.data.reader import Reader, open_reader
from gem.train.run import DATA_ROOT
from gem_jagged.batch import Jagged

SPLITS = ("train", "valid", "test")
META_FILE = "inputs.json"
UNSEEN = 1
_BATCH_EXAMPLES = 4096
_LAYOUT = 1  # raised when the files change


@dataclass(frozen=True, slots=True)
class History:
    """One event sequence that peers read.

    Attributes:
        stream: of the recipe.
        item: id field of an event; looks up the table of the candidate.
        feedback: id field that says what the user did, or None.
    """

    stream: str
    item: str
    feedback: str | None = None


def export_inputs(
    config: RunConfig, histories: Sequence[History], folder: Path, *, data_root: Path = DATA_ROOT
) -> dict[str, Any]:
    """Write the inputs of all splits, unless the folder holds them already.

    Args:
        config: the recipe.
        histories: event sequences to write; the first is the one that a model attends to.
        folder: where to; replaced if it holds the inputs of another recipe.
        data_root: where data sets lie that the recipe names no folder for.

    Returns:
        The content of ``inputs.json``: names and sizes of everything.

    Raises:
        ConfigError, DataError: as `gem train`.
    """
    provide(config.data, data_root)
    source = default_folder(config.data, data_root)
    stamp = _stamp(config, histories, source)
    meta_file = folder / META_FILE
    if meta_file.is_file():
        meta = json.loads(meta_file.read_text(encoding="utf-8"))
        if meta["stamp"] == stamp:
            return meta
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reader = open_reader(source, config.data, batch_size=_BATCH_EXAMPLES)
    splits = {split: _split(reader, histories, split) for split in SPLITS}
    tables = _tables(reader, histories)
    vocabularies = _vocabularies(splits["train"], tables)
    for split, columns in splits.items():
        for name, table in tables.items():
            columns[name] = _positions(columns[name], vocabularies[table])
        np.savez(folder / f"{split}.npz", **columns)
    meta = _meta(config, reader, histories, vocabularies)
    meta |= {"stamp": stamp, "rows": {split: len(c["row"]) for split, c in splits.items()}}
    meta_file.write_text(json.dumps(meta, indent=1), encoding="utf-8")
    return meta


def _stamp(config: RunConfig, histories: Sequence[History], source: Path) -> str:
    """Digest of all that decides the files, but for the code of the reader itself."""
    parts = {
        "layout": _LAYOUT,
        "data": config.data.model_dump(mode="json"),
        "histories": [asdict(history) for history in histories],
        "dataset": (source / "dataset.toml").read_text(encoding="utf-8"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _split(reader: Reader, histories: Sequence[History], split: str) -> dict[str, np.ndarray]:
    parts: dict[str, list[np.ndarray]] = {}
    for batch in reader.batches(split):
        for name, values in _columns(reader, histories, batch):
            parts.setdefault(name, []).append(values)
    columns = {name: np.concatenate(values) for name, values in parts.items()}
    for name in [name for name in columns if name.endswith(".lengths")]:
        offsets = np.zeros(len(columns[name]) + 1, np.int64)
        np.cumsum(columns.pop(name), out=offsets[1:])
        columns[name.removesuffix("lengths") + "offsets"] = offsets
    return columns


def _columns(
    reader: Reader, histories: Sequence[History], batch: ExampleBatch
) -> Iterator[tuple[str, np.ndarray]]:
    yield "row", batch.row_B.numpy()
    yield "user", batch.user_B.numpy()
    yield "numbers", batch.numbers_BD.numpy()
    yield (
        "labels",
        np.where(batch.label_mask_BA.numpy(), batch.labels_BA.numpy(), np.float32("nan")),
    )
    for field in reader.schema.ids:
        yield from _id_columns(f"ids.{field.name}", batch.ids[field.name], multi=field.multi)
    for place, history in enumerate(histories):
        stream = batch.streams[history.stream]
        name = f"history{place}"
        yield from _id_columns(f"{name}.items", stream.ids[history.item], multi=True)
        if history.feedback is not None:
            yield f"{name}.feedback", stream.ids[history.feedback].values.numpy()


def _id_columns(name: str, ids: Jagged, *, multi: bool) -> Iterator[tuple[str, np.ndarray]]:
    yield name, ids.values.numpy()
    if multi:
        yield f"{name}.lengths", ids.lengths.numpy()


def _tables(reader: Reader, histories: Sequence[History]) -> dict[str, str]:
    """Column of ids -> table."""
    tables = {f"ids.{field.name}": field.table for field in reader.schema.ids}
    for place, history in enumerate(histories):
        fields = next(s for s in reader.schema.streams if s.name == history.stream).ids
        for role in ("item", "feedback"):
            wanted = getattr(history, role)
            if wanted is not None:
                column = f"history{place}.{'items' if role == 'item' else role}"
                tables[column] = next(field.table for field in fields if field.name == wanted)
    return tables


def _vocabularies(train: dict[str, np.ndarray], tables: dict[str, str]) -> dict[str, np.ndarray]:
    """Table -> the ids that the training rows hold, sorted."""
    seen: dict[str, list[np.ndarray]] = {}
    for name, table in tables.items():
        seen.setdefault(table, []).append(np.unique(train[name]))
    return {table: np.unique(np.concatenate(parts)) for table, parts in seen.items()}


def _positions(ids: np.ndarray, vocabulary: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(vocabulary, ids), len(vocabulary) - 1)
    return np.where(vocabulary[place] == ids, place + UNSEEN + 1, UNSEEN)


def _meta(
    config: RunConfig,
    reader: Reader,
    histories: Sequence[History],
    vocabularies: dict[str, np.ndarray],
) -> dict[str, Any]:
    sizes = {table: len(found) + UNSEEN + 1 for table, found in vocabularies.items()}
    tables = _tables(reader, histories)
    statistics = {statistic.name for statistic in config.data.statistics}
    return {
        "recipe": config.name,
        "labels": list(reader.schema.labels),
        "numbers": list(reader.schema.numbers),
        "statistics": [name for name in reader.schema.numbers if name in statistics],
        "ids": [
            {
                "name": field.name,
                "table": field.table,
                "size": sizes[field.table],
                "multi": field.multi,
            }
            for field in reader.schema.ids
        ],
        "item": reader.schema.item,
        "histories": [
            {
                "name": f"history{place}",
                "stream": history.stream,
                "table": tables[f"history{place}.items"],
                "size": sizes[tables[f"history{place}.items"]],
                "feedback_size": None
                if history.feedback is None
                else sizes[tables[f"history{place}.feedback"]],
            }
            for place, history in enumerate(histories)
        ],
    }

"""`gem predict`: the probabilities of a trained model for every example of a split, in Parquet.

One row an example, in the order of the log, written batch by batch: what is in memory at a time
does not grow with the log. The folder is complete or not there. Left out: metrics of their own;
those in ``predictions.json`` come from the one evaluation path.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gem import __version__
from gem.data.dataset import Dataset
from gem.data.names import suggestion
from gem.data.prepare import default_folder
from gem.data.whole_folder import begin_folder, complete_folder, hidden_folder, is_free
from gem.train.averages import averaged_weights
from gem.train.evaluate import ParquetRows, Predictions, constant_column, domain_column
from gem.train.held_out import HELD_OUT, evaluate_splits
from gem.train.model_fingerprint import fingerprint_of
from gem.train.progress import Display
from gem.train.progressive import predict_progressively
from gem.train.run import DATA_ROOT, PREDICTIONS_FILE, Run
from gem.train.saved_run import SavedRun, saved_run
from gem.train.summary import write_json
from gem_opkit.errors import ConfigError, DataError, refusal

MANIFEST_FILE = "predictions.json"
FORMAT = 1


def predict(
    run: Path,
    out: Path,
    *,
    embeddings: bool = False,
    splits: Sequence[str] = HELD_OUT,
    progressive: bool = False,
    display: Display | None = None,
    data_root: Path = DATA_ROOT,
) -> dict[str, Any]:
    """Write the predictions of a run's newest complete checkpoint.

    ``predictions.parquet`` has the columns ``split``, ``row`` (position in the log), ``user``,
    ``item`` (where the data set names one), ``time_ms``, ``domain``, and for each task ``p_<task>``
    (float32), ``label_<task>`` (float32, null where unknown) and ``known_<task>``; with
    ``embeddings`` also ``embedding``, a list of float32 of fixed length.

    Args:
        run: the run's folder, or one of its checkpoints.
        out: folder of the predictions; new or empty.
        embeddings: also write each example's representation: the vector that the heads read. A
            linear shortcut from the continuous inputs to the logits, where the recipe has one, is
            not in it.
        splits: names of splits of the data set. Rows of ``train`` were trained on, so their
            predictions are better than those of new rows, unless they are progressive.
        progressive: predict each row of ``train`` by the newest checkpoint that had learned from
            nothing known later than the row; rows before the first one are left out. What a
            student may learn from.
        display: shows the progress; none: silent.
        data_root: as in `gem.train.loop.train`.

    Returns:
        The content of ``predictions.json``: ``{format, version, dataset, recipe, seed, checkpoint,
        fingerprint, steps, total_steps, finished, averaged_weights, progressive, tasks, domains,
        splits -> rows, embedding_dim, metrics}``. ``fingerprint`` is that of the weights of the
        newest checkpoint. ``finished`` is False where the run had steps to go.

    Raises:
        ConfigError: no run there, an unknown split, or a folder in use.
        DataError: as `gem.train.held_out.evaluate_folder`.
    """
    _check_out(out)
    with saved_run(run, command="gem predict", display=display, data_root=data_root) as saved:
        _check_splits(splits, saved.run)
        with _whole_or_absent(out, write=saved.run.world.is_first) as work:
            taken = _Asked(tuple(splits), embeddings=embeddings, progressive=progressive)
            manifest = _write(saved, work, taken, data_root)
        rows = sum(manifest["splits"].values())
        saved.run.display.stage(f"{rows:,} predictions in {out / PREDICTIONS_FILE}")
        return manifest


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is written."""

    splits: tuple[str, ...]
    embeddings: bool
    progressive: bool


def _write(saved: SavedRun, work: Path, asked: _Asked, data_root: Path) -> dict[str, Any]:
    run, splits = saved.run, asked.splits
    with averaged_weights(run.step.model, run.step.ema):
        fingerprint = fingerprint_of(run.step.model) if run.world.size == 1 else None
    table = _Table(run, work / PREDICTIONS_FILE, data_root) if run.world.is_first else None
    rows = dict.fromkeys(splits, 0)
    width: int | None = None

    def take(split: str, found: Predictions) -> None:
        nonlocal width
        rows[split] += len(found.row_B)
        if found.heads_BD is not None:
            width = found.heads_BD.shape[1]
        if table is not None:
            table.write(split, found)

    try:
        metrics: dict[str, Any] = {}
        by_snapshots = asked.progressive and "train" in splits
        if by_snapshots:
            metrics["train"] = predict_progressively(run, take, embeddings=asked.embeddings)
        others = [split for split in splits if split != "train" or not by_snapshots]
        metrics |= evaluate_splits(run, others, sink=take, embeddings=asked.embeddings)
    finally:
        if table is not None:
            table.close()
    manifest = {
        "format": FORMAT,
        "version": __version__,
        "dataset": run.reader.dataset.name,
        "recipe": run.config.name,
        "seed": run.config.seed,
        "checkpoint": str(saved.checkpoint),
        "fingerprint": fingerprint,
        "progressive": asked.progressive,
        "steps": run.state.step,
        "total_steps": run.total_steps,
        "finished": saved.finished,
        "averaged_weights": bool(run.step.ema),
        "tasks": list(run.reader.schema.labels),
        "domains": list(run.reader.schema.domains),
        "splits": rows,
        "embedding_dim": width,
        "metrics": metrics,
    }
    if run.world.is_first:
        write_json(work / MANIFEST_FILE, manifest)
    return manifest


class _Table:
    """The wide table: one row an example."""

    def __init__(self, run: Run, path: Path, data_root: Path) -> None:
        self._schema = run.reader.schema
        self._rows = ParquetRows(path)
        examples = run.reader.dataset.examples
        dataset = Dataset.open(default_folder(run.config.data, data_root))
        columns = dataset.examples([n for n in (examples.time, examples.item) if n is not None])
        self._time_ms = columns[examples.time].values
        self._item = None if examples.item is None else columns[examples.item].values

    def write(self, split: str, found: Predictions) -> None:
        """Append a batch."""
        columns: dict[str, Any] = {
            "split": constant_column(split, len(found.row_B)),
            "row": pa.array(found.row_B, pa.int64()),
            "user": pa.array(found.user_B, pa.int64()),
        }
        if self._item is not None:
            columns["item"] = pa.array(self._item[found.row_B], pa.int64())
        columns["time_ms"] = pa.array(self._time_ms[found.row_B], pa.int64())
        columns["domain"] = domain_column(found.domains_B, self._schema)
        for a, task in enumerate(self._schema.labels):
            label = found.labels_BA[:, a]
            unknown = np.isnan(label)
            columns[f"p_{task}"] = pa.array(found.p_BA[:, a], pa.float32())
            columns[f"label_{task}"] = pa.array(label, pa.float32(), mask=unknown)
            columns[f"known_{task}"] = pa.array(~unknown)
        if found.heads_BD is not None:
            flat = pa.array(np.ascontiguousarray(found.heads_BD).reshape(-1), pa.float32())
            width = found.heads_BD.shape[1]
            columns["embedding"] = pa.FixedSizeListArray.from_arrays(flat, width)
        self._rows.write(pa.table(columns))

    def close(self) -> None:
        """Write what waits."""
        self._rows.close()


def _check_out(out: Path) -> None:
    if not is_free(out):
        link = "is a link that leads nowhere" if out.is_symlink() else "is no folder"
        what = "is not empty" if out.is_dir() else link
        raise ConfigError(
            refusal(
                "gem predict",
                "--out",
                must="be a new or an empty folder",
                got=f"{out}, which {what}",
                fix="choose another --out",
            )
        )


def _check_splits(splits: Sequence[str], run: Run) -> None:
    known = [split.name for split in run.reader.dataset.splits]
    for place, split in enumerate(splits):
        if split in splits[:place]:
            raise ConfigError(
                refusal(
                    "gem predict",
                    "--split",
                    must="name each split once",
                    got=f"{split!r} twice",
                    fix="remove one of them",
                )
            )
        # valid and test are asked for by default, and a data set may lack one of them.
        if split not in known and split not in HELD_OUT:
            raise ConfigError(
                refusal(
                    "gem predict",
                    "--split",
                    must=f"be one of {', '.join(known)}",
                    got=repr(split) + suggestion(split, known),
                    fix="correct the name",
                )
            )
    if not any(run.reader.rows(split) for split in splits if split in known):
        raise DataError(
            refusal(
                "gem predict",
                "--split",
                must="have rows to predict",
                got=f"none in {', '.join(splits)} of {run.reader.dataset.name}",
                fix=f"take another of its splits: {', '.join(known)}",
            )
        )


@contextmanager
def _whole_or_absent(out: Path, *, write: bool) -> Iterator[Path]:
    """A hidden folder whose files come to ``out`` when the block ends well, and go otherwise."""
    if not write:
        yield hidden_folder(out)
        return
    work = begin_folder(out)
    try:
        yield work
        complete_folder(work, out, last=MANIFEST_FILE)
    finally:
        shutil.rmtree(work, ignore_errors=True)

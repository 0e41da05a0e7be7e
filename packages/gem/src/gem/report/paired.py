"""Whether two models differ by more than chance on the same rows: a paired bootstrap of NE.

The interval covers the draw of the rows alone: not the choice of settings, nor other data, nor that
rows of one user depend on each other.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem.train.normalized_entropy import CLIP, binary_entropy
from gem_opkit.errors import DataError, refusal

RESAMPLES = 10_000
Losses = dict[str, np.ndarray]
_CHUNK = 100
_MOST_AT_ONCE = 20_000_000  # rows drawn at a time: some hundred MB
_PREDICTIONS = "predictions.parquet"
_COLUMNS = ("split", "task", "row", "label", "p")


def task_losses(run: Path, task: str, *, split: str = "test") -> Losses:
    """Read the labelled predictions of a run.

    Args:
        run: folder of a run with ``predictions.parquet`` (``train.predictions``, or
            ``gem eval --predictions``).
        task: whose.
        split: which rows.

    Returns:
        ``row``, ``label`` and ``loss`` of each row, in row order, as `row_losses`.

    Raises:
        DataError: the run has no predictions, a file that cannot be read, or none of that task and
            split.
    """
    path = run / _PREDICTIONS
    if not path.is_file():
        raise DataError(
            refusal(
                "paired",
                "run",
                must=f"hold {_PREDICTIONS}",
                got=str(run),
                fix=f"write them with gem eval {run} --predictions",
            )
        )
    try:
        table = pq.read_table(path, columns=list(_COLUMNS)).select(_COLUMNS).to_pydict()
    except (pa.ArrowException, KeyError, OSError) as fault:
        raise DataError(
            refusal(
                "paired",
                f"{path}",
                must=f"be a Parquet file with {', '.join(_COLUMNS)}",
                got=str(fault).partition("\n")[0],
                fix=f"write it again with gem eval {run} --predictions",
            )
        ) from fault
    kept = [
        (row, label, p)
        for part, name, row, label, p in zip(
            table["split"], table["task"], table["row"], table["label"], table["p"], strict=True
        )
        if part == split and name == task and label is not None
    ]
    if not kept:
        raise DataError(
            refusal(
                "paired",
                f"{path}",
                must=f"hold labelled rows of task {task!r} in split {split!r}",
                got="none",
                fix="compare a task and a split that it has",
            )
        )
    rows, labels, p = (np.array(column) for column in zip(*kept, strict=True))
    return row_losses(rows, labels, p)


def row_losses(rows: np.ndarray, labels: np.ndarray, p: np.ndarray) -> Losses:
    """Compute the log loss of predictions, clipped as the metrics clip.

    Args:
        rows: number of each row, int, in order.
        labels: in [0, 1].
        p: predicted probabilities.

    Returns:
        ``row`` int64, ``label`` and ``loss`` float64.
    """
    labels = labels.astype(np.float64)
    p = np.clip(p.astype(np.float64), CLIP, 1.0 - CLIP)
    loss = -(labels * np.log(p) + (1.0 - labels) * np.log1p(-p))
    return {"row": rows.astype(np.int64), "label": labels, "loss": loss}


def paired_bootstrap(
    first: Sequence[Losses], second: Sequence[Losses], *, seed: int = 1
) -> dict[str, Any]:
    """Resample the rows and compare NE, each side's loss averaged over its runs.

    Args:
        first: one entry a run, such as the seeds of a recipe; all on the same rows.
        second: the other side.
        seed: of the resampling.

    Returns:
        ``ne_difference``, first - second (below 0: the first is better), its 95 % interval
        ``low_95`` and ``high_95``, ``first_better_frac``, the share of resamples in which the
        first is better, ``resamples``, those in which not all labels agree, and ``rows``.

    Raises:
        DataError: the runs are not on the same rows, or these are of one label alone.
    """
    return paired_bootstraps([first], second, seed=seed)[0]


def paired_bootstraps(
    several: Sequence[Sequence[Losses]],
    base: Sequence[Losses],
    *,
    seed: int = 1,
    resamples: int = RESAMPLES,
) -> list[dict[str, Any]]:
    """Compare several models with one, all on the same resamples.

    Args:
        several: as the first of `paired_bootstrap`, one entry a model.
        base: what they are compared with.
        seed: of the resampling.
        resamples: how many; rounded up to whole chunks.

    Returns:
        one comparison for each model, the same as alone.

    Raises:
        DataError: the runs are not on the same rows, or these have other labels in one of them.

    Cost: about a second for 10,000 rows, whatever the number of models.
    """
    rows = base[0]["row"]
    if any(not np.array_equal(run["row"], rows) for runs in (*several, base) for run in runs):
        raise DataError(
            refusal(
                "paired_bootstrap",
                "runs",
                must="be on the same rows",
                got=f"{len(rows)} rows in one, others elsewhere",
                fix="compare runs on one data set and split",
            )
        )
    label = base[0]["label"]
    if any(not np.array_equal(run["label"], label) for runs in (*several, base) for run in runs):
        raise DataError(
            refusal(
                "paired_bootstrap",
                "runs",
                must="have the same labels, as a loss on others does not compare",
                got="a row with one label here and another one there",
                fix="compare runs on one data set and task",
            )
        )
    own = np.mean([run["loss"] for run in base], axis=0)
    gaps = [np.mean([run["loss"] for run in runs], axis=0) - own for runs in several]
    columns = np.stack([label, *gaps], axis=1)
    rng = np.random.default_rng(seed)
    chunk = max(1, min(_CHUNK, _MOST_AT_ONCE // len(rows)))
    resamples = -(-resamples // chunk) * chunk
    found = np.empty((resamples, len(several)))
    offset = np.arange(chunk)[:, None] * len(rows)
    for begin in range(0, resamples, chunk):
        picked = rng.integers(0, len(rows), (chunk, len(rows)), dtype=np.int32)
        # How often each row is in each resample: its sums are then one product for all models.
        counts = np.bincount((picked + offset).ravel(), minlength=chunk * len(rows))
        means = counts.reshape(chunk, len(rows)) @ columns / len(rows)
        entropies = np.array([binary_entropy(rate) for rate in means[:, 0]])
        # NE is not defined where all labels agree; few rows may be drawn so.
        entropies[entropies == 0.0] = np.nan
        found[begin : begin + chunk] = means[:, 1:] / entropies[:, None]
    found = found[~np.isnan(found).any(axis=1)]
    if not len(found):
        raise DataError(
            refusal(
                "paired_bootstrap",
                "labels",
                must="hold positive and negative rows",
                got=f"{len(rows)} rows of one kind",
                fix="compare on more rows",
            )
        )
    low, high = np.quantile(found, [0.025, 0.975], axis=0)
    entropy = binary_entropy(float(label.mean()))
    return [
        {
            "ne_difference": float(gap.mean() / entropy),
            "low_95": float(low[place]),
            "high_95": float(high[place]),
            "first_better_frac": float((found[:, place] < 0).mean()),
            "resamples": len(found),
            "rows": len(rows),
        }
        for place, gap in enumerate(gaps)
    ]

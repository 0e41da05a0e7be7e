"""A tiny run as an artefact, and the rows that it can be asked about."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from gem.data.prepare import default_folder
from gem.serving.example import RequestMaker
from gem.serving.export import export
from gem.train.loop import train
from gem.train.predict import predict

# Sixteen steps of float32 below 1: sums over other numbers of rows are taken in another order.
ROUNDING = 2.0**-20
# Two steps are enough to move every weight.
SHORT = ("train.batch_examples=160", "train.checkpoint_every_steps=100")


class Served:
    """A run, its artefact, and what `gem predict` says of its held-out rows."""

    def __init__(self, config, folder: Path, data_root: Path, how=train) -> None:
        self.config, self.run, self.artefact = config, folder / "run", folder / "artefact"
        how(config, self.run, data_root=data_root)
        self.manifest = export(self.run, self.artefact, data_root=data_root)
        predict(self.run, folder / "predictions", data_root=data_root)
        table = pq.read_table(folder / "predictions" / "predictions.parquet")
        self.rows = table.column("row").to_numpy()
        tasks = self.manifest.inputs.labels
        self.p_BA = np.stack([table.column(f"p_{task}").to_numpy() for task in tasks], axis=1)
        self.maker = RequestMaker(default_folder(config.data, data_root), config.data)

    def scores(self, ranker, rows) -> np.ndarray:
        """Scores of rows of one user and time, (rows, tasks)."""
        answer = ranker.score(self.maker.request([int(row) for row in rows]))
        return np.asarray(list(answer.scores.values())).T


def many_events(rng, count: int, now: int = 1_800_000_000_000) -> dict[str, list[int]]:
    """A history of impressions of the tiny data set."""
    return {
        "time_ms": np.sort(now - rng.integers(1, 10**9, count)).tolist(),
        "item_id": rng.integers(1, 31, count).tolist(),
        "feedback": rng.integers(1, 3, count).tolist(),
    }

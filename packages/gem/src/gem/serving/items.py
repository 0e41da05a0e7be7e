"""`gem export-items`: the vectors of all items, of a model of users."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from gem.model.gem import GemModel
from gem.serving.request_reader import rows_of_jagged
from gem.serving.retrieval import Vectors, write_vectors
from gem.train.averages import averaged_weights
from gem.train.model_fingerprint import fingerprint_of
from gem.train.progress import Display
from gem.train.run import DATA_ROOT
from gem.train.saved_run import saved_run
from gem.train.whole_file import check_new, partial_of
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, refusal

_ITEMS = 4_096


def export_items(
    run: Path, out: Path, *, display: Display | None = None, data_root: Path = DATA_ROOT
) -> Vectors:
    """Write the vectors of the items of a run's data set.

    Args:
        run: folder of a run of a model of users, or one of its checkpoints.
        out: Parquet file with the columns ``item`` and ``embedding``; must not be there.
        display: shows the progress; none: silent.
        data_root: as in `gem.train.loop.train`.

    Returns:
        the vectors: their dot product with the embedding of a user is the score of the item as
        that user's next one, but for a factor that is the same for all.

    Raises:
        ConfigError: the file is there, or the run is of another kind of model.
        DataError: no complete checkpoint, or the data set is missing or another one.
    """
    check_new(out, command="gem export-items")
    with saved_run(run, command="gem export-items", display=display, data_root=data_root) as saved:
        model = saved.run.step.model
        if not isinstance(model, GemModel) or model.spec.user_model is None:
            raise ConfigError(
                refusal(
                    "gem export-items",
                    "RUN",
                    must="be of a model of users (model.user_model), which has vectors of items",
                    got=f"a run of {saved.run.config.name}",
                    fix="train one, as the recipe synthetic-user does",
                )
            )
        with averaged_weights(model, saved.run.step.ema):
            keys, ids = saved.run.reader.as_of().items()
            found = Vectors(keys, _vectors(model, ids, len(keys)), fingerprint_of(model))
    partial = partial_of(out)
    try:
        write_vectors(partial, "item", found)
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return found


def _vectors(model: GemModel, ids: Mapping[str, Jagged], count: int) -> np.ndarray:
    """Vectors of all items, float32 (count, D), some thousand at a time."""
    device = next(model.parameters()).device
    found = []
    with torch.inference_mode():
        for low in range(0, count, _ITEMS):
            high = min(low + _ITEMS, count)
            part = {n: rows_of_jagged(field, low, high).to(device) for n, field in ids.items()}
            found.append(model.item_vectors(part).cpu().numpy())
    width = model.spec.user_model.width if model.spec.user_model is not None else 0
    return np.concatenate(found) if found else np.zeros((0, width), np.float32)

"""Load of long histories: The Complete Journey, up to 4,193 purchases of a household before a row.

    python packages/gem/benchmarks/bench_long_histories.py [--rows 2048] [--max-events 4193]

The raw files are fetched (32 MB). The rows that are read and trained on lie late in the year, where
histories are long; the whole log lies before them. Writes results/cpu/long_histories.jsonl.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gem.config import load_recipe
from gem.data.dataset import Dataset
from gem.data.prepare import prepare
from gem.data.reader import open_reader
from gem.data.toml_text import toml_text
from gem.train.loop import train
from gem_opkit.bench import provenance, write_rows

RESULTS = Path(__file__).parents[3] / "results" / "cpu" / "long_histories.jsonl"
RECIPE, STREAM = "complete-journey", "purchases"


def late_rows(whole: Path, folder: Path, rows: int) -> Path:
    """The same log, of which only the last rows before the test period train.

    Args:
        whole: the prepared data set.
        folder: for the one with other splits; its files are links.
        rows: to train on; a quarter as many are valid, and as many the test.

    Returns:
        the folder.
    """
    spec = Dataset.open(whole).spec
    end = spec.examples.rows
    bounds = [end - rows - rows // 2, end - rows // 2, end - rows // 4, end]
    splits = tuple(
        split.model_copy(update={"start": start, "stop": stop})
        for split, start, stop in zip(spec.splits, bounds, bounds[1:], strict=False)
    )
    folder.mkdir()
    for part in ("examples", "events", "entities"):
        (folder / part).symlink_to(whole / part)
    other = spec.model_copy(update={"splits": splits})
    text = toml_text(other.model_dump(mode="json", exclude_defaults=True))
    (folder / "dataset.toml").write_text(text, encoding="utf-8")
    return folder


def read(folder: Path, settings: list[str], batch: int) -> dict[str, Any]:
    """Read the training rows once, without a model.

    Args:
        folder: the data set.
        settings: of the recipe.
        batch: examples of one.

    Returns:
        what was read, and how fast.
    """
    data = load_recipe(RECIPE, settings).data
    # The statistics go through every row before the first one: that is not what is measured.
    data = data.model_copy(update={"statistics": ()})
    began = time.perf_counter()
    reader = open_reader(folder, data, batch_size=batch)
    opened = time.perf_counter()
    lengths = [b.streams[STREAM].numbers.lengths.numpy() for b in reader.batches("train")]
    seconds = time.perf_counter() - opened
    events = np.concatenate(lengths)
    return {
        "rows": len(events),
        "longest_history": int(events.max()),
        "median_history": float(np.median(events)),
        "open_s": opened - began,
        "tokens_per_s": float(events.sum() / seconds),
        "examples_per_s": len(events) / seconds,
    }


def main() -> None:
    """Prepare, read, train, and write a row of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--max-events", type=int, default=4193)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    console = Console()
    settings = [f"data.streams.{STREAM}.max_events={chosen.max_events}"]
    common = {"bench": "long_histories", "recipe": RECIPE, "max_events": chosen.max_events}
    with tempfile.TemporaryDirectory() as place:
        whole, late = Path(place) / "whole", Path(place) / "late"
        began = time.perf_counter()
        spec = prepare(RECIPE, whole)
        made = {"examples": spec.examples.rows, "seconds": time.perf_counter() - began}
        late_rows(whole, late, chosen.rows)
        rows = [{**common, "case": "prepare", **made}]
        rows.append({**common, "case": "read", **read(late, settings, chosen.batch)})
        console.print(rows)
        settings += [f"data.folder={late}", f"train.batch_examples={chosen.batch}"]
        config = load_recipe(RECIPE, settings)
        summary = train(config, Path(place) / "run")
        keys = ("steps", "examples", "throughput", "memory", "test")
        rows.append({**common, "case": "train", **{key: summary[key] for key in keys}})
        console.print(rows[-1])
    origin = provenance()
    write_rows(chosen.results, [{**row, "device": "cpu", **origin} for row in rows])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

"""What the reader gives a second, and what it takes of memory.

    python packages/gem/benchmarks/bench_reader.py [--memory-mib 64] [--only demo|long|memory]

Three cases. `demo`: the batches of ``ml100k-time`` with all of its statistics, from one process
and through workers. `long`: histories of 2,000 events each, no statistics, tokens a second of one
process, held and streamed. `memory`: a log of ten times the budget, indexed and read in a process
of its own, with the anonymous memory that ``/proc/self/smaps_rollup`` shows in each tenth of it.
Writes ``results/cpu/reader.jsonl``.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from gem.config import load_recipe
from gem.data.batch import ExampleBatch
from gem.data.dataset import Dataset, DatasetWriter
from gem.data.features import DatasetSpec, DataSpec
from gem.data.log import log_bytes
from gem.data.prepare import default_folder, provide
from gem.data.reader import Reader, open_reader
from gem.train.run import DATA_ROOT
from gem_opkit.bench import provenance, write_rows

RESULTS = Path(__file__).resolve().parents[3] / "results" / "cpu" / "reader.jsonl"
ITEMS, TAGS, CHUNK = 10_000, 50, 1 << 20
HISTORY = 2000
_MIB = 1 << 20


def write_log(folder: Path, *, rows: int, events: int, users: int) -> float:
    """Write a log in time order, the events spread over all users; its size decoded, in MiB."""
    random = np.random.default_rng(1)
    item, user = {"name": "item_id", "table": "item"}, {"name": "user_id", "table": "user"}
    feedback = {"name": "feedback", "table": "feedback", "visible_after_ms": 60_000}
    spec = DatasetSpec.model_validate(
        {
            "name": "bench",
            "tables": [
                {"name": "user", "num_embeddings": users},
                {"name": "item", "num_embeddings": ITEMS},
                {"name": "feedback", "num_embeddings": 3},
                {"name": "tag", "num_embeddings": TAGS},
            ],
            "entities": [
                {"name": "item", "key": "item_id", "ids": [{"name": "tag", "table": "tag"}]}
            ],
            "streams": [{"name": "views", "ids": [item, feedback], "numbers": [{"name": "dwell"}]}],
            "examples": {
                "rows": rows,
                "item": "item_id",
                "ids": [user, item],
                "numbers": [{"name": f"x{place}"} for place in range(4)],
                "labels": [{"name": "click"}],
            },
            "splits": [{"name": "train", "start": 0, "stop": rows}],
        }
    )

    def drawn(first: int, count: int, step_ms: int) -> dict[str, np.ndarray]:
        return {
            "user_id": random.integers(0, users, count),
            "item_id": random.zipf(1.2, count) % ITEMS,
            "time_ms": (first + np.arange(count)) * step_ms,
        }

    with DatasetWriter(folder) as writer:
        writer.entity("item", {"item_id": np.arange(ITEMS), "tag": np.arange(ITEMS) % TAGS})
        for first in range(0, events, CHUNK):
            count = min(CHUNK, events - first)
            shown = {"feedback": random.integers(0, 3, count)}
            shown |= {"dwell": random.random(count, np.float32)}
            writer.events("views", drawn(first, count, 10) | shown)
        for first in range(0, rows, CHUNK):
            count = min(CHUNK, rows - first)
            shown = {f"x{place}": random.random(count, np.float32) for place in range(4)}
            shown |= {"click": random.integers(0, 2, count).astype(np.float32)}
            # Examples come after the events: every history is as long as the recipe takes it.
            shown |= drawn(first, count, 10)
            shown["time_ms"] += events * 10 + 3_600_000
            writer.examples(shown)
        writer.finish(spec)
    return log_bytes(Dataset.open(folder), DataSpec(dataset=spec.name)) / _MIB


def speed(batches: Iterator[ExampleBatch], *, most_s: float = 20.0) -> dict[str, Any]:
    """Examples and tokens a second after the first batch, by the clock and by this process's."""
    next(batches)
    examples = tokens = 0
    began, began_cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        examples += batch.examples
        tokens += batch.event_tokens
        if time.perf_counter() - began > most_s:
            break
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    return {
        "examples": examples,
        "tokens": tokens,
        "seconds": seconds,
        "examples_per_s": examples / seconds,
        "tokens_per_s": tokens / seconds,
        "cpu_s": cpu,
    }


def demo() -> Iterator[dict[str, Any]]:
    """The batches of the demo: held by one process, and through one and two workers."""
    config = load_recipe("ml100k-time")
    provide(config.data, DATA_ROOT)
    folder = default_folder(config.data, DATA_ROOT)
    for workers in (0, 1, 2):
        data = config.data.model_copy(update={"workers": workers})
        reader = open_reader(folder, data, batch_size=config.train.batch_examples)
        row = {"case": f"ml100k-time, workers = {workers}", "workers": workers}
        row |= {"batch_examples": config.train.batch_examples}
        yield row | speed(reader.batches("train"))
        reader.close()


def long_histories(root: Path) -> Iterator[dict[str, Any]]:
    """Histories of 2,000 events each, from memory and mapped."""
    folder, users = root / "long", 400
    write_log(folder, rows=20_000, events=users * (HISTORY + 500), users=users)
    for memory_mib, how in ((4096, "held"), (8, "streamed")):
        reader = open_reader(folder, _recipe(memory_mib, HISTORY), batch_size=64)
        row = {"case": f"histories of {HISTORY} events, {how}", "memory_mib": memory_mib}
        measured = speed(reader.batches("train"))
        if measured["tokens"] != HISTORY * measured["examples"]:
            raise SystemExit(f"bench_reader: not all histories have {HISTORY} events: {measured}")
        yield row | {"batch_examples": 64} | measured


def memory(root: Path, memory_mib: int) -> Iterator[dict[str, Any]]:
    """A log of ten times the budget: anonymous memory in each tenth of it, index included."""
    folder, warm = root / "log", root / "warm"
    write_log(warm, rows=1000, events=1000, users=100)
    # 48 bytes an example and 36 an event, decoded; about a third is examples.
    rows, events = memory_mib * _MIB * 34 // 480, memory_mib * _MIB * 70 // 360
    size_mib = write_log(folder, rows=rows, events=events, users=100_000)
    if size_mib < 10 * memory_mib:
        raise SystemExit(f"bench_reader: the log has {size_mib} MiB, fewer than ten budgets")
    for asked, how in ((memory_mib, "streamed"), (1 << 20, "held")):
        command = [sys.executable, __file__, "--walk", str(warm), str(folder), str(asked)]
        walked = json.loads(subprocess.check_output(command, text=True))
        row = {"case": f"a log of ten times {memory_mib} MiB, {how}", "log_mib": size_mib}
        yield row | {"memory_mib": asked, "batch_examples": 4096, "events": events} | walked


def walk(warm: str, folder: str, memory_mib: int) -> dict[str, Any]:
    """Read a log in this process and watch its memory, above what the libraries take."""
    torch.set_num_threads(1)
    data = _recipe(memory_mib, 16)
    for _ in open_reader(warm, data, batch_size=4096).batches("train"):
        pass
    before, began = _anonymous_mib(), time.perf_counter()
    reader: Reader = open_reader(folder, data, batch_size=4096)
    opened_s, opened = time.perf_counter() - began, _anonymous_mib() - before
    peaks, rows, total, seconds = [0.0] * 10, 0, reader.rows("train"), 0.0
    batches = reader.batches("train")
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        seconds += time.perf_counter() - began  # to look at the memory takes time of its own
        if batch is None:
            break
        tenth = min(rows * 10 // total, 9)
        rows += batch.examples
        peaks[tenth] = max(peaks[tenth], _anonymous_mib() - before)
    return {
        "examples": rows,
        "opened_s": opened_s,
        "opened_mib": opened,
        "peak_mib_by_tenth": [round(peak, 1) for peak in peaks],
        "peak_mib": max(opened, *peaks),
        "seconds": seconds,
        "examples_per_s": rows / seconds,
    }


def _recipe(memory_mib: int, max_events: int) -> DataSpec:
    fields = ["item_id", "feedback", "tag", "dwell"]
    streams = {"views": {"max_events": max_events, "fields": fields}}
    return DataSpec.model_validate(
        {"dataset": "bench", "memory_mib": memory_mib, "streams": streams}
    )


def _anonymous_mib() -> float:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("bench_reader: the system shows no anonymous memory")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory-mib", type=int, default=64)
    parser.add_argument("--only", choices=("demo", "long", "memory"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--walk", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.walk:
        warm, folder, memory_mib = chosen.walk
        sys.stdout.write(json.dumps(walk(warm, folder, int(memory_mib))))
        return
    torch.set_num_threads(1)
    console, rows = Console(), []
    with tempfile.TemporaryDirectory() as root:
        cases = {"demo": demo(), "long": long_histories(Path(root))}
        cases |= {"memory": memory(Path(root), chosen.memory_mib)}
        for name, case in cases.items():
            for row in case if chosen.only in (None, name) else ():
                console.print(row)
                rows.append(row)
    origin = provenance()
    write_rows(
        chosen.results, [{"bench": "reader", **row, "device": "cpu", **origin} for row in rows]
    )
    console.print(f"{len(rows)} rows in {chosen.results}")


if __name__ == "__main__":
    main()

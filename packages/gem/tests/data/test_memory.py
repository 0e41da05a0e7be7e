"""Memory over a log of ten times the budget: in a process of its own, by what the system says."""

import subprocess
import sys

import numpy as np
import pytest

from gem.data.dataset import Dataset, DatasetWriter
from gem.data.features import DatasetSpec, DataSpec
from gem.data.log import log_bytes

BUDGET_MIB = 8
# A decoder holds a page of its column, of 1 MiB, as it is and as it was before decompression.
DECODER_MIB = 2
ITEMS, USERS, NUMBERS = 1000, 20_000, 4
WALK = """
import sys
from pathlib import Path

import torch

from gem.data.features import DataSpec
from gem.data.reader import open_reader


def anonymous_mib():
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024


torch.set_num_threads(1)
warm, folder, memory_mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = DataSpec.model_validate({
    "dataset": "long", "memory_mib": memory_mib,
    "streams": {"views": {"max_events": 8}},
    "statistics": [{"kind": "rate", "name": "rate", "keys": ["item_id"], "label": "click"}],
})
# What the libraries need once, whatever they read.
assert len(list(open_reader(warm, data, batch_size=4096).batches("train"))) == 1
before = anonymous_mib()
reader = open_reader(folder, data, batch_size=4096)
opened = anonymous_mib()
rows, total, peak, middle = 0, 0, opened, opened
batches = reader.batches("train") if sys.argv[4] == "all" else ()
for batch in batches:
    rows += batch.examples
    total += int(batch.row_B.sum())
    peak = max(peak, anonymous_mib())
    if rows <= reader.rows("train") // 2:
        middle = peak
assert total == rows * (rows - 1) // 2
print(rows, type(reader._sources._log).__name__, opened - before, middle - before, peak - before)
"""


def write_log(folder, rows, events):
    """In time order, as logs are: the events of a user lie all over the files."""
    random = np.random.default_rng(1)
    ids = [{"name": "user_id", "table": "user"}, {"name": "item_id", "table": "item"}]
    numbers = [{"name": f"x{place}"} for place in range(NUMBERS)]
    spec = DatasetSpec.model_validate(
        {
            "name": "long",
            "tables": [
                {"name": "user", "num_embeddings": USERS},
                {"name": "item", "num_embeddings": ITEMS},
            ],
            "streams": [{"name": "views", "ids": ids[1:], "numbers": [{"name": "dwell"}]}],
            "examples": {
                "rows": rows,
                "item": "item_id",
                "ids": ids,
                "numbers": numbers,
                "labels": [{"name": "click"}],
            },
            "splits": [{"name": "train", "start": 0, "stop": rows}],
        }
    )
    with DatasetWriter(folder) as writer:
        columns = {f"x{place}": random.random(rows, np.float32) for place in range(NUMBERS)}
        columns |= {"user_id": random.integers(0, USERS, rows)}
        columns |= {"item_id": random.integers(0, ITEMS, rows)}
        columns |= {"time_ms": np.arange(rows) * 10}
        writer.examples(columns | {"click": random.integers(0, 2, rows).astype(np.float32)})
        columns = {"user_id": random.integers(0, USERS, events)}
        columns |= {"item_id": random.integers(0, ITEMS, events)}
        columns |= {"time_ms": np.linspace(0, rows * 10, events).astype(np.int64)}
        writer.events("views", columns | {"dwell": random.random(events, np.float32)})
        writer.finish(spec)
    return log_bytes(Dataset.open(folder), DataSpec(dataset=spec.name)) / 2**20


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A log of a few rows, and one of ten times the budget."""
    root = tmp_path_factory.mktemp("long")
    write_log(root / "warm", 1000, 1000)
    assert write_log(root / "long", 300_000, 2_650_000) > 10 * BUDGET_MIB
    return str(root / "warm"), str(root / "long")


def walk(folders, memory_mib, *, reads="all"):
    """Rows, kind of log, and MiB above the imports: opened, half way and at most."""
    command = [sys.executable, "-c", WALK, *folders, str(memory_mib), reads]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    rows, kind, *grown = done.stdout.split()
    return int(rows), kind, [float(value) for value in grown]


def test_memory_is_flat_over_a_log_of_ten_times_the_budget(folders):
    """The making of the index, which is where it is opened, and the reading."""
    rows, kind, (opened, middle, peak) = walk(folders, BUDGET_MIB)
    assert (rows, kind) == (300_000, "StreamedLog")
    assert opened < BUDGET_MIB + 4 * DECODER_MIB  # columns of an event
    assert peak < BUDGET_MIB + (4 + 5 + NUMBERS) * DECODER_MIB  # and of an example
    assert peak - middle < BUDGET_MIB / 4


def test_the_measure_sees_a_log_that_is_held(folders):
    _, kind, (opened, _, _) = walk(folders, 4096, reads="nothing")
    assert kind == "WholeLog"
    assert opened > 10 * BUDGET_MIB

"""Batches that worker processes join. All of them come from the fork server of the tests."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from batch_rows import assert_equal_rows, reader, rows_of

from gem.data.loader import Prefetcher
from gem_opkit.errors import DataError

STATISTICS = [
    {"kind": "rate", "name": "rate", "keys": ["item_id"], "label": "click"},
    {
        "kind": "event",
        "name": "surprise",
        "feedback": {"stream": "views", "field": "feedback", "positive": [2], "negative": [1]},
        "base": "rate",
        "value": "residual",
    },
]
TRANSFORMS = {"surprise": {"scale": 0.25}, "rate": {"offset": 0.5}, "dwell": {"scale": 3.0}}


@pytest.fixture(autouse=True)
def _no_process_stays():
    yield
    for process in multiprocessing.active_children():
        process.join(10)
        assert not process.is_alive()


def test_batches_equal_those_without_workers(tiny, logs):
    """Of two splits, a resume, and an evaluation in the middle of a pass."""
    folder = tiny(*logs(9), train=33)
    options = {"statistics": STATISTICS, "transforms": TRANSFORMS}
    alone = reader(folder, 4, **options)
    train, test = (list(alone.batches(split)) for split in ("train", "test"))
    state = torch.get_rng_state()
    made = reader(folder, 4, workers=2, **options)
    assert made.schema == alone.schema
    batches = made.batches("train")
    begun = [next(batches) for _ in range(3)]
    assert_equal_rows(rows_of(made.batches("test")), rows_of(test))
    assert_equal_rows(rows_of([*begun, *batches]), rows_of(train))
    assert_equal_rows(rows_of(made.batches("train", start_step=5)), rows_of(train[5:]))
    views = begun[0].streams["views"]
    for member in (*views.ids.values(), views.numbers, views.gap_seconds):
        assert member.offsets_O is views.numbers.offsets_O
    assert list(made.batches("train", start_step=made.steps("train"))) == []
    made.close()
    assert not multiprocessing.active_children()
    assert_equal_rows(rows_of(made.batches("test")), rows_of(test))
    # Dropout masks of a run must not depend on how its data is read.
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_find_what_lies_relative_to_the_rank(tiny, logs, monkeypatch):
    folder = tiny(*logs(9))
    monkeypatch.chdir(folder.parent)
    made = reader(Path(folder.name), 40, workers=1, index_folder="index-of-all")
    (batch,) = made.batches("train")
    assert batch.row_B.tolist() == list(range(40))
    made.close()
    assert list(folder.parent.glob("index-of-all/tiny-*/stream-views-*"))


def test_every_row_once_from_two_ranks_of_two_workers_to_one_of_three(tiny, logs):
    """What the workers had ready and no step took is read again, by whoever reads it then."""
    folder = tiny(*logs(5))
    options = {"statistics": STATISTICS}
    whole = list(reader(folder, 6, **options).batches("train"))
    before = []
    for rank in range(2):
        with Prefetcher(reader(folder, 6, rank, 2, workers=2, **options).batches("train")) as ahead:
            before.append([next(ahead) for _ in range(3)])
    after = list(reader(folder, 6, workers=3, **options).batches("train", start_step=3))
    seen = [row for part in (*before, after) for batch in part for row in batch.row_B.tolist()]
    assert sorted(seen) == list(range(40))
    steps = list(zip(*before, strict=True))
    for step, batch in enumerate(whole[:3]):
        assert_equal_rows(rows_of(steps[step]), rows_of([batch]))
    assert_equal_rows(rows_of(after), rows_of(whole[3:]))


@pytest.mark.parametrize("victim", ["joins", "computes"])
def test_a_killed_worker_ends_the_reading_in_one_line(tiny, logs, victim):
    made = reader(tiny(*logs(9)), 1, workers=1, statistics=STATISTICS)
    with Prefetcher(made.batches("train"), depth=1) as batches:
        next(batches)
        joins, computes = sorted(multiprocessing.active_children(), key=lambda one: one.pid)
        os.kill((joins if victim == "joins" else computes).pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(DataError, match="worker process must live as long as") as fault:
            list(batches)
        assert time.monotonic() - started < 15
    assert "\n" not in str(fault.value)
    assert "data.workers=0" in str(fault.value)


def test_a_worker_that_died_while_it_waited_is_replaced(tiny, logs):
    """Between two evaluations, say: it had nothing that could be lost."""
    made = reader(tiny(*logs(9)), 8, workers=1)
    for _ in range(2):
        rows = [batch.row_B.tolist() for batch in made.batches("train")]
        assert np.concatenate(rows).tolist() == list(range(40))
        (waits,) = multiprocessing.active_children()
        waits.kill()
        waits.join(10)
    made.close()


def test_a_fault_of_the_data_is_that_of_one_process(tiny, logs):
    folder = tiny(*logs(3))
    part = folder / "examples/part-00000.parquet"
    table = pq.read_table(part)
    places = table.column("place").to_pylist()
    places[23] = 99
    changed = table.set_column(table.column_names.index("place"), "place", pa.array(places))
    pq.write_table(changed, part)
    with pytest.raises(DataError) as alone:
        reader(folder, 5)
    with pytest.raises(DataError, match="'place' in row 23 must lie") as through:
        list(reader(folder, 5, workers=1).batches("train"))
    assert str(through.value) == str(alone.value)


def test_workers_refuse_a_data_set_that_was_written_anew_since(tiny, logs):
    """They open it when a reading begins, which may be long after the rank has."""
    folder = tiny(*logs(3))
    made = reader(folder, 5, workers=1)
    part = folder / "examples/part-00000.parquet"
    pq.write_table(pq.read_table(part).slice(0, 40), part)  # of a later time is enough
    with pytest.raises(DataError, match="must stay as it is while it is read"):
        list(made.batches("train"))


def test_interrupts_are_left_to_the_rank(tiny, logs):
    """A terminal sends Ctrl-C to all of them, a scheduler SIGTERM; the step must still come."""
    made = reader(tiny(*logs(9)), 1, workers=1)
    batches = made.batches("train")
    rows = [next(batches).row_B.tolist()]
    for process in multiprocessing.active_children():
        for name in ("-INT", "-TERM"):  # a sender of its own: the rank's SIGTERM is obeyed
            subprocess.run(["kill", name, str(process.pid)], check=True)
    rows += [batch.row_B.tolist() for batch in batches]
    assert np.concatenate(rows).tolist() == list(range(40))


READS = """
import multiprocessing, sys, time
from gem.data.features import DataSpec
from gem.data.reader import open_reader

data = DataSpec.model_validate({"dataset": "tiny", "workers": 1})
batches = open_reader(sys.argv[1], data, batch_size=1).batches("train")
next(batches)
print(*(process.pid for process in multiprocessing.active_children()), flush=True)
time.sleep(60)
"""


def test_workers_of_a_killed_rank_do_not_stay(tiny, logs):
    command = [sys.executable, "-c", READS, str(tiny(*logs(9)))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        (worker,) = map(int, rank.stdout.readline().split())
        assert Path(f"/proc/{worker}").exists()
        rank.kill()
    started = time.monotonic()
    while Path(f"/proc/{worker}").exists() and time.monotonic() - started < 40:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()  # which would sleep for a minute

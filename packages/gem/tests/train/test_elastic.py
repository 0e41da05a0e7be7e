"""A rank is killed amid a step: the launcher starts all again, and the run ends as if nothing was.

Run by ``torchrun`` as a user would run it, but for the one rank that kills itself, once, between
its backward pass and its optimizers.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest

from gem.config import RunConfig
from gem.train import loop
from gem.train.loop import train
from gem.train.run_log import METRICS_FILE
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

RANKS, DYING_RANK, DYING_STEP = 4, 2, 7
PLAN = ("replicate=2", "shard=2", "table_shard=2", "table_replicate=2", "replicate_below=0")
SETTINGS = [
    *("model.dropout=0.0", "model.embeddings.initial_rows=by_place", "train.log_every_steps=1"),
    *(f"parallel.{setting}" for setting in PLAN),
]
# The copy is of the run as the dead rank left it, for other ranks to go on with.
DIES = f"""
import os, runpy, shutil, signal
from gem.train.step import TrainStep
update, first = TrainStep._update, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
def dying(self, step, *more):
    if first and step == {DYING_STEP} and self.world.rank == {DYING_RANK}:
        shutil.copytree("run", "left")
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, step, *more)
TrainStep._update = dying
runpy.run_module("gem", run_name="__main__")
"""


def unbroken_on_rank(world: World, config: RunConfig, folder, data_root):
    @contextmanager
    def these_ranks(_):
        yield world

    loop.process_group = these_ranks
    return train(config, folder, data_root=data_root)


def rows(folder, *keys):
    found = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return {row["step"]: [row[key] for key in keys] for row in found if "loss" in row}


def results(summary):
    return {key: summary[key] for key in ("progressive", "valid", "test", "examples", "steps")}


def test_after_kill_9_of_one_rank_the_run_ends_as_the_unbroken_one(tiny, tiny_file, tmp_path):
    config = tiny(*SETTINGS)
    # A root of its own: the shared one may hold data sets of other tests as well.
    data_root = tmp_path / "data"
    whole = run_ranks(unbroken_on_rank, RANKS, config, tmp_path / "whole", data_root)[0]
    (tmp_path / "dies.py").write_text(DIES)
    folder = next(data_root.glob("synthetic-*"))
    words = [f"--set={setting}" for setting in (*SETTINGS, f"data.folder={folder}")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    launch += [str(RANKS), "--max-restarts", "1", "--monitor-interval", "0.1"]
    done = subprocess.run(
        [*launch, "dies.py", "train", str(tiny_file), "--out=run", "--resume", "--json", *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    # Two starts; the ranks that lived said why they ended; a checkpoint before the kill was found.
    assert f"(exitcode: -9) local_rank: {DYING_RANK}" in done.stderr
    assert done.stderr.count("error: ") >= 1
    assert "every rank must go on to the end; got the end of another one" in done.stderr
    assert re.search(r"continue from run/checkpoints/step-[36]: step [36] of 10", done.stderr)
    assert results(json.loads(done.stdout)) == results(whole)
    expected = rows(tmp_path / "whole", "loss", "grad_norm")
    assert rows(tmp_path / "run", "loss", "grad_norm") == expected
    # One process goes on with what the four had written when the rank died.
    alone = tiny(*SETTINGS[:3])
    assert not (tmp_path / "left" / "summary.json").exists()
    again = train(alone, tmp_path / "left", resume=True, data_root=data_root)
    assert again["world_size"] == 1
    assert (again["steps"], again["examples"]) == (whole["steps"], whole["examples"])
    found = rows(tmp_path / "left", "loss", "grad_norm")
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-5), step
    for period in ("progressive", "valid", "test"):
        ne = again[period]["click"]["ne"]
        assert ne == pytest.approx(whole[period]["click"]["ne"], rel=1e-5)

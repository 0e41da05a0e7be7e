"""kill -9 of one of two GPU ranks amid a step: the job is down and up again within a minute.

As `train/test_elastic.py` has it over gloo, on NCCL, where the other rank waits on its GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gem_parallel.launch import World

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from test_plans_on_gpu import begun, learn, own_batch, recipe  # noqa: E402

DYING_STEP, STEPS, EVERY = 3, 6, 2
WITHIN_S = 60.0


@pytest.mark.gpu2
def test_after_kill_9_of_a_gpu_rank_the_job_ends_as_the_unbroken_one(tmp_path):
    world = World(device=torch.device("cuda", 0))
    step, _ = begun(recipe(None), world)
    expected = learn(step, own_batch(world), world, range(STEPS))
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    words += ["--monitor-interval", "0.1", str(HERE / "dying_rank.py")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, tmp_path, str(DYING_STEP), "cuda"],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    # The launcher names who died, and of what; the other rank, why it went.
    assert done.stderr.count("(exitcode: -9) local_rank: 1") == 1, done.stderr
    assert done.stderr.count("got the end of the process of rank 1 on host") == 1, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    # Steps since the newest checkpoint were run again, and no others.
    again = DYING_STEP - DYING_STEP % EVERY
    assert [row["step"] for row in steps] == [*range(DYING_STEP), *range(again, STEPS)]
    for row in steps:
        assert row["learned"] == pytest.approx(expected[row["step"]], rel=1e-5), row["step"]
    died = float((tmp_path / "died.txt").read_text())
    assert steps[DYING_STEP]["at"] - died < WITHIN_S

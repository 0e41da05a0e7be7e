"""Steps of a small recipe under ``torchrun``; one rank kills itself amid a step, once.

    torchrun --nproc-per-node 2 --max-restarts 1 dying_rank.py FOLDER DYING_STEP cuda

Batches are drawn in memory, so that a GPU machine needs no data set. Each start goes on from the
newest whole checkpoint in FOLDER; the first rank writes there what each step has learned. Without
a rank that dies DYING_STEP is -1.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from test_plans_on_gpu import begun, learn, own_batch, recipe

from gem.train.checkpoint import latest_complete, load_checkpoint
from gem.train.checkpoint_writer import save_checkpoint
from gem.train.interrupt import StopRequest
from gem_parallel.launch import World, process_group

STEPS, EVERY = 6, 2
PLAN = "shards"


def run(world: World, folder: Path, dying_step: int) -> None:
    config = recipe(PLAN)
    step, state = begun(config, world)
    own, first = own_batch(world), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    newest = latest_complete(folder)
    if newest is not None:
        load_checkpoint(newest, state, world)
    told = folder / "told.jsonl"
    update = step._update

    def dying(number: int, *more: Any) -> Any:
        if first and number == dying_step and world.rank == 1:
            (folder / "died.txt").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return update(number, *more)

    vars(step)["_update"] = dying
    for number in range(state.step, STEPS):
        [learned] = learn(step, own, world, range(number, number + 1))
        state.step = number + 1
        if world.is_first:
            line = {"step": number, "learned": learned, "at": time.time()}
            with told.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if state.step % EVERY == 0:
            current = state.metrics.current
            save_checkpoint(folder, state, config, world, current=current, dataset="", keep=2)


def main() -> None:
    folder, dying_step, device = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    # As in a run of the trainer: SIGTERM is noted, and a rank that waits for a GPU cannot heed it.
    with process_group(device) as world, StopRequest():
        run(world, folder, dying_step)


if __name__ == "__main__":
    main()

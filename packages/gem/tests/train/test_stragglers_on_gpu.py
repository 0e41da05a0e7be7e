"""Of two GPUs that wait for each other in every layer, the slow one is named.

On batches drawn in memory, so that a GPU machine needs no data set.
"""

import time

import pytest
import torch
import torch.distributed as dist

from gem.config import parse_recipe
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.model.flops import batch_flops
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.rank_times import RankRows, StepWorks
from gem.train.straggler_spec import StragglerSpec
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

RECIPE = """
[data]
dataset = "synthetic"
[model]
kind = "gem"
width = 32
layers = ["transformer", "interaction"]
[model.embeddings]
embedding_dim = 16
initial_rows = "by_place"
[model.stream]
width = 32
[model.experts]
count = 2
fm_tokens = 4
linear_tokens = 4
rank = 4
mlp_widths = [32]
[train]
batch_examples = 64
[parallel]
shard = 2
table_shard = 2
replicate_below = 256
"""
SLOW_MS, STEPS, ROWS = 40, 4, 4


def compare_on_gpus(world: World, store):
    torch.cuda.set_device(world.rank)
    dist.destroy_process_group()
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=world.rank, world_size=world.size
    )
    return compare(World(world.rank, world.size, torch.device("cuda", world.rank)))


def compare(world: World):
    """Rows of the log of a few steps, of which rank 1 computes slowly in every one."""
    config = parse_recipe(RECIPE, name="small", origin="small")
    schema, draw = declared_schema(config), torch.Generator().manual_seed(7)
    lengths = {s.name: uniform_lengths(32, s.max_events, draw) for s in schema.streams}
    batch = random_batch(schema, lengths, draw).to(world.device)
    step = build_step(config, schema, world, total_steps=100, clock=StepClock(world.device))
    step.model.train()
    rows = RankRows(step.model, world, StragglerSpec(ratio=1.5, rows=2))
    if world.rank == 1:
        inside = next(step.model.get_submodule("heads").children())
        inside.register_forward_pre_hook(lambda *_: slow_down(world))
    found, works = [], StepWorks()
    for row in range(ROWS):
        began = time.perf_counter()
        for number in range(STEPS):
            step(batch, row * STEPS + number)
            works.add(batch, batch_flops(config.model, schema, batch).total)
        found.append(rows.row(works, 0.0, 1e3 * (time.perf_counter() - began)))
    return found


def slow_down(world: World):
    if world.device.type == "cuda":
        torch.cuda._sleep(SLOW_MS * 1_800_000)  # cycles of a clock of 1.5 to 2 GHz
    else:
        time.sleep(SLOW_MS / 1e3)


def check(found):
    # The first steps compile kernels, and a single row names nobody.
    assert found[0]["stragglers"] == []
    (one,) = found[-1]["stragglers"]
    assert (one["rank"], one["cause"]) == (1, "compute")
    assert one["ratio"] > 1.5
    times = found[-1]["compute_ms"]
    # It is longer by what it slept, though both wait for each other; of two, half above the mean.
    assert 0.5 * SLOW_MS < 2.0 * (times["max"] - times["mean"]) < 2.0 * SLOW_MS
    assert found[-1]["balance"]["max_over_mean"] == 1.0


@pytest.mark.gpu2
def test_a_slow_gpu_is_named(tmp_path):
    for found in run_ranks(compare_on_gpus, 2, tmp_path / "store"):
        check(found)

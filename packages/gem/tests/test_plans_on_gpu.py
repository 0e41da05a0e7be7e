"""Two GPUs under a plan learn what one learns, and read what another plan has written.

On batches drawn in memory, so that a GPU machine needs no data set.
"""

import pytest
import torch
import torch.distributed as dist

from gem.config import RunConfig, parse_recipe
from gem.data.batch import ExampleBatch
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.model.build import build_model
from gem.planning.schema import declared_schema
from gem.train.checkpoint import TrainState, load_checkpoint
from gem.train.checkpoint_writer import save_checkpoint
from gem.train.clock import StepClock
from gem.train.metrics import MetricStream
from gem.train.step import TrainStep
from gem_jagged.batch import Jagged
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.launch import World
from gem_parallel.testing import one_rank_group, run_ranks

RECIPE = """
[data]
dataset = "synthetic"
[data.streams.clicks]
max_events = 24
[data.streams.impressions]
max_events = 40
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
log_every_steps = 1
clip_norm = 0.5
[train.dense]
lr = 1e-2
[train.tables]
lr = 0.1
"""
PLANS = {
    "copies": ["parallel.replicate=2"],
    "shards": ["parallel.shard=2", "parallel.table_shard=2"],
    "experts": ["parallel.expert=2", "parallel.fully_sharded_tables=true"],
    # What experts exchange, and slices of tables that are copied, beside the event streams.
    "sides": [
        *("parallel.expert=2", "parallel.overlap_sides=true"),
        *("parallel.fully_sharded_tables=true", "parallel.gathers=measured"),
    ],
}
STEPS, SAVED = 6, 3


def recipe(name: str | None, *more: str) -> RunConfig:
    plan = [] if name is None else [*PLANS[name], "parallel.replicate_below=256"]
    return parse_recipe(RECIPE, name="small", origin="small", overrides=[*plan, *more])


def begun(config: RunConfig, world: World) -> tuple[TrainStep, TrainState]:
    schema = declared_schema(config)
    torch.manual_seed(config.seed)
    model = build_model(config.model, schema, seed=config.seed).to(world.device)
    clock = StepClock(world.device)
    step = TrainStep(config, model, schema, world, total_steps=STEPS, clock=clock)
    metrics = MetricStream(schema.labels, schema.domains, 2)
    sharded = world.size > 1 and step.plan.replicate == 1
    return step, TrainState(step.model, step.optimizers, step.ema, metrics, sharded=sharded)


def own_batch(world: World) -> ExampleBatch:
    """This rank's half of a batch, or all of it; the draws are the same everywhere."""
    config = recipe(None)
    schema, draw = declared_schema(config), torch.Generator().manual_seed(7)
    half = config.train.batch_examples // 2
    halves = []
    for _ in range(2):
        lengths = {s.name: uniform_lengths(half, s.max_events, draw) for s in schema.streams}
        halves.append(random_batch(schema, lengths, draw))
    own = halves[world.rank] if world.size == 2 else joined(halves)
    return own.to(world.device)


def joined(halves: list[ExampleBatch]) -> ExampleBatch:
    """One batch of two."""
    first, second = halves

    def both(one: Jagged, other: Jagged) -> Jagged:
        values = torch.cat([one.values, other.values])
        return Jagged.from_lengths(values, torch.cat([one.lengths, other.lengths]))

    tensors = {
        name: torch.cat([getattr(first, name), getattr(second, name)])
        for name in first.__dataclass_fields__
        if isinstance(getattr(first, name), torch.Tensor)
    }
    streams = {}
    for name, one in first.streams.items():
        other = second.streams[name]
        numbers = both(one.numbers, other.numbers)
        streams[name] = type(one)(
            ids={
                n: numbers.with_values(torch.cat([one.ids[n].values, other.ids[n].values]))
                for n in one.ids
            },
            numbers=numbers,
            gap_seconds=numbers.with_values(
                torch.cat([one.gap_seconds.values, other.gap_seconds.values])
            ),
        )
    ids = {name: both(first.ids[name], second.ids[name]) for name in first.ids}
    return type(first)(streams=streams, ids=ids, **tensors)


def learn(step: TrainStep, own: ExampleBatch, world: World, numbers: range):
    """Loss and gradient norm of steps that learn the same batch by heart."""
    step.model.train()
    found = []
    for number in numbers:
        scored = step(own, number)
        loss = all_reduce_sum(scored.loss.double(), world)
        found.append([float(loss), float(scored.grad_norm)])
    return found


def learn_all(world: World, store, folder):
    torch.cuda.set_device(world.rank)
    dist.destroy_process_group()
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=world.rank, world_size=world.size
    )
    world = World(world.rank, world.size, torch.device("cuda", world.rank))
    return learn_under_plans(world, folder)


def learn_under_plans(world: World, folder):
    own, found, last = own_batch(world), {}, None
    for name in PLANS:
        config = recipe(name)
        step, state = begun(config, world)
        found[name] = learn(step, own, world, range(SAVED))
        state.step = SAVED
        place = folder / name
        current = state.metrics.current
        written = save_checkpoint(place, state, config, world, current=current, dataset="", keep=1)
        found[name] += learn(step, own, world, range(SAVED, STEPS))
        step, state = begun(config, world)
        load_checkpoint(last or written, state, world)
        found[f"{name}, resumed"] = learn(step, own, world, range(SAVED, STEPS))
        last = written
    return found


def check(found, alone):
    assert alone[-1][0] < 0.95 * alone[0][0]
    assert len(found) == 2 * len(PLANS)
    for name, got in found.items():
        expected = torch.tensor(alone[STEPS - len(got) :])
        torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-5, atol=0, msg=name)


@pytest.mark.gpu2
def test_two_gpus_under_any_plan_learn_what_one_learns(tmp_path):
    world = World(device=torch.device("cuda", 0))
    step, _ = begun(recipe(None), world)
    alone = learn(step, own_batch(world), world, range(STEPS))
    for found in run_ranks(learn_all, 2, tmp_path / "store", tmp_path):
        check(found, alone)


HALF = "precision.default=bf16_autocast"
CUT = "parallel.replicate_below=256"


def quietly(step: TrainStep, batch: ExampleBatch) -> list[list[float]]:
    """Loss and norm of steps that know their next batch; the host may wait in the first two."""
    step.model.train()
    found = []
    for number in range(STEPS):
        torch.cuda.synchronize()
        if number > 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            step.expect(batch)
            scored = step(batch, number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append([float(scored.loss), float(scored.grad_norm)])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
def test_ways_of_several_ranks_wait_for_nothing_and_learn_the_same(half):
    config = recipe(None, CUT, *([HALF] if half else ()))
    device = torch.device("cuda", 0)
    batch = own_batch(World(device=device))
    alone = quietly(begun(config, World(device=device))[0], batch)
    assert alone[-1][0] < 0.95 * alone[0][0]
    for way in ("replicate", "shard", "expert"):
        with one_rank_group(way, device) as world:
            step, _ = begun(config, world)
            found = quietly(step, batch)
            # Only the first batch had not been told ahead.
            assert step.engine.waits <= 1, way
            assert (step.working is not None) == half
        # In bf16 gradients of rows, added in another order, move products by their last bit.
        near = 1e-2 if half else 1e-5
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(alone), rtol=near, atol=0, msg=way
        )

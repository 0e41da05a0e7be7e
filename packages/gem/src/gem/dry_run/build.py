"""The trainer's own step, built without a data set: for what times or counts it."""

import torch

from gem.config import RunConfig
from gem.data.schema import BatchSchema
from gem.model.build import build_model
from gem.train.clock import StepClock
from gem.train.guard import Guard
from gem.train.run_plan import plan_of
from gem.train.step import TrainStep
from gem.train.table_engine import shard_tables
from gem_parallel.launch import World


def build_step(
    config: RunConfig,
    schema: BatchSchema,
    world: World,
    *,
    total_steps: int,
    clock: StepClock,
    guard: Guard | None = None,
) -> TrainStep:
    """Build model, tables and optimizers as a training run does.

    Args:
        config: the run.
        schema: of the batches.
        world: the ranks.
        total_steps: steps of the whole run, which the learning rates depend on.
        clock: told which section runs.
        guard: says which steps must not move the weights.

    Returns:
        the step, its weights on the world's device.
    """
    plan = plan_of(config, world)
    torch.manual_seed(config.seed)
    # Drawing the rows of large tables on the host would take a minute.
    with torch.device(world.device):
        model = build_model(config.model, schema, seed=config.seed, with_rows=plan.tables_are_local)
    shard_tables(config, plan, model, schema, world)
    return TrainStep(
        config,
        model,
        schema,
        world,
        total_steps=total_steps,
        clock=clock,
        guard=guard,
    )

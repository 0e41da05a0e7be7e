"""Train many steps with the kernels alone: every loss has to be finite.

Batches are those of `gem.bench.check`, whose labels can be learned; each is new. They reach the
device as a trainer's do, the next one copied and looked up beside a step.
"""

import math
import time
from collections.abc import Callable, Iterator
from statistics import mean

import torch
from pydantic import Field

from gem.bench.asked import Asked, recipe_of
from gem.bench.check import planted_batch
from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.dry_run.build import build_step
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.guard import Guard
from gem.train.inputs_ahead import copied_ahead, pinned
from gem.train.loop_state import LoopState
from gem_opkit.ceilings import device_name
from gem_opkit.contract import Contract
from gem_opkit.impl import auto_means
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.launch import World

# Steps between two looks at the losses; a look waits for the device.
_EVERY = 50


class EndureReport(Contract):
    """Whether many steps stayed finite."""

    recipe: str
    settings: tuple[str, ...]
    impl: str
    steps: int = Field(description="steps that were taken: all, or up to the one that was not")
    examples: int = Field(description="examples a step")
    device: str
    seconds: float = Field(description="of the steps, with the drawing of their batches")
    loss_first: float | None = Field(
        description="mean of the first 50 steps; null where not finite"
    )
    loss_last: float | None = Field(description="mean of the last 50 steps; null where not finite")
    finite: bool
    said: str = Field(description="which step was not finite; empty where all were")


def endure(
    asked: Asked, world: World, *, told: Callable[[str], None] = lambda stage: None
) -> EndureReport:
    """Train the steps of a recipe.

    Args:
        asked: recipe, settings, examples of a rank, impl, and how many steps.
        world: the ranks.
        told: called now and then with what is done, on every rank.

    Returns:
        the report, with the losses of all ranks' examples.
    """
    config = recipe_of(asked, world)
    schema = declared_schema(config, op="gem bench step")
    clock, guard = StepClock(world.device), Guard(config.train.guard, world, LoopState())
    losses: list[torch.Tensor] = []
    values: list[float] = []
    with auto_means(asked.impl):
        step = build_step(config, schema, world, total_steps=asked.steps, clock=clock, guard=guard)
        told("model")
        began = time.perf_counter()
        batches = pinned(_drawn(asked, schema, world), world.device)
        for number, arrived in enumerate(copied_ahead(batches, world.device, step.ahead.stream)):
            if arrived.following is not None:
                step.expect(arrived.following)
            losses.append(step(arrived.there, number).loss)
            if (number + 1) % _EVERY == 0 or number + 1 == asked.steps:
                # Of all ranks, so that all go on or none.
                values += all_reduce_sum(torch.stack(losses).double(), world).tolist()
                losses.clear()
                seconds = time.perf_counter() - began
                told(f"{number + 1} steps in {seconds:.1f} s, loss {values[-1]:.4f}")
                if not all(map(math.isfinite, values)):
                    break
        seconds = time.perf_counter() - began
    wrong = next((n for n, x in enumerate(values) if not math.isfinite(x)), None)
    return EndureReport(
        recipe=config.name,
        settings=asked.settings,
        impl=asked.impl,
        steps=len(values),
        examples=config.train.batch_examples,
        device=device_name(world.device),
        seconds=seconds,
        loss_first=_finite_mean(values[:_EVERY]),
        loss_last=_finite_mean(values[-_EVERY:]),
        finite=wrong is None,
        said="" if wrong is None else f"the loss of step {wrong} is {values[wrong]}",
    )


def _drawn(asked: Asked, schema: BatchSchema, world: World) -> Iterator[ExampleBatch]:
    """Batches of this rank; every rank has others."""
    own = recipe_of(asked, World())
    for number in range(asked.steps):
        yield planted_batch(own, schema, number * world.size + world.rank)


def _finite_mean(values: list[float]) -> float | None:
    found = mean(values)
    return found if math.isfinite(found) else None

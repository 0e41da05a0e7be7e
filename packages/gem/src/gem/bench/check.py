"""Train a few steps with the kernels and with the references: losses and NE have to agree.

Three runs see the same batches from the same weights. One computes in fp32 with the references,
and is taken for exact; one in the recipe's precision with the references; one as the recipe trains.
The last may be at most twice as far from the first as the second is, and a rounding of bfloat16:
the budget that every kernel is held to (`gem_opkit.budget`). Small differences grow from step to
step in any training, and they do so in the second run too.

Labels follow the events: examples whose events came shortly before them click more often, so that
both losses and NE fall only if the whole way from the events to the heads learns.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import Field

from gem.bench.asked import Asked, recipe_of
from gem.config import RunConfig
from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.guard import Guard
from gem.train.loop_state import LoopState
from gem.train.normalized_entropy import EntropySums
from gem_opkit.budget import CheckFailure, check_budget
from gem_opkit.ceilings import device_name
from gem_opkit.contract import Contract
from gem_opkit.errors import UnsupportedError, refusal
from gem_opkit.impl import Impl, auto_means
from gem_parallel.launch import World

# How often an example clicks whose events are recent, and one whose are not.
_RATES = (0.8, 0.25)
# Gaps of recent events, as a share of the others.
_RECENT = 0.02


class Trajectory(Contract):
    """What a run did."""

    precision: str
    impl: str
    losses: tuple[float, ...] = Field(description="one a step")
    ne: dict[str, float] = Field(description="task -> NE over all steps, each before its update")
    further_losses: tuple[float | None, ...] = Field(
        default=(), description="of steps behind those; null where one is not finite"
    )


class CheckReport(Contract):
    """Whether the kernels train as the references do."""

    recipe: str
    settings: tuple[str, ...]
    steps: int
    examples: int
    device: str
    exact: Trajectory
    reference: Trajectory
    kernels: Trajectory
    agrees: bool
    said: str = Field(description="what is over the budget, or not finite; empty where they agree")


@dataclass(frozen=True, slots=True)
class _Way:
    """How a run computes."""

    precision: str
    impl: Impl


def check(
    asked: Asked,
    world: World,
    *,
    further: int = 0,
    told: Callable[[str], None] = lambda stage: None,
) -> CheckReport:
    """Compare the kernels with the references over the steps of a recipe.

    Args:
        asked: recipe, settings, examples, and how many steps.
        world: one rank, on a GPU.
        further: steps that the kernels go on for alone, whose losses have to be finite.
        told: called with each run that is done.

    Returns:
        the report.

    Raises:
        UnsupportedError: several ranks, or a CPU, on which the references run anyway.
    """
    if world.size > 1 or world.device.type != "cuda":
        raise UnsupportedError(
            refusal(
                "gem bench step",
                "--check",
                must="run in one process on a GPU",
                got=f"{world.size} ranks on {world.device.type}",
                fix="on a CPU every operator is its reference, and there is nothing to compare",
            )
        )
    own = recipe_of(asked, world).precision.default
    ways = (_Way("fp32", "reference"), _Way(own, "reference"), _Way(own, asked.impl))
    runs = []
    for way in ways:
        began = time.perf_counter()
        alone = further if way is ways[-1] else 0
        runs.append(trajectory(asked, world, precision=way.precision, impl=way.impl, further=alone))
        gc.collect()  # hooks tie a step to itself, and the next one needs its memory
        torch.cuda.empty_cache()
        seconds = time.perf_counter() - began
        steps = asked.steps + alone
        told(f"{way.precision}, impl={way.impl}: {steps} steps in {seconds:.1f} s")
    return compare(asked, world, runs)


def compare(asked: Asked, world: World, runs: Sequence[Trajectory]) -> CheckReport:
    """Hold the last of three runs to the budget.

    Args:
        asked: what was run.
        world: where.
        runs: exact, reference, kernels.

    Returns:
        the report.
    """
    exact, reference, kernels = runs
    said = ""
    try:
        for what, of in (("losses", _losses), ("NE", _ne)):
            check_budget(
                of(kernels), of(reference), of(exact), what=what, band_dtype=torch.bfloat16
            )
    except CheckFailure as failure:
        said = str(failure)
    if None in kernels.further_losses:
        place = asked.steps + kernels.further_losses.index(None)
        said = f"loss of the kernels is not finite in step {place}"
    config = recipe_of(asked, world)
    return CheckReport(
        recipe=config.name,
        settings=asked.settings,
        steps=asked.steps,
        examples=config.train.batch_examples,
        device=device_name(world.device),
        exact=exact,
        reference=reference,
        kernels=kernels,
        agrees=not said,
        said=said,
    )


def _losses(run: Trajectory) -> torch.Tensor:
    return torch.tensor(run.losses, dtype=torch.float64)


def _ne(run: Trajectory) -> torch.Tensor:
    return torch.tensor(list(run.ne.values()), dtype=torch.float64)


def trajectory(
    asked: Asked, world: World, *, precision: str, impl: Impl, further: int = 0
) -> Trajectory:
    """Train some steps.

    Args:
        asked: recipe, settings, examples, steps.
        world: one rank.
        precision: number format.
        impl: what ``impl="auto"`` of every operator stands for.
        further: steps behind those.

    Returns:
        losses and NE.
    """
    settings = (*asked.settings, f"precision.default={precision}")
    config = recipe_of(replace(asked, settings=settings), world)
    schema = declared_schema(config, op="gem bench step")
    clock = StepClock(world.device)
    guard = Guard(config.train.guard, world, LoopState())
    with auto_means(impl):
        step = build_step(config, schema, world, total_steps=asked.steps, clock=clock, guard=guard)
        seen = [EntropySums() for _ in schema.labels]
        losses: list[torch.Tensor] = []
        scores: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(asked.steps + further):
            batch = planted_batch(config, schema, number)
            scored = step(batch.to(world.device), number)
            losses.append(scored.loss)
            if number < asked.steps:
                scores.append((scored.p_BA, batch.labels_BA))
    for p_BA, labels_BA in scores:
        for task, sums in enumerate(seen):
            sums.update(p_BA[:, task].cpu().numpy(), labels_BA[:, task].numpy())
    found = {task: sums.values()[0]["ne"] for task, sums in zip(schema.labels, seen, strict=True)}
    values: list[float] = torch.stack(losses).double().tolist()
    return Trajectory(
        precision=precision,
        impl=impl,
        losses=tuple(values[: asked.steps]),
        ne={task: ne for task, ne in found.items() if ne is not None},
        further_losses=tuple(x if math.isfinite(x) else None for x in values[asked.steps :]),
    )


def planted_batch(config: RunConfig, schema: BatchSchema, number: int) -> ExampleBatch:
    """Draw a batch whose labels follow from how recent the events are.

    Args:
        config: gives the number of examples.
        schema: inputs and tasks.
        number: of the batch; the same number gives the same batch.

    Returns:
        a batch on the CPU.
    """
    draw = torch.Generator().manual_seed(number)
    examples = config.train.batch_examples
    lengths = {s.name: uniform_lengths(examples, s.max_events, draw) for s in schema.streams}
    batch = random_batch(schema, lengths, draw)
    recent_B = torch.rand(examples, generator=draw) < 0.5
    factor_B = torch.where(recent_B, _RECENT, 1.0)
    streams = {}
    for name, stream in batch.streams.items():
        gaps = stream.gap_seconds
        factor_T = torch.repeat_interleave(factor_B, gaps.lengths)
        streams[name] = replace(stream, gap_seconds=gaps.with_values(gaps.values * factor_T))
    rate_B1 = torch.where(recent_B, *_RATES)[:, None]
    labels_BA = (torch.rand(batch.labels_BA.shape, generator=draw) < rate_B1).float()
    return replace(batch, streams=streams, labels_BA=labels_BA)

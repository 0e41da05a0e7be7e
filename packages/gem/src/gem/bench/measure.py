"""Time whole steps of a recipe, as the trainer runs them, on batches that lie in host memory.

They are copied to the device as the trainer copies them, the next one beside a step. No data set is
read, so that waiting for data is left out. Each rank draws its own histories,
uniform on 1 to the longest; with ``parallel.balance`` those of all ranks are drawn on each, and
dealt as a reader deals them. The batch grows with the ranks (weak scaling). Where memory does not
hold a batch it is run in more parts, and the report says so. Before anything is timed, the losses
of the first steps must be finite and near what an untrained model has.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gem.bench.asked import Asked, Where, recipe_of
from gem.bench.record import profile_of, record
from gem.bench.regions import ModuleRanges, RegionFlops, region_flops
from gem.bench.schema import Efficiency, Profile, StepMemory, StepReport
from gem.bench.step_memory import step_memory
from gem.config import RunConfig
from gem.data.batch import ExampleBatch
from gem.data.dealing import Balance
from gem.data.schema import BatchSchema
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.model.spec import GemSpec
from gem.planning.schema import declared_schema
from gem.train.balance import step_balance
from gem.train.clock import StepClock
from gem.train.guard import Guard
from gem.train.idle_keys import idle_keys
from gem.train.inputs_ahead import Arrived, copied_ahead
from gem.train.loop_state import LoopState
from gem.train.mfu import efficiency
from gem.train.run_plan import plan_of
from gem.train.step import TrainStep
from gem_opkit.bench import provenance
from gem_opkit.ceilings import device_name, device_peak
from gem_opkit.errors import MeasurementError, refusal
from gem_opkit.impl import auto_means
from gem_parallel.balance.step import arrange
from gem_parallel.collectives import all_reduce_sum, barrier
from gem_parallel.launch import World

BATCHES, MOST_PARTS = 4, 16
# Share by which the first loss may differ from that of the base rates: random logits, few labels.
LOSS_BAND = 0.3
# What of a training run a step of each kind of batches does not show.
LEFT_OUT: dict[Where, str] = {
    "host": "reading data; batches lie in page-locked host memory, and are copied ahead",
    "device": "reading and copying data; batches lie on the device",
}
_OP = "gem bench step"
_determinism: Any = torch.utils.deterministic  # its setting is a property that no checker sees


def measure(
    asked: Asked,
    world: World,
    *,
    told: Callable[[str], None] = lambda stage: None,
    look: Callable[[TrainStep, Sequence[ExampleBatch]], None] | None = None,
) -> StepReport:
    """Run the steps of a recipe under a plan, in as few parts a batch as memory holds.

    Args:
        asked: what.
        world: the ranks; all have to call this.
        told: called with what is done, so that a run that is cut off tells how far it came.
        look: called with the step and its batches when all is measured.

    Returns:
        the report; its profile is that of this rank.

    Raises:
        ConfigError: a recipe, a key or a plan that does not exist.
        MeasurementError: memory does not hold the step in any number of parts, or a loss is not
            that of an untrained model.
    """
    config = recipe_of(asked, world)
    plan_of(config, world)  # refuses one for other ranks before anything is drawn
    schema = declared_schema(config, op=_OP)
    batches = _batches(asked, config, schema, world)
    _said(told, "batches", world)
    before = torch.are_deterministic_algorithms_enabled(), _determinism.fill_uninitialized_memory
    torch.use_deterministic_algorithms(config.train.deterministic)
    _determinism.fill_uninitialized_memory = False
    try:
        with auto_means(asked.impl):
            while True:
                bench = _Bench(asked, config, schema, world, batches, told)
                found = bench.run(look)
                if found is not None:
                    return found
                config = _in_more_parts(asked, config, world)
                told(f"memory does not hold it: {config.train.accumulation_parts} parts")
    finally:
        torch.use_deterministic_algorithms(before[0])
        _determinism.fill_uninitialized_memory = before[1]


def _in_more_parts(asked: Asked, config: RunConfig, world: World) -> RunConfig:
    parts = 2 * config.train.accumulation_parts
    if parts > MOST_PARTS:
        raise MeasurementError(
            refusal(
                _OP,
                "memory",
                must=f"hold the step in {MOST_PARTS} parts",
                got="too little",
                fix="lower --examples",
            )
        )
    return recipe_of(asked, world, f"train.accumulation_parts={parts}")


def _batches(
    asked: Asked, config: RunConfig, schema: BatchSchema, world: World
) -> list[ExampleBatch]:
    draw = torch.Generator().manual_seed(world.rank)
    examples = config.train.batch_examples // world.size
    balance = step_balance(config, plan_of(config, world), schema, world.size)
    of_all = torch.Generator().manual_seed(0)  # the same on every rank
    found = []
    for _ in range(min(BATCHES, asked.steps + asked.warmup)):
        if balance is None:
            longest = {s.name: s.max_events for s in schema.streams}
            lengths = {name: uniform_lengths(examples, n, draw) for name, n in longest.items()}
        else:
            lengths = _dealt_lengths(config, schema, world, balance, of_all)
        batch = random_batch(schema, lengths, draw)
        if asked.batches == "device":
            batch = batch.to(world.device)
        found.append(batch.pinned() if batch.labels_BA.device != world.device else batch)
    return found


def _dealt_lengths(
    config: RunConfig, schema: BatchSchema, world: World, balance: Balance, draw: torch.Generator
) -> dict[str, list[int]]:
    """Lengths of this rank's histories in a step that is dealt as a reader deals it."""
    examples = config.train.batch_examples
    lengths = {
        s.name: np.asarray(uniform_lengths(examples, s.max_events, draw)) for s in schema.streams
    }
    dealt = arrange(balance.work.of(lengths), world.size, balance.dealing)
    rows = np.concatenate([np.arange(low, high) for low, high in dealt.runs(world.rank)])
    return {name: own[rows].tolist() for name, own in lengths.items()}


def _said(told: Callable[[str], None], stage: str, world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if world.is_first:
        told(stage)


class _Bench:
    """One try to measure, in a given number of parts."""

    def __init__(
        self,
        asked: Asked,
        config: RunConfig,
        schema: BatchSchema,
        world: World,
        batches: Sequence[ExampleBatch],
        told: Callable[[str], None],
    ) -> None:
        self.asked, self.config, self.schema, self.world = asked, config, schema, world
        self.batches, self.told = batches, told
        self.on_gpu = world.device.type == "cuda"
        self.flops = [region_flops(config, schema, batch) for batch in batches]
        self.taken = 0  # batches so far, in turns

    def run(
        self, look: Callable[[TrainStep, Sequence[ExampleBatch]], None] | None
    ) -> StepReport | None:
        """Measure; None where memory does not hold it."""
        try:
            return self._measured(look)
        except torch.OutOfMemoryError:
            if self.world.size > 1:
                raise  # the others wait in a collective: start again with more parts
        gc.collect()
        torch.cuda.empty_cache()
        return None

    def _measured(
        self, look: Callable[[TrainStep, Sequence[ExampleBatch]], None] | None
    ) -> StepReport:
        asked, world = self.asked, self.world
        clock = StepClock(world.device)
        step = build_step(
            self.config,
            self.schema,
            world,
            total_steps=asked.warmup + asked.steps,
            clock=clock,
            guard=Guard(self.config.train.guard, world, LoopState()),
        )
        ranges = ModuleRanges(step.model, [*self.flops[0]])
        _said(self.told, "model", world)
        for line in idle_keys(step):
            _said(self.told, line, world)
        arriving = self._arriving(step)
        losses = []
        for number in range(asked.warmup):
            losses.append(self._one(step, arriving, number))
            _said(self.told, f"step {number}", world)
        first_loss = self._checked_loss(losses)
        held_bytes = torch.cuda.memory_allocated() if self.on_gpu else None
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        barrier(world)
        clock.__dict__.update(StepClock(world.device).__dict__)
        numbers = range(asked.warmup, asked.warmup + asked.steps)
        counted = [self.flops[(self.taken + n) % len(self.flops)] for n in range(asked.steps)]
        timed = [self._timed(step, arriving, clock, number) for number in numbers]
        clock.settle()
        peak_bytes = torch.cuda.max_memory_allocated() if self.on_gpu else None
        _said(self.told, "timed", world)
        all_loss = all_reduce_sum(torch.stack(timed).double(), world)
        self._demand_finite(all_loss, asked.warmup)
        step_ms, sections = list(clock.step_ms), dict(clock.seconds)
        profile = self._profile(step, arriving, clock, ranges)
        memory = step_memory(step, self.batches[0], peak_bytes)
        _said(self.told, "profiled", world)
        ranges.remove()
        if look is not None:
            look(step, [batch.to(world.device) for batch in self.batches])
        return self._report(
            step_ms,
            counted,
            sections,
            profile,
            memory,
            held_bytes,
            (first_loss, float(all_loss[-1])),
        )

    def _arriving(self, step: TrainStep) -> Iterator[Arrived]:
        """The batches in turns, without an end."""
        return copied_ahead(cycle(self.batches), self.world.device, step.ahead.stream)

    def _one(self, step: TrainStep, arriving: Iterator[Arrived], number: int) -> Tensor:
        arrived = next(arriving)
        self.taken += 1
        if arrived.following is not None:
            step.expect(arrived.following)
        return step(arrived.there, number).loss

    def _timed(
        self, step: TrainStep, arriving: Iterator[Arrived], clock: StepClock, number: int
    ) -> Tensor:
        clock.begin_step()
        loss = self._one(step, arriving, number)
        clock.end_step()
        return loss

    def _checked_loss(self, losses: Sequence[Tensor]) -> float:
        """The loss of the first step; refuses a step that computes something else."""
        total = [float(all_reduce_sum(loss.double(), self.world)) for loss in losses]
        rates = [self.config.model.heads.base_rates.get(task, 0.5) for task in self.schema.labels]
        # Half of the labels are 1, and an untrained model says the base rates.
        wanted = -0.5 * sum(math.log(rate) + math.log(1.0 - rate) for rate in rates)
        wanted += _losses_of_users(self.config)
        if not all(math.isfinite(x) for x in total) or abs(total[0] - wanted) > LOSS_BAND * wanted:
            raise MeasurementError(
                refusal(
                    _OP,
                    "loss",
                    must=f"be finite and begin near {wanted:.3f}",
                    got=[round(x, 4) for x in total],
                    fix="check the model before its speed; with few examples a loss is that far "
                    "off by chance",
                )
            )
        return total[0]

    def _demand_finite(self, losses: Tensor, first: int) -> None:
        wrong = (~torch.isfinite(losses)).nonzero().flatten().tolist()
        if wrong:
            raise MeasurementError(
                refusal(
                    _OP,
                    "loss",
                    must="be finite in every step",
                    got=f"{float(losses[wrong[0]])} in step {first + wrong[0]}",
                    fix="check the model before its speed",
                )
            )

    def _profile(
        self,
        step: TrainStep,
        arriving: Iterator[Arrived],
        clock: StepClock,
        ranges: ModuleRanges,
    ) -> Profile | None:
        """Of the first rank; the others run the same steps, as collectives need all."""
        asked = self.asked
        if not asked.profiled:
            return None

        def run(number: int) -> None:
            self._timed(step, arriving, clock, number)

        if not self.world.is_first:
            for number in range(asked.profiled + 1):
                run(number)
            return None
        first = self.taken + 1  # one before the counted ones
        events = record(run, asked.profiled, clock=clock, ranges=ranges)
        counted = [self.flops[(first + n) % len(self.flops)] for n in range(asked.profiled)]
        peak = device_peak(device_name(self.world.device)).flops_per_s
        return profile_of(events, _mean_flops(counted), peak_flops_per_s=peak)

    def _report(
        self,
        step_ms: Sequence[float],
        counted: Sequence[dict[str, RegionFlops]],
        sections: dict[str, float],
        profile: Profile | None,
        memory: StepMemory,
        held_bytes: int | None,
        losses: tuple[float, float],
    ) -> StepReport:
        asked, world, config = self.asked, self.world, self.config
        own = _mean_flops(counted)
        parts = (
            sum(each.attention.total for each in own.values()),
            sum(each.products.total for each in own.values()),
        )
        sums = torch.tensor(parts, dtype=torch.float64, device=world.device)
        attention, products = (float(x) for x in all_reduce_sum(sums, world))
        examples, middle = config.train.batch_examples, median(step_ms)
        reached = efficiency(
            flops_per_example=(attention + products) / examples,
            examples_per_step=examples,
            step_ms=middle,
            device_name=device_name(world.device),
            world_size=world.size,
        )
        return StepReport(
            recipe=config.name,
            settings=asked.settings,
            plan=" ".join(asked.plan) or f"replicate={world.size}",
            impl=asked.impl,
            device=device_name(world.device),
            gpus=world.size,
            examples_a_rank=self.batches[0].examples,
            parts=config.train.accumulation_parts,
            events_a_rank=tuple(batch.event_tokens for batch in self.batches),
            steps=asked.steps,
            step_ms=middle,
            step_ms_fastest=min(step_ms),
            step_ms_slowest=max(step_ms),
            examples_per_s=1e3 * examples / middle,
            flops_a_step=round(attention + products),
            flops_attention=round(attention),
            flops_products=round(products),
            efficiency=_efficiency(reached, profile, world.size),
            sections_ms={k: 1e3 * v / asked.steps for k, v in sections.items() if v},
            profile=profile,
            host_gap_ms=None if profile is None else max(0.0, middle - profile.busy_ms),
            memory=memory,
            held_bytes=held_bytes,
            loss_first=losses[0],
            loss_last=losses[1],
            left_out=LEFT_OUT[asked.batches],
            provenance=provenance(),
        )


def _efficiency(reached: dict[str, Any], profile: Profile | None, ranks: int) -> Efficiency:
    """MFU, and what of it waiting for others takes: the collectives that no compute hides."""
    ratio: float | None = 1.0
    if ranks > 1:
        ratio = None
        if profile is not None:
            ratio = 1.0 - next(k.share for k in profile.kinds if k.kind == "collectives")
    e2e = reached["e2e_mfu"]
    return Efficiency(
        peak_tflops=reached["peak_tflops"],
        peak_source=reached["peak_source"],
        e2e_mfu=e2e,
        local_mfu=None if e2e is None or not ratio else e2e / ratio,
        scaling_ratio=ratio,
    )


def _mean_flops(steps: Sequence[dict[str, RegionFlops]]) -> dict[str, RegionFlops]:
    """Of several steps, whole FLOPs."""

    def middle(name: str, part: str) -> Any:
        counts = [getattr(step[name], part) for step in steps]
        kind = type(counts[0])
        return kind(
            round(mean(each.forward for each in counts)),
            round(mean(each.backward for each in counts)),
        )

    return {
        name: RegionFlops(middle(name, "attention"), middle(name, "products")) for name in steps[0]
    }


def _losses_of_users(config: RunConfig) -> float:
    """What an untrained model of users loses beside its tasks, by guessing among as many."""
    own = config.model.user_model if isinstance(config.model, GemSpec) else None
    if own is None:
        return 0.0
    items = math.log(config.train.batch_examples)
    return own.next_event_weight * items + own.time_gap_weight * math.log(own.time_gap_knots)

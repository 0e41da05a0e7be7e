"""A step under memory budgets, beside what one would choose by hand: time, memory, what was kept.

    python packages/gem/benchmarks/bench_memory.py --examples 1024 --budget 30 --budget 20

The trainer's own step on random batches that lie on the device; one process, every plan in turn on
the same model. ``--hand`` adds choices that people make: run all streams again, all regions, all
but products and attention; each is followed by the plan that is chosen for the peak of that one.
``--fraction`` adds the rule of torch's ``activation_memory_budget``: one part of what autograd
keeps for every region alike, chosen by torch's own knapsack and run in the same way as the rest.
A choice that memory does not hold is a row that says so. The bytes that the backward pass finds are
counted, and have to be those of the plan. Rows go to ``results/<device>/memory.jsonl``.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack

from gem.config import load_recipe
from gem.data.batch import ExampleBatch
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.memory.packing import packing_of
from gem.memory.profiling import batch_tensors, profile_of
from gem.memory.table import memory_json
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.guard import Guard
from gem.train.loop_state import LoopState
from gem.train.step import TrainStep
from gem_opkit.bench import device_folder, provenance, write_rows
from gem_opkit.ceilings import device_name
from gem_opkit.errors import MeasurementError, refusal
from gem_parallel.launch import World, process_group
from gem_parallel.recompute.apply import recompute_by
from gem_parallel.recompute.choose import RecomputePlan, choose, plan_by_hand, region_plan
from gem_parallel.recompute.profile import Call, Profile, Region

RESULTS = Path(__file__).resolve().parents[3] / "results"
BATCHES, WARM_UP = 2, 2
# Kernels of a CPU, and some of a GPU, round the memory of a few results up.
COUNT_BAND = 0.01
HEAVY = ("aten.mm.", "aten.bmm.", "aten.addmm.", "attention")


def main() -> None:
    """Measure, print, write."""
    given = _arguments()
    with process_group(given.device) as world:
        if world.size > 1:
            sys.exit("bench_memory measures one rank: start it without torchrun")
        rows = Plans(given, world).rows()
        if not given.dry:
            folder = device_folder(device_name(world.device), gpus=1)
            write_rows(given.out / folder / "memory.jsonl", rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="h200")
    parser.add_argument("--set", action="append", default=[], help="a.b=value, as in gem train")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--examples", type=int, default=None)
    parser.add_argument("--budget", type=float, action="append", default=[], help="GiB")
    parser.add_argument("--kept", action="append", default=[], help="fp8 or fp4, without a budget")
    parser.add_argument("--hand", action="store_true", help="choices made by hand, and their like")
    parser.add_argument(
        "--fraction", type=float, action="append", default=[],
        help="one part for every region, by torch's rule, and its like",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="times that all plans take turns")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds, after which no new plan")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--dry", action="store_true", help="write no row")
    return parser.parse_args()


class Plans:
    """One step object, and every plan in turn."""

    def __init__(self, given: argparse.Namespace, world: World) -> None:
        self.given, self.world, self.began = given, world, time.perf_counter()
        examples = given.examples or load_recipe(given.recipe, given.set).train.batch_examples
        config = load_recipe(
            given.recipe,
            [
                "model.embeddings.initial_rows=by_place",
                f"train.batch_examples={examples}",
                *given.set,
            ],
        )
        schema, draw = declared_schema(config), torch.Generator().manual_seed(0)
        self.batches = [
            random_batch(
                schema,
                {s.name: uniform_lengths(examples, s.max_events, draw) for s in schema.streams},
                draw,
            ).to(world.device)
            for _ in range(BATCHES)
        ]
        torch.use_deterministic_algorithms(config.train.deterministic)
        self.step: TrainStep = build_step(
            config,
            schema,
            world,
            total_steps=10_000,
            clock=StepClock(world.device),
            guard=Guard(config.train.guard, world, LoopState()),
        )
        self.config, self.schema, self.number = config, schema, 0

    def profile(self, kept: str = "as_is") -> Profile:
        """What a forward pass keeps."""
        return profile_of(
            self.config,
            self.schema,
            self.batches[0],
            packing=packing_of(kept),
            count_weights=self.step.working is None,
        )

    def rows(self) -> list[dict[str, Any]]:
        """Every plan, the most important ones first; then as many rounds more as asked for."""
        tried: list[Tried] = []
        for name, own, plan, kept in self.wanted():
            if time.perf_counter() - self.began > self.given.limit:
                _say(f"time is up before: {name}")
                break
            tried.append(self.count(name, own, plan, kept))
            self.go(tried[-1])
            _say(tried[-1].line())
        for _ in range(self.given.rounds - 1):
            for each in tried:
                if each.row["fits"] and time.perf_counter() - self.began < self.given.limit:
                    self.go(each)
        if self.given.rounds > 1:
            for each in tried:
                _say(each.line())
        return [{**each.row, **provenance()} for each in tried]

    def wanted(self) -> Iterator[tuple[str, Profile, RecomputePlan | None, str]]:
        """Name, profile, plan, format of what is kept."""
        profile = self.profile()
        yield "all kept", profile, None, "as_is"
        for gib in self.given.budget:
            yield f"budget of {gib:g} GiB", profile, choose(profile, int(gib * 2**30)), "as_is"
        for kept in self.given.kept:
            packed = self.profile(kept)
            yield f"all kept as {kept}", packed, choose(packed, None), kept
        for name, rule in HANDS.items() if self.given.hand else ():
            plans = [region_plan(profile, i, rule(r)) for i, r in enumerate(profile.regions)]
            plan = plan_by_hand(profile, plans)
            like = choose(profile, max(plan.peak_bytes, plan.least_bytes))
            yield f"by hand: {name}", profile, plan, "as_is"
            yield f"chosen for the peak of: {name}", profile, like, "as_is"
        for part in self.given.fraction:
            plan = plan_by_hand(
                profile,
                [
                    region_plan(profile, place, one_fraction(profile, region, part))
                    for place, region in enumerate(profile.regions)
                ],
            )
            like = choose(profile, plan.kept_bytes, bound="kept")
            yield f"one fraction for all regions: {part:g}", profile, plan, "as_is"
            yield f"chosen for the kept bytes of: fraction {part:g}", profile, like, "as_is"

    def count(self, name: str, profile: Profile, plan: RecomputePlan | None, kept: str) -> "Tried":
        """Run a plan's forward pass and hold what it keeps to what the plan says."""
        batch = self.batches[0]
        row: dict[str, Any] = {
            "bench": "memory",
            "case": f"{self.config.name}, {batch.examples} examples, {name}",
            "device": device_name(self.world.device),
            "events": batch.event_tokens,
            "set": self.given.set,
            "steps": self.given.steps * self.given.rounds,
            "fits": True,
        }
        tried = Tried(row, plan, kept)
        if plan is None:
            return tried
        row |= {
            "kept_bytes": plan.kept_bytes,
            "planned_peak_bytes": plan.peak_bytes,
            "unchanged_bytes": plan.unchanged_bytes,
            "again_ms": plan.again_ms,
            "plan": memory_json(profile, plan),
        }
        step = self.step
        step.model.train()
        handle = recompute_by(step.model, plan, packing=packing_of(kept))
        try:
            copies = [] if step.working is None else [*step.working.copies.values()]
            alive = [*step.model.parameters(), *step.model.buffers(), *copies]
            with (
                step.precision(),
                handle.counting([*alive, *batch_tensors(batch)]) as count,
            ):
                self._forward(batch)
            row["counted_bytes"] = count.total
        except torch.OutOfMemoryError:
            row["fits"] = False
        finally:
            handle.undo()
        if row["fits"] and abs(row["counted_bytes"] - plan.kept_bytes) > (
            COUNT_BAND * plan.kept_bytes
        ):
            raise MeasurementError(
                refusal(
                    "bench_memory",
                    "counted_bytes",
                    must=f"be the plan's {plan.kept_bytes} for {name}",
                    got=row["counted_bytes"],
                    fix="mend the plan before its time",
                )
            )
        return tried

    def go(self, tried: "Tried") -> None:
        """Take steps under a plan; one that memory does not hold is told in the row."""
        if tried.row["fits"]:
            try:
                self._steps(tried)
            except torch.OutOfMemoryError:
                tried.row["fits"] = False
        if not tried.row["fits"]:
            self.step.parallel.module.zero_grad()
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _steps(self, tried: "Tried") -> None:
        on_gpu, step = self.world.device.type == "cuda", self.step
        step.model.train()
        handle = None
        if tried.plan is not None:
            handle = recompute_by(step.model, tried.plan, packing=packing_of(tried.kept))
        try:
            for call in range(WARM_UP + self.given.steps):
                if call == WARM_UP and on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                began = self._now()
                scored = step(self.batches[call % BATCHES], self.number)
                self.number += 1
                if call >= WARM_UP:
                    tried.took.append(1e3 * (self._now() - began))
                tried.row["loss"] = float(scored.loss)
        finally:
            if handle is not None:
                handle.undo()
        tried.row |= {
            "step_ms": median(tried.took),
            "step_ms_fastest": min(tried.took),
            "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        }

    def _forward(self, batch: ExampleBatch) -> None:
        step = self.step
        if step.working is None:
            step.wrapped(batch)
        else:
            step.working.forward(step.wrapped, batch)

    def _now(self) -> float:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(slots=True)
class Tried:
    """One plan, and what has been measured of it so far."""

    row: dict[str, Any]
    plan: RecomputePlan | None
    kept: str
    took: list[float] = field(default_factory=list)

    def line(self) -> str:
        """What is shown while the rest is measured."""
        left_out = ("bench", "device", "set", "plan", "steps", "events", "unchanged_bytes")
        shown = ((key, value) for key, value in self.row.items() if key not in left_out)
        return " ".join(
            f"{key}={value:.5g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in shown
        )


def one_fraction(profile: Profile, region: Region, part: float) -> list[Call]:
    """What torch's partitioner would keep of a region under one ``activation_memory_budget``.

    Of what autograd keeps, inputs aside, the same part in every region; which, its own knapsack
    says by the FLOPs that each result takes, as it is set by default.
    """
    inside = {*region.saved} - {*region.inputs}
    items = [c for c in region.calls if c.can_be_kept and inside & {*c.made}]
    whole = profile.size(inside) or 1
    sizes = [profile.size(call.made) / whole for call in items]
    _, saved, _ = dp_knapsack(sizes, [float(max(call.cost.flops, 1)) for call in items], part)
    return [items[place] for place in saved]


def _again(region: Region) -> list[Call]:
    return []


def _streams_again(region: Region) -> list[Call] | None:
    return [] if ".streams." in region.name else None


def _but_heavy(region: Region) -> list[Call]:
    return [c for c in region.calls if c.can_be_kept and any(h in c.name for h in HEAVY)]


HANDS: dict[str, Callable[[Region], list[Call] | None]] = {
    "all but products and attention again": _but_heavy,
    "streams again": _streams_again,
    "all again": _again,
}


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

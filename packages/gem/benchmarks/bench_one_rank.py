"""What the way of several ranks costs beside communication, on one GPU.

    python packages/gem/benchmarks/bench_one_rank.py --recipe h200

The trainer's own step of one model, once as one rank takes it and once for each way of several
ranks, with a process group of one rank: gradients are put together for others, weights gathered,
ids and vectors sent, all to itself. Rounds of the ways alternate in one process, so that a card
that gets slower does not decide. Two models lie in memory at once, so tables are made small.

Shown for each way: time of a step, of the host for one step from an idle device, kernels of a step
and how long they run, and lookups for whose sizes the host had to wait. That all learn the same is
what tests hold. Rows go to ``results/<device>/one_rank.jsonl``.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gem.config import RunConfig, load_recipe
from gem.data.batch import ExampleBatch
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.guard import Guard
from gem.train.loop_state import LoopState
from gem.train.step import TrainStep
from gem_opkit.bench import device_folder, provenance, write_rows
from gem_opkit.ceilings import device_name
from gem_parallel.launch import World
from gem_parallel.testing import one_rank_group

RESULTS = Path(__file__).resolve().parents[3] / "results"
BATCHES, WARM_UP, TOTAL = 2, 3, 10_000
WAYS = ("replicate", "expert", "shard")
BEGAN = time.perf_counter()


class Way:
    """One model on one way.

    Args:
        name: ``single``, or an axis of the dense plan.
        config: the run.
        world: says which way is gone.
        batches: to train on, in turns.
    """

    def __init__(
        self, name: str, config: RunConfig, world: World, batches: Sequence[ExampleBatch]
    ) -> None:
        self.name, self.batches, self.number = name, batches, 0
        self.step: TrainStep = build_step(
            config,
            declared_schema(config),
            world,
            total_steps=TOTAL,
            clock=StepClock(world.device),
            guard=Guard(config.train.guard, world, LoopState()),
        )
        self.step.model.train()
        self.step_ms: list[float] = []
        self.host_ms: list[float] = []
        self.losses: list[float] = []
        self._kernels: dict[str, float] = {}

    def take(self) -> torch.Tensor:
        """Train one batch; the next one is known, as in a run."""
        batch, following = (self.batches[(self.number + i) % BATCHES] for i in (0, 1))
        self.step.clock.begin_step()
        self.step.expect(following)
        loss = self.step(batch, self.number).loss
        self.step.clock.end_step()
        self.number += 1
        return loss

    def round(self, steps: int, *, timed: bool) -> None:
        """Take some steps, of which the first begins on an idle device."""
        if self.step.world.device.type != "cuda":
            for _ in range(steps):
                began = time.perf_counter()
                self.losses.append(float(self.take()))
                self.step_ms += [1e3 * (time.perf_counter() - began)] * timed
            return
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = self.take()
        host_ms = 1e3 * (time.perf_counter() - began)
        # Behind the first one, which begins with an idle device, as none in a run does.
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps)]
        events[0].record()
        for event in events[1:]:
            loss = self.take()
            event.record()
        torch.cuda.synchronize()
        if timed:
            self.host_ms.append(host_ms)
            self.step_ms += [a.elapsed_time(b) for a, b in pairwise(events)]
        self.losses.append(float(loss))

    def begin_anew(self) -> None:
        """Forget what was measured, for rounds with another way."""
        self.step_ms, self.host_ms, self.losses = [], [], []

    def kernels(self, show: int) -> dict[str, float]:
        """Kernels of a step, and how long they run together; prints the longest."""
        if not self._kernels:
            self._kernels = self._counted(show)
        return self._kernels

    def _counted(self, show: int) -> dict[str, float]:
        if self.step.world.device.type != "cuda":
            return {}
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            self.take()
            torch.cuda.synchronize()
        found = [e for e in trace.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
        busy_ms = sum(e.self_device_time_total for e in found) / 1e3
        for event in sorted(found, key=lambda e: -e.self_device_time_total)[:show]:
            ms = event.self_device_time_total / 1e3
            _say(f"{self.name} {ms:9.3f} ms {event.count:5d} x {event.key[:120]}")
        return {"kernels": sum(e.count for e in found), "busy_ms": busy_ms}

    def waits(self) -> int:
        """Lookups that the host waited for, all told."""
        return getattr(self.step.engine, "waits", 0)


def main() -> None:
    """Measure, print, write."""
    given = _arguments()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    config = load_recipe(given.recipe, _settings(given))
    batches = _batches(config, given.examples, device)
    with one_rank_group("replicate", device):
        single = Way("single", config, World(device=device), batches)
        single.round(WARM_UP, timed=False)
        _say(f"single: losses begin {single.losses[-1]:.4f}")
        for name in given.ways:
            way = Way(name, config, World(device=device, way=name), batches)
            way.round(WARM_UP, timed=False)
            _say(f"{name}: losses begin {way.losses[-1]:.4f}")
            row = _compared(single, way, given, config)
            _say(str({k: v for k, v in row.items() if k not in ("set", "versions")}))
            if not given.dry:
                folder = given.out / device_folder(device_name(device))
                write_rows(folder / "one_rank.jsonl", [row])
            # Its memory is wanted by the next one.
            del way
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _compared(
    single: Way, way: Way, given: argparse.Namespace, config: RunConfig
) -> dict[str, Any]:
    """Rounds of one rank's own way and of another in turn; the row of that one."""
    for each in (single, way):
        each.begin_anew()
    for _ in range(given.rounds):
        for each in (single, way):
            each.round(given.steps, timed=True)
            _say(
                f"{each.name}: {median(each.step_ms):.1f} ms, host {each.host_ms[-1:]}, "
                f"waits {each.waits()}, loss {each.losses[-1]:.5f}"
            )
    found = [_figures(each, given.show) for each in (single, way)]
    return {
        "bench": "one_rank",
        "case": f"{config.name}, {way.name}, {given.examples} examples",
        "device": device_name(single.step.world.device),
        "set": _settings(given),
        "way": way.name,
        "rounds": given.rounds,
        "steps": given.steps,
        **found[1],
        "slower_ms": found[1]["step_ms"] - found[0]["step_ms"],
        "single": found[0],
        **provenance(),
    }


def _figures(way: Way, show: int) -> dict[str, Any]:
    """What was measured of a way."""
    return {
        "step_ms": median(way.step_ms),
        "step_ms_fastest": min(way.step_ms),
        "step_ms_slowest": max(way.step_ms),
        "host_ms": median(way.host_ms) if way.host_ms else None,
        "lookups": way.number,
        "waits": way.waits(),
        "losses": way.losses,
        **way.kernels(show),
    }


def _settings(given: argparse.Namespace) -> list[str]:
    tables = load_recipe(given.recipe).data.hash_rows
    return [
        "model.embeddings.initial_rows=by_place",
        f"train.batch_examples={given.examples}",
        *(f"data.hash_rows.{name}={given.table_rows}" for name in tables),
        *given.set,
    ]


def _batches(config: RunConfig, examples: int, device: torch.device) -> list[ExampleBatch]:
    schema, draw = declared_schema(config), torch.Generator().manual_seed(0)
    return [
        random_batch(
            schema,
            {s.name: uniform_lengths(examples, s.max_events, draw) for s in schema.streams},
            draw,
        ).to(device)
        for _ in range(BATCHES)
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="h200")
    parser.add_argument("--set", action="append", default=[], help="a.b=value, as in gem train")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--examples", type=int, default=1024)
    parser.add_argument("--table-rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of a round, at least 2")
    parser.add_argument("--show", type=int, default=0, help="longest kernels to print")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--dry", action="store_true", help="write no row")
    return parser.parse_args()


def _say(text: str) -> None:
    sys.stdout.write(f"{time.perf_counter() - BEGAN:6.1f} s  {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

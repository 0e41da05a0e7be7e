"""Time of a training step on several ranks with and without balance, on Zipf lengths.

    torchrun --nproc-per-node 2 packages/gem/benchmarks/balance_step.py [--out results]

Of many drawn steps those are timed whose imbalance without dealing is spread from none to 1.14.
Each is run as it stands in the log and as `parallel.balance = "global"` deals it, in turn, in the
same process, by the trainer's own step with the recipe's model; tables are smaller than the
recipe's. The row has for each of them the work of the heaviest rank over the mean, the time of the
step, and the time that the slowest rank computes on its own over the mean
(`gem.train.rank_times`). Writes ``results/<device>/balance_step.jsonl``.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from gem.config import RunConfig, load_recipe
from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch
from gem.planning.schema import declared_schema
from gem.train.balance import work_model
from gem.train.clock import StepClock
from gem.train.guard import Guard
from gem.train.loop_state import LoopState
from gem.train.rank_times import OwnTime
from gem.train.step import TrainStep
from gem_opkit.bench import device_folder, provenance, write_rows
from gem_opkit.ceilings import device_name
from gem_opkit.errors import MeasurementError, refusal
from gem_parallel.balance.imbalance import zipf_lengths
from gem_parallel.balance.step import Arrangement, Dealing, arrange
from gem_parallel.balance.work import max_over_mean
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.launch import World, process_group

RESULTS = Path(__file__).resolve().parents[3] / "results"
WAYS = ("off", "global")
DRAWN, MOST, TABLE_ROWS = 300, 1.14, 200_000
_determinism: Any = torch.utils.deterministic  # its setting is a property that no checker sees
BEGAN = time.perf_counter()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="h200-long")
    parser.add_argument("--set", action="append", default=[], help="a.b=value, as in gem train")
    parser.add_argument("--examples", type=int, default=2048, help="of a rank and step")
    parser.add_argument("--base-batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed in both ways")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--limit", type=float, default=300.0, help="s after which it is enough")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--dry", action="store_true", help="write no row")
    given = parser.parse_args()
    with process_group("auto") as world:
        if world.size == 1:
            parser.error("start it with torchrun on several ranks")
        row = measure(given, world)
        if world.is_first and not given.dry:
            place = device_folder(device_name(world.device), gpus=world.size)
            write_rows(given.out / place / "balance_step.jsonl", [row])


def measure(given: argparse.Namespace, world: World) -> dict[str, Any]:
    """Time drawn steps in both ways, in turn."""
    config = _config(given, world)
    schema = declared_schema(config)
    picked = _pick(given, config, schema, world)
    draw = torch.Generator().manual_seed(world.rank)
    batches = {
        (way, place): _batch(schema, lengths, found, way, world, draw)
        for place, (lengths, found) in enumerate(picked)
        for way in WAYS
    }
    torch.use_deterministic_algorithms(config.train.deterministic)
    _determinism.fill_uninitialized_memory = False
    guard = Guard(config.train.guard, world, LoopState())
    clock = StepClock(world.device)
    step = build_step(config, schema, world, total_steps=10_000, clock=clock, guard=guard)
    own = OwnTime(step.model, world.device)
    _say(world, "model")
    for number, place in enumerate((0, len(picked) - 1, len(picked) // 2)):
        losses = [float(step(batches[way, place], number).loss) for way in WAYS]
        if not np.isfinite(losses).all():
            raise MeasurementError(
                refusal("balance_step", "loss", must="be finite", got=losses, fix="mend the step")
            )
    _say(world, "warm")
    own.take_ms()
    ms: dict[tuple[str, int], list[float]] = {case: [] for case in batches}
    alone: dict[tuple[str, int], list[float]] = {case: [] for case in batches}
    for repeat in range(given.repeats):
        order = WAYS if repeat % 2 == 0 else WAYS[::-1]
        for place in range(len(picked)):
            for way in order:
                took, ratio = _timed(step, batches[way, place], own, world)
                ms[way, place].append(took)
                alone[way, place].append(ratio)
        # The ranks agree on whether it is enough.
        late = torch.tensor([float(time.perf_counter() - BEGAN > given.limit)])
        if float(all_reduce_sum(late.to(world.device), world)):
            break
    return _row(given, world, picked, ms, alone)


def _config(given: argparse.Namespace, world: World) -> RunConfig:
    recipe = load_recipe(given.recipe, given.set)
    overrides = [f"data.hash_rows.{table}={TABLE_ROWS}" for table in recipe.data.hash_rows]
    overrides += ["model.embeddings.initial_rows=by_place", "train.log_every_steps=1000"]
    overrides += ["train.window_steps=1000", f"train.batch_examples={given.examples * world.size}"]
    overrides += [f"parallel.replicate={world.size}", f"parallel.table_shard={world.size}"]
    return load_recipe(given.recipe, [*overrides, *given.set])


def _pick(
    given: argparse.Namespace, config: RunConfig, schema: BatchSchema, world: World
) -> list[tuple[dict[str, np.ndarray], Arrangement]]:
    """Drawn steps whose imbalance is spread evenly; the same on every rank."""
    work = work_model(config.model, schema)
    laws = {s.name: zipf_lengths(100_000, alpha=1.2, longest=s.max_events) for s in schema.streams}
    random, count = np.random.default_rng(7), given.examples * world.size
    dealing = Dealing("global", given.base_batch)
    drawn: list[tuple[dict[str, np.ndarray], Arrangement]] = []
    for _ in range(DRAWN):
        lengths = {n: law[random.integers(0, len(law), count)] for n, law in laws.items()}
        drawn.append((lengths, arrange(work.of(lengths), world.size, dealing)))
    before = np.asarray([max_over_mean(found.before_W) for _, found in drawn])
    wanted = np.linspace(1.0, min(MOST, before.max()), given.steps)
    return [drawn[int(np.argmin(np.abs(before - ratio)))] for ratio in wanted]


def _batch(
    schema: BatchSchema,
    lengths: dict[str, np.ndarray],
    found: Arrangement,
    way: str,
    world: World,
    draw: torch.Generator,
) -> ExampleBatch:
    """A rank's share of a step, with random values."""
    count = len(next(iter(lengths.values())))
    runs = [(count * world.rank // world.size, count * (world.rank + 1) // world.size)]
    if way != "off":
        runs = found.runs(world.rank)
    rows = np.concatenate([np.arange(low, high) for low, high in runs])
    own = {name: values[rows].tolist() for name, values in lengths.items()}
    return random_batch(schema, own, draw).to(world.device)


def _timed(step: TrainStep, batch: ExampleBatch, own: OwnTime, world: World) -> tuple[float, float]:
    """Milliseconds of a step, of the rank that took longest; and the slowest rank's own time."""
    all_reduce_sum(torch.zeros(1, device=world.device), world)
    _wait(world)
    began = time.perf_counter()
    step(batch, 0)
    _wait(world)
    took = 1e3 * (time.perf_counter() - began)
    told_W2 = torch.zeros(world.size, 2, dtype=torch.float64)
    told_W2[world.rank] = torch.tensor([took, own.take_ms()], dtype=torch.float64)
    told_W2 = all_reduce_sum(told_W2.to(world.device), world).cpu()
    return float(told_W2[:, 0].max()), max_over_mean(told_W2[:, 1].numpy())


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def _row(
    given: argparse.Namespace,
    world: World,
    picked: list[tuple[dict[str, np.ndarray], Arrangement]],
    ms: dict[tuple[str, int], list[float]],
    alone: dict[tuple[str, int], list[float]],
) -> dict[str, Any]:
    steps = [
        {
            "before": max_over_mean(found.before_W),
            "after": max_over_mean(found.after_W),
            **{f"{way}_ms": median(ms[way, place]) for way in WAYS},
            **{f"{way}_own": median(alone[way, place]) for way in WAYS},
        }
        for place, (_, found) in enumerate(picked)
    ]
    for one in steps:
        _say(world, ", ".join(f"{name} {value:.4f}" for name, value in one.items()))
    means = {f"{way}_ms": sum(one[f"{way}_ms"] for one in steps) / len(steps) for way in WAYS}
    _say(world, f"mean: {means}")
    return {
        "bench": "balance_step",
        "case": f"{given.recipe}, {world.size} ranks, Zipf 1.2, {given.examples} a rank",
        "device": device_name(world.device),
        "gpus": world.size,
        "set": given.set,
        "examples_a_rank": given.examples,
        "base_batch": given.base_batch,
        "repeats": len(ms[WAYS[0], 0]),
        **means,
        "steps": steps,
        **provenance(),
    }


def _say(world: World, text: str) -> None:
    if world.is_first:
        print(f"{time.perf_counter() - BEGAN:6.1f} s  {text}", flush=True)


if __name__ == "__main__":
    main()

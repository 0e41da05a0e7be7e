"""The whole training step of a recipe on batches drawn in memory: time, MFU, where time goes.

    python packages/gem/benchmarks/bench_step.py --recipe h200
    torchrun --nproc-per-node 2 packages/gem/benchmarks/bench_step.py --plan replicate=2

The real model and the trainer's own step; no data set is read, so that waiting for data is left
out. Each rank draws its own histories, uniform on 1 to the longest; the batch grows with the
ranks (weak scaling). Where memory does not hold a batch, it is run in more parts, and the row says
so. Before anything is timed, the losses of the first steps must be finite and near what an
untrained model has. A row goes to ``results/<device>/step.jsonl``.
"""

import argparse
import gc
import math
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gem.config import RunConfig, load_recipe
from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.model.flops import batch_flops
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.guard import Guard
from gem.train.loop_state import LoopState
from gem.train.mfu import efficiency
from gem.train.step import TrainStep
from gem_opkit.bench import device_folder, provenance, write_rows
from gem_opkit.ceilings import device_name
from gem_opkit.errors import MeasurementError, refusal
from gem_parallel.collectives import all_reduce_sum, barrier
from gem_parallel.launch import World, process_group

RESULTS = Path(__file__).resolve().parents[3] / "results"
BATCHES, MOST_PARTS = 4, 16
# Share by which the first loss may differ from that of the base rates: random logits, few labels.
LOSS_BAND = 0.3
_determinism: Any = torch.utils.deterministic  # its setting is a property that no checker sees
BEGAN = time.perf_counter()


def main() -> None:
    """Measure, print, write."""
    given = _arguments()
    with process_group(given.device) as world:
        row = measure(given, world)
        if world.is_first:
            _show(row)
            if not given.dry:
                place = device_folder(device_name(world.device), gpus=world.size)
                write_rows(given.out / place / "step.jsonl", [row])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="h200")
    parser.add_argument("--set", action="append", default=[], help="a.b=value, as in gem train")
    parser.add_argument("--plan", nargs="*", default=[], help="axis=size, such as shard=2")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--examples", type=int, default=None, help="examples of a rank; default the recipe's batch"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--kernels", type=int, default=0, help="longest kernels to print")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--dry", action="store_true", help="write no row")
    return parser.parse_args()


def measure(given: argparse.Namespace, world: World) -> dict[str, Any]:
    """Run the steps of a recipe under a plan, in as few parts a batch as memory holds."""
    examples = given.examples or load_recipe(given.recipe, given.set).train.batch_examples
    # A rank that holds a part of the tables draws rows by their place, so all do.
    overrides = ["model.embeddings.initial_rows=by_place", *given.set]
    overrides += [f"train.batch_examples={examples * world.size}"]
    overrides += [f"parallel.{text}" for text in given.plan]
    config = load_recipe(given.recipe, overrides)
    schema = declared_schema(config)
    draw = torch.Generator().manual_seed(world.rank)
    batches = []
    for _ in range(BATCHES):
        lengths = {s.name: uniform_lengths(examples, s.max_events, draw) for s in schema.streams}
        batches.append(random_batch(schema, lengths, draw).to(world.device))
    _stage("batches", world)
    torch.use_deterministic_algorithms(config.train.deterministic)
    _determinism.fill_uninitialized_memory = False
    parts = config.train.accumulation_parts
    while True:
        found = _try(given, config, schema, world, batches)
        if found is not None:
            return found
        parts *= 2
        if parts > MOST_PARTS:
            raise MeasurementError(
                refusal(
                    "bench_step",
                    "memory",
                    must=f"hold the step in {MOST_PARTS} parts",
                    got="too little",
                    fix="lower --examples",
                )
            )
        if world.is_first:
            _say(f"memory does not hold it: {parts} parts")
        config = load_recipe(given.recipe, [*overrides, f"train.accumulation_parts={parts}"])


def _try(
    given: argparse.Namespace,
    config: RunConfig,
    schema: BatchSchema,
    world: World,
    batches: list[ExampleBatch],
) -> dict[str, Any] | None:
    """Measure; None where the memory of some rank does not hold it."""
    full = False
    row: dict[str, Any] = {}
    try:
        row = _steps(given, config, schema, world, batches)
    except torch.OutOfMemoryError:
        if world.size > 1:
            raise  # the others wait in a collective: start again with more parts
        full = True
    if full:
        gc.collect()
        torch.cuda.empty_cache()
        return None
    return row


def _steps(
    given: argparse.Namespace,
    config: RunConfig,
    schema: BatchSchema,
    world: World,
    batches: list[ExampleBatch],
) -> dict[str, Any]:
    clock = StepClock(world.device)
    step = build_step(
        config,
        schema,
        world,
        total_steps=given.warmup + given.steps,
        clock=clock,
        guard=Guard(config.train.guard, world, LoopState()),
    )
    on_gpu = world.device.type == "cuda"
    _stage("model", world)
    losses = []
    for number in range(given.warmup):
        losses.append(step(batches[number % BATCHES], number).loss)
        _stage(f"step {number}", world)
    first_loss = _checked_loss(losses, config, schema, world)
    built_bytes = torch.cuda.memory_allocated() if on_gpu else None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    barrier(world)
    fresh = StepClock(world.device)
    clock.__dict__.update(fresh.__dict__)
    loss = torch.zeros(())
    for number in range(given.warmup, given.warmup + given.steps):
        clock.begin_step()
        loss = step(batches[number % BATCHES], number).loss
        clock.end_step()
    clock.settle()
    peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else None
    _stage("timed", world)
    last_loss = float(all_reduce_sum(loss.double(), world))
    if given.kernels and world.is_first and world.size == 1:
        _show_kernels(step, batches, given)
    done = list(clock.step_ms)
    flops = [batch_flops(config.model, schema, batch).total for batch in batches]
    timed = [flops[n % BATCHES] for n in range(given.warmup, given.warmup + given.steps)]
    sums = torch.tensor([sum(timed) / len(timed)], dtype=torch.float64, device=world.device)
    all_flops = float(all_reduce_sum(sums, world))
    examples = config.train.batch_examples
    step_ms = median(done)
    plan = " ".join(given.plan) or f"replicate={world.size}"
    return {
        "bench": "step",
        "case": f"{config.name}, {world.size} ranks, {plan}, {batches[0].examples} a rank",
        "device": device_name(world.device),
        "gpus": world.size,
        "plan": plan,
        "set": given.set,
        "examples_a_rank": batches[0].examples,
        "parts": config.train.accumulation_parts,
        "events_a_rank": [batch.event_tokens for batch in batches],
        "steps": given.steps,
        "step_ms": step_ms,
        "step_ms_fastest": min(done),
        "step_ms_slowest": max(done),
        "examples_per_s": 1e3 * examples / step_ms,
        "flops_a_step": all_flops,
        **efficiency(
            flops_per_example=all_flops / examples,
            examples_per_step=examples,
            step_ms=step_ms,
            device_name=device_name(world.device),
            world_size=world.size,
        ),
        "sections_ms": {k: 1e3 * v / given.steps for k, v in clock.seconds.items() if v},
        "held_bytes": built_bytes,
        "peak_bytes": peak_bytes,
        "loss_first": first_loss,
        "loss_last": last_loss,
        "left_out": "reading data; batches lie on the device",
        **provenance(),
    }


def _checked_loss(
    losses: list[torch.Tensor], config: RunConfig, schema: BatchSchema, world: World
) -> float:
    """The loss of the first step; refuses a step that computes something else."""
    total = [float(all_reduce_sum(loss.double(), world)) for loss in losses]
    rates = [config.model.heads.base_rates.get(task, 0.5) for task in schema.labels]
    # Half of the labels are 1, and an untrained model says the base rates.
    wanted = -0.5 * sum(math.log(rate) + math.log(1.0 - rate) for rate in rates)
    if not all(math.isfinite(x) for x in total) or abs(total[0] - wanted) > LOSS_BAND * wanted:
        raise MeasurementError(
            refusal(
                "bench_step",
                "loss",
                must=f"be finite and begin near {wanted:.3f}",
                got=[round(x, 4) for x in total],
                fix="check the model before its speed",
            )
        )
    return total[0]


def _show_kernels(step: TrainStep, batches: list[ExampleBatch], given: argparse.Namespace) -> None:
    """Print what takes longest on the device in one step."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step(batches[0], given.warmup)
        torch.cuda.synchronize()
    kernels = [e for e in trace.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    whole_ms = sum(e.self_device_time_total for e in kernels) / 1e3
    _say(f"kernels of one step: {whole_ms:.1f} ms in {sum(e.count for e in kernels)} launches")
    for event in kernels[: given.kernels]:
        ms = event.self_device_time_total / 1e3
        _say(f"{ms:9.2f} ms {1e2 * ms / whole_ms:5.1f} % {event.count:5d} x {event.key[:110]}")


def _stage(name: str, world: World) -> None:
    """Say what is done, and when, so that a run that is cut off tells how far it came."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if world.is_first:
        _say(f"{time.perf_counter() - BEGAN:7.1f} s  {name}")


def _show(row: dict[str, Any]) -> None:
    for key, value in row.items():
        _say(f"{key}: {value}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

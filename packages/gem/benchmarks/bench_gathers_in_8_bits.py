"""A sharded step in block FP8 with its weights gathered in bf16 and in 8 bits, in turn.

    torchrun --nproc-per-node 2 packages/gem/benchmarks/bench_gathers_in_8_bits.py

The trainer's own step of one recipe in one process a GPU, built twice from the same weights; every
layer at least 1,024 wide computes in ``fp8_block`` in both. Bytes are those that a rank gives to
the all-gathers of a forward pass, counted; the time of all-gathers in a whole step is that of
NCCL's kernels, which compute may hide. Rows go to ``results/<device>/gathers_in_8_bits.jsonl``.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from gem.config import RunConfig, load_recipe
from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.step import TrainStep
from gem_opkit.bench import device_folder, provenance, write_rows
from gem_opkit.ceilings import device_name
from gem_parallel.launch import World, process_group

RESULTS = Path(__file__).resolve().parents[3] / "results"
WAYS = {"bf16": "false", "8_bits": "true"}
BATCHES, WARM_UP = 2, 2


class Gathered(TorchDispatchMode):
    """Counts the bytes that a rank gives to FSDP's all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and go on."""
        if "c10d" in str(func) and "allgather_base" in str(func):
            given = [t for t in args if isinstance(t, torch.Tensor)]
            self.bytes += min(t.numel() * t.element_size() for t in given)
        return func(*args, **(kwargs or {}))


def config_of(given: argparse.Namespace, world: World, way: str) -> RunConfig:
    """Read the recipe; its tables are small, as they matter to neither way."""
    tables = load_recipe(given.recipe, given.settings).data.hash_rows
    return load_recipe(
        given.recipe,
        [
            *(f"data.hash_rows.{name}={given.table_rows}" for name in tables),
            "model.embeddings.initial_rows=by_place",
            f"parallel.shard={world.size}",
            f"parallel.table_shard={world.size}",
            "parallel.gather_dtype=bf16",
            f"train.batch_examples={given.examples * world.size}",
            *("precision.recipe=fp8_block", "precision.least_width=1024"),
            *given.settings,
            f"precision.gather_in_8_bits={WAYS[way]}",
        ],
    )


def batches_of(schema: BatchSchema, examples: int, world: World) -> list[ExampleBatch]:
    """Draw the batches of this rank."""
    draw = torch.Generator().manual_seed(world.rank)
    return [
        random_batch(
            schema,
            {s.name: uniform_lengths(examples, s.max_events, draw) for s in schema.streams},
            draw,
        ).to(world.device)
        for _ in range(BATCHES)
    ]


def gather_ms(step: TrainStep, batch: ExampleBatch, number: int, world: World) -> float | None:
    """Time of NCCL's all-gathers in one step."""
    if world.device.type != "cuda":
        step(batch, number)
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step(batch, number)
        torch.cuda.synchronize()
    kernels = [e for e in trace.key_averages() if "allgather" in e.key.lower()]
    return sum(e.self_device_time_total for e in kernels) / 1e3


def measure(given: argparse.Namespace, world: World) -> dict[str, Any]:
    """Steps of both ways in turn."""
    steps: dict[str, TrainStep] = {}
    batches: list[ExampleBatch] = []
    for way in WAYS:
        config = config_of(given, world, way)
        schema = declared_schema(config)
        batches = batches or batches_of(schema, given.examples, world)
        clock = StepClock(world.device)
        steps[way] = build_step(config, schema, world, total_steps=10_000, clock=clock)
    sent: dict[str, int] = {}
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(WARM_UP + given.steps):
        for way, step in steps.items():
            began = _now(world)
            loss = step(batches[number % BATCHES], number).loss
            ms = _slowest(1e3 * (_now(world) - began), world)
            losses[way].append(float(loss))
            if number >= WARM_UP:
                took[way].append(ms)
    gathers: dict[str, float | None] = {}
    for way, step in steps.items():
        with Gathered() as counted, torch.no_grad(), step.precision():
            step.wrapped(batches[0])
        sent[way] = counted.bytes
        gathers[way] = gather_ms(step, batches[0], WARM_UP + given.steps, world)
    eight = steps["8_bits"].gathered
    return {
        "bench": "gathers_in_8_bits",
        "case": f"{given.recipe}, {world.size} ranks, shard={world.size}, {given.examples} a rank",
        "device": device_name(world.device),
        "gathered": None if eight is None else eight.told(),
        "steps": given.steps,
        **{f"{way}_ms": median(ms) for way, ms in took.items()},
        **{f"{way}_forward_bytes": count for way, count in sent.items()},
        **{f"{way}_gather_ms": ms for way, ms in gathers.items()},
        "losses": losses,
        "settings": given.settings,
    }


def _now(world: World) -> float:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _slowest(ms: float, world: World) -> float:
    value = torch.tensor([ms], dtype=torch.float64, device=world.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="h200")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--examples", type=int, default=512, help="of a rank")
    parser.add_argument("--table-rows", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    with process_group(given.device) as world:
        if world.size == 1:
            parser.error("start it with torchrun on several ranks")
        row = measure(given, world)
        if world.is_first:
            sys.stdout.write(f"{row}\n")
            folder = device_folder(device_name(world.device), gpus=world.size)
            path = given.out / folder / "gathers_in_8_bits.jsonl"
            write_rows(path, [{**row, **provenance()}])


if __name__ == "__main__":
    main()

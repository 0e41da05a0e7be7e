"""A sharded step with parameters gathered by NCCL and by copy engines, in turn.

    torchrun --nproc-per-node 2 packages/gem/benchmarks/bench_gathers.py --examples 1024

The trainer's own step of one model in one process a GPU; rounds of either way alternate, so that a
card that gets slower does not decide. One training goes on through all rounds: the losses of a
row, the last of each round, show that it learns; that both ways give the same bits is what tests
hold.
Rows go to ``results/<device>/gathers.jsonl``.
"""

import argparse
import logging
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from gem.config import load_recipe
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.guard import Guard
from gem.train.loop_state import LoopState
from gem_opkit.bench import device_folder, provenance, write_rows
from gem_opkit.ceilings import device_name
from gem_parallel.copy_engine.buffers import BufferPool
from gem_parallel.copy_engine.gather import DefaultGather
from gem_parallel.copy_engine.units import gather_by_copy_engines
from gem_parallel.launch import World, process_group

RESULTS = Path(__file__).resolve().parents[3] / "results"
BATCHES, WARM_UP = 2, 2


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="h200")
    parser.add_argument("--set", action="append", default=[], help="a.b=value, as in gem train")
    parser.add_argument("--examples", type=int, default=1024, help="of a rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--dry", action="store_true", help="write no row")
    given = parser.parse_args()
    with process_group("auto") as world:
        if world.size == 1:
            parser.error("start it with torchrun on several ranks")
        if world.is_first:
            logging.basicConfig(level=logging.INFO, format="%(message)s")
        row = measure(given, world)
        if world.is_first:
            sys.stdout.write(f"{row}\n")
            if not given.dry:
                folder = device_folder(device_name(world.device), gpus=world.size)
                write_rows(given.out / folder / "gathers.jsonl", [{**row, **provenance()}])


def measure(given: argparse.Namespace, world: World) -> dict[str, Any]:
    """Rounds of both ways."""
    config = load_recipe(
        given.recipe,
        [
            "model.embeddings.initial_rows=by_place",
            f"parallel.shard={world.size}",
            f"parallel.table_shard={world.size}",
            f"train.batch_examples={given.examples * world.size}",
            *given.set,
        ],
    )
    schema, draw = declared_schema(config), torch.Generator().manual_seed(world.rank)
    batches = [
        random_batch(
            schema,
            {s.name: uniform_lengths(given.examples, s.max_events, draw) for s in schema.streams},
            draw,
        ).to(world.device)
        for _ in range(BATCHES)
    ]
    torch.use_deterministic_algorithms(config.train.deterministic)
    step = build_step(
        config,
        schema,
        world,
        total_steps=10_000,
        clock=StepClock(world.device),
        guard=Guard(config.train.guard, world, LoopState()),
    )
    units = [part for part in step.wrapped.modules() if isinstance(part, FSDPModule)]
    number = 0
    losses: dict[str, list[float]] = {"nccl": [], "copies": []}
    took: dict[str, list[float]] = {"nccl": [], "copies": []}
    held, loss = 0, 0.0
    pools: dict[int, BufferPool] = {}
    for round_ in range(given.rounds):
        for way in ("nccl", "copies"):
            if way == "nccl":
                for unit in units:
                    unit.set_custom_all_gather(DefaultGather())
            else:
                found = gather_by_copy_engines(
                    step.wrapped, world.device, way="copy_engine" if round_ else "measured"
                )
                pools = {id(g.pool): g.pool for g in found.values()}
            for call in range(WARM_UP + given.steps):
                began = _now(world)
                scored = step(batches[call % BATCHES], number)
                number += 1
                loss = float(scored.loss)
                if call >= WARM_UP:
                    took[way].append(_slowest(1e3 * (_now(world) - began), world))
            losses[way].append(loss)
            if way == "copies":
                held = sum(pool.held_bytes for pool in pools.values())
    nccl_ms, copies_ms = median(took["nccl"]), median(took["copies"])
    return {
        "bench": "gathers",
        "case": f"{config.name}, {world.size} ranks, shard={world.size}, {given.examples} a rank",
        "device": device_name(world.device),
        "set": given.set,
        "rounds": given.rounds,
        "steps": given.steps,
        "nccl_ms": nccl_ms,
        "copies_ms": copies_ms,
        "faster_frac": 1.0 - copies_ms / nccl_ms,
        "nccl_fastest_ms": min(took["nccl"]),
        "copies_fastest_ms": min(took["copies"]),
        "buffer_bytes": held,
        "losses": losses,
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


if __name__ == "__main__":
    main()

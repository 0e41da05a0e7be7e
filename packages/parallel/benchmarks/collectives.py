"""Time of every collective that a plan uses, over sizes: what a forecast's links are fitted to.

    torchrun --nproc-per-node 2 packages/parallel/benchmarks/collectives.py --results FILE

in the repository's root. A row holds the bytes that one rank gives and the median of its times; a
collective whose result is wrong ends the run before anything is timed. Without GPUs it runs small
sizes over gloo, which proves the script and measures the loopback.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_opkit.bench import provenance, write_rows
from gem_opkit.errors import MeasurementError, refusal
from gem_parallel.launch import World, process_group

GPU = torch.cuda.is_available()
SMALLEST, LARGEST = (12, 29) if GPU else (10, 16)  # powers of 2, bytes that a rank gives
CALLS = 12
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def main() -> None:
    """Check, time, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, help="file of rows to write")
    given = parser.parse_args()
    with process_group("cuda" if GPU else "cpu") as world:
        if world.size == 1:
            parser.error("start it with torchrun on several ranks")
        for kind in KINDS:
            check(kind, world)
        rows = [
            measure(kind, 2**power, world)
            for kind in KINDS
            for power in range(SMALLEST, LARGEST + 1)
        ]
        if world.is_first:
            for row in rows:
                print(row, flush=True)
            if given.results:
                name = torch.cuda.get_device_name() if GPU else "cpu"
                origin = {"device": f"{world.size} x {name}", **provenance()}
                write_rows(given.results, [{**row, **origin} for row in rows])


def call_of(kind: str, given: Tensor, world: World) -> tuple[Callable[[], Any], Tensor]:
    """A collective over all ranks, and where its result lies."""
    if kind == "all_gather":
        out = given.new_zeros(len(given) * world.size)
        return lambda: dist.all_gather_into_tensor(out, given), out
    if kind == "reduce_scatter":
        out = given.new_zeros(len(given) // world.size)
        return lambda: dist.reduce_scatter_tensor(out, given), out
    if kind == "all_to_all":
        out = torch.zeros_like(given)
        return lambda: dist.all_to_all_single(out, given), out
    return lambda: dist.all_reduce(given), given


def check(kind: str, world: World) -> None:
    """Refuse a collective that does not do what it is timed for."""
    each = 64
    given = torch.arange(each * world.size, dtype=torch.float32, device=world.device) + world.rank
    before = given.clone()
    run, out = call_of(kind, given, world)
    run()
    ranks = torch.arange(world.size, device=world.device, dtype=torch.float32)
    total = world.size * (before - world.rank) + ranks.sum()
    part = slice(each * world.rank, each * (world.rank + 1))
    wanted = {
        "all_gather": ((before - world.rank) + ranks[:, None]).flatten(),
        "reduce_scatter": total[part],
        "all_reduce": total,
        "all_to_all": ((before - world.rank)[part] + ranks[:, None]).flatten(),
    }[kind]
    if not torch.equal(out, wanted):
        raise MeasurementError(
            refusal("collectives", kind, must="give its result", got="another", fix="mend NCCL")
        )


def measure(kind: str, given_bytes: int, world: World) -> dict[str, Any]:
    """Median time of a collective, of the rank that took longest."""
    given = torch.zeros(given_bytes // 4, dtype=torch.float32, device=world.device)
    run, _ = call_of(kind, given, world)
    for _ in range(3):
        run()
    took = median(timed(run) for _ in range(CALLS))
    slowest = torch.tensor([took], dtype=torch.float64, device=world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {
        "bench": "collectives",
        "case": f"{kind} of {given_bytes} bytes",
        "collective": kind,
        "ranks": world.size,
        "given_bytes": given_bytes,
        "ms": float(slowest),
        "calls": CALLS,
    }


def timed(run: Callable[[], Any]) -> float:
    """Milliseconds of one call, ranks in step before it."""
    dist.barrier()
    if not GPU:
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


if __name__ == "__main__":
    main()

"""All-gathers by NCCL and by copy engines, alone and beside matrix products, over sizes.

    torchrun --nproc-per-node 2 packages/parallel/benchmarks/copy_engine.py --results FILE

in the repository's root, on GPUs of one host. A row holds the bytes that one rank gives, the median
times of both ways of the rank that took longest, and how much longer products of 8192 x 8192 in
bf16 take while gathers run beside them all the time. Gathers whose results differ end the run
before anything is timed.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gem_opkit.bench import provenance, write_rows
from gem_opkit.errors import MeasurementError, UnsupportedError, refusal
from gem_parallel.collectives import all_gather_single
from gem_parallel.copy_engine.buffers import BufferPool, SymmetricBuffer
from gem_parallel.copy_engine.gather import CopyEngineGather
from gem_parallel.copy_engine.reach import why_not
from gem_parallel.launch import World, process_group

SIZES = tuple(2**power for power in range(20, 31))
BESIDE = tuple(2**power for power in range(26, 30))
WARM_UP, CALLS, ROUNDS = 2, 8, 3
WIDTH, PRODUCTS = 8192, 16


def main() -> None:
    """Check, time, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, help="file of rows to write")
    given = parser.parse_args()
    with process_group("cuda") as world:
        if world.size == 1:
            parser.error("start it with torchrun on several ranks")
        reason = why_not(everybody(), world.device)
        if reason is not None:
            raise UnsupportedError(
                refusal("copy_engine", "ranks", must="read each other's memory", got=reason,
                        fix="start it on GPUs of one host")
            )  # fmt: skip
        rows = Gathers(world).rows()
        if world.is_first:
            for row in rows:
                print(row, flush=True)
            if given.results:
                name = torch.cuda.get_device_name()
                origin = {"device": f"{world.size} x {name}", **provenance()}
                write_rows(given.results, [{**row, **origin} for row in rows])


def everybody() -> dist.ProcessGroup:
    """The group of all ranks."""
    return cast(dist.ProcessGroup, dist.group.WORLD)


class Gathers:
    """Both ways, over the same ranks."""

    def __init__(self, world: World) -> None:
        self.world, group = world, everybody()
        pool = BufferPool(lambda bytes_: SymmetricBuffer(group, bytes_, world.device))
        self.copies = CopyEngineGather(group, pool, 0)
        most = SIZES[-1] * world.size
        self.lent = pool.lend(most, torch.uint8)
        self.plain = torch.empty(most, dtype=torch.uint8, device=world.device)
        self.x, self.w = (
            torch.randn(WIDTH, WIDTH, device=world.device, dtype=torch.bfloat16) for _ in range(2)
        )
        self.y = torch.empty_like(self.x)
        self.beside = torch.cuda.Stream(priority=-1)

    def ways(self, part_bytes: int) -> dict[str, Callable[[], Any]]:
        """Name -> a call that gathers so many bytes of each rank."""
        ranks, rank = self.world.size, self.world.rank
        lent, plain = (x[: part_bytes * ranks] for x in (self.lent, self.plain))
        own = plain.narrow(0, rank * part_bytes, part_bytes)
        return {
            "nccl": lambda: all_gather_single(plain, own),
            "copies": lambda: self.copies.fetch(lent),
        }

    def rows(self) -> list[dict[str, Any]]:
        """All rows."""
        self._check()
        found = []
        alone_ms = self._slowest([self._products_ms(None) for _ in range(ROUNDS)])
        for part_bytes in SIZES:
            ways = self.ways(part_bytes)
            times: dict[str, list[float]] = {name: [] for name in ways}
            for call in range(WARM_UP + CALLS):
                for name, run in ways.items():
                    took = self._timed(run)
                    if call >= WARM_UP:
                        times[name].append(took)
            row: dict[str, Any] = {
                "bench": "copy_engine",
                "case": f"all_gather of {part_bytes} bytes a rank",
                "ranks": self.world.size,
                "given_bytes": part_bytes,
                **{f"{name}_ms": self._slowest(taken) for name, taken in times.items()},
            }
            if part_bytes in BESIDE:
                slowed: dict[str, list[float]] = {name: [] for name in ways}
                for _ in range(ROUNDS):
                    for name, run in ways.items():
                        one_ms = max(row[f"{name}_ms"], 1e-3)
                        slowed[name].append(self._products_ms(run, one_ms))
                row["product_ms"] = alone_ms
                for name, taken in slowed.items():
                    row[f"product_beside_{name}_ms"] = self._slowest(taken)
            found.append(row)
        return found

    def _check(self) -> None:
        size = 2**20
        draw = torch.Generator(self.world.device).manual_seed(self.world.rank)
        own = torch.randint(
            0, 255, (size,), generator=draw, dtype=torch.uint8, device=self.lent.device
        )
        place = slice(self.world.rank * size, (self.world.rank + 1) * size)
        for whole in (self.lent, self.plain):
            whole[: size * self.world.size].zero_()
            whole[place] = own
        for run in self.ways(size).values():
            run()
        if not torch.equal(
            self.lent[: size * self.world.size], self.plain[: size * self.world.size]
        ):
            raise MeasurementError(
                refusal("copy_engine", "gather", must="give the bytes of NCCL's", got="others",
                        fix="mend it before its speed")
            )  # fmt: skip

    def _timed(self, run: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def _products_ms(self, gather: Callable[[], Any] | None, gather_ms: float = 1.0) -> float:
        """Milliseconds of one product, with gathers running beside all of them."""
        for _ in range(2):
            torch.mm(self.x, self.w, out=self.y)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if gather is not None:
            # More than enough: they must not end before the products do.
            self.beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.beside):
                for _ in range(2 + int(3.0 * PRODUCTS / gather_ms)):
                    gather()
        start.record()
        for _ in range(PRODUCTS):
            torch.mm(self.x, self.w, out=self.y)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / PRODUCTS

    def _slowest(self, taken: list[float]) -> float:
        """The median of one rank's times, of the rank where it is longest."""
        slowest: Tensor = torch.tensor(
            [median(taken)], dtype=torch.float64, device=self.lent.device
        )
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)


if __name__ == "__main__":
    main()

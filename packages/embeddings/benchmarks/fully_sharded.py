"""Two sharding groups on two GPUs: plain 2D, exact 2D, fully sharded 2D; time of a step and memory.

Fully sharded rows are gathered by the backend and by copy engines; how long one gathering of all
rows and accumulators takes with nothing beside it stands in the row.

Then one group of both GPUs: bytes of its exchange, and the share of a step in which nothing but
the exchange runs. 26 tables feed a dense part of twelve wide layers. The variants train in turn
in one process, the ids of the next batch under way while one trains. Run

    torchrun --nproc-per-node 2 packages/embeddings/benchmarks/fully_sharded.py

in the repository's root, with ``--results FILE`` to make rows of its figures. Without GPUs it runs
a small case over gloo, which proves the script and measures nothing.
"""

import argparse
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from gem_embeddings.contract import OptimizerSpec, RowDtype, Sharding, TableSpec
from gem_embeddings.engine import Exchanged, StartedLookup, build_tables
from gem_embeddings.plan import place_tables
from gem_embeddings.sharded.engine import TorchTables
from gem_jagged.batch import Jagged
from gem_opkit.bench import provenance, write_rows
from gem_parallel.copy_engine.choose import GatherChoice
from gem_parallel.launch import World, process_group

GPU = torch.cuda.is_available()
TABLES, ROWS, WIDTH, EXAMPLES, IDS = (26, 200_000, 128, 8192, 10) if GPU else (3, 500, 16, 64, 5)
LAYERS, DENSE_WIDTH = (12, 8192) if GPU else (2, 64)
ROUNDS, STEPS = 4, 4
# What ends a step: a mean of all rows, nothing, gradients exchanged before rows move, the mean of
# slices, that with rows gathered ahead; the last two by copy engines.
VARIANTS = (
    *("plain", "no sync", "exact", "fully sharded", "gathered ahead"),
    *("copied", "copied ahead"),
)
AHEAD = ("gathered ahead", "copied ahead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="file of rows to write")
    given = parser.parse_args()
    with process_group("cuda" if GPU else "cpu") as world:
        rows = measure(world)
        if world.is_first:
            for row in rows:
                print(row)
            if given.results:
                name = torch.cuda.get_device_name() if GPU else "cpu"
                origin = {"device": f"2 x {name}", **provenance()}
                write_rows(given.results, [{**row, **origin} for row in rows])


def measure(world: World) -> list[dict[str, Any]]:
    batches = [ids_of(world, step) for step in range(2)]
    net = dense(world)
    rows = two_groups(world, net, batches)
    return rows + [exchange(world, net, batches, wire) for wire in ("fp32", "bf16")]


def two_groups(
    world: World, net: nn.Sequential, batches: list[dict[str, Jagged]]
) -> list[dict[str, Any]]:
    """A row of each variant; what they hold is gone afterwards."""
    plain, sliced = (engine_of(world, fully_sharded=fully) for fully in (False, True))
    exact = engine_of(world, fully_sharded=False, replicas="gradients")
    copied = engine_of(world, fully_sharded=True, copies=GPU)
    of_variants = (plain, plain, exact, sliced, sliced, copied, copied)
    engines = dict(zip(VARIANTS, of_variants, strict=True))
    took: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(ROUNDS + 1):
        for name, engine in engines.items():
            times = timed(engine, net, batches, name)
            # The first turn compiles kernels, the first step of each warms up.
            took[name] += times[1:] if turn else []
    rows: list[dict[str, Any]] = []
    gathers = {engine: gather_ms(engine) for engine in (sliced, copied)}
    for name, engine in engines.items():
        others = [other for other in (plain, sliced, exact, copied) if other is not engine]
        for each in (sliced, copied):
            timed(each, net, batches, "fully sharded")  # leaves nothing gathered
        # Memory that peers see is none of the allocator's; asking waits for means that are formed,
        # whose buffers would be in the peak.
        sliced.resident_bytes()
        outside = copied.resident_bytes() if GPU else 0
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        timed(engine, net, batches, name)
        held = engine.resident_bytes()
        beside = sum(other.resident_bytes() for other in others)
        peak = torch.cuda.max_memory_allocated() + outside - beside if GPU else None
        rows.append(
            {
                "bench": "fully_sharded",
                "case": name,
                "ms": median(took[name]),
                "over_plain": median(took[name]) / median(took["plain"]),
                "rows_bytes_after_step": held,
                "peak_bytes": peak,
                "gather_ms": gathers.get(engine),
                "ids": sum(batch.total_tokens for batch in batches[0].values()),
            }
        )
    return rows


def gather_ms(engine: TorchTables) -> float:
    """Time of gathering all rows and accumulators, alone; the median of some."""
    took: list[float] = []
    for _ in range(STEPS + 1):
        wait()
        begun = time.perf_counter()
        engine.gather_ahead(backward=True)
        engine.wait_gathered()
        wait()
        took.append((time.perf_counter() - begun) * 1e3)
        engine.load_table_state(engine.table_state())  # lets go of the whole
    return median(took[1:])


def exchange(
    world: World, net: nn.Sequential, batches: list[dict[str, Jagged]], wire: RowDtype
) -> dict[str, Any]:
    """A row of one group of all ranks, whose tables are cut by rows."""
    engine = engine_of(world, fully_sharded=False, groups=1, wire=wire)
    took = timed(engine, net, batches, "no sync")[1:]
    sent = engine.group.sent_bytes["all_to_all"]
    timed(engine, net, batches, "no sync")
    return {
        "bench": "fully_sharded",
        "case": f"one group, {wire} vectors",
        "ms": median(took),
        "sent_bytes_a_step": (engine.group.sent_bytes["all_to_all"] - sent) / STEPS,
        "exposed_frac": exposed_frac(engine, net, batches) if GPU else None,
    }


def exposed_frac(
    engine: TorchTables, net: nn.Sequential, batches: list[dict[str, Jagged]]
) -> float:
    """Share of some steps in which kernels of NCCL run and no others."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        timed(engine, net, batches, "no sync")
    marks: list[tuple[float, int, bool]] = []
    for event in seen.events() or ():
        times = event.time_range
        if event.device_type == torch.autograd.DeviceType.CUDA and times.end > times.start:
            travels = "nccl" in event.name.lower()
            marks += [(times.start, 1, travels), (times.end, -1, travels)]
    marks.sort()
    running, alone, last = {True: 0, False: 0}, 0.0, marks[0][0]
    for moment, change, travels in marks:
        if running[True] and not running[False]:
            alone += moment - last
        running[travels] += change
        last = moment
    return alone / (marks[-1][0] - marks[0][0])


def engine_of(
    world: World,
    *,
    fully_sharded: bool,
    groups: int | None = None,
    wire: RowDtype = "fp32",
    replicas: Exchanged = "weights",
    copies: bool = False,
) -> TorchTables:
    """Tables in groups of one rank, whole or sliced; with ``groups=1`` cut by rows over all."""
    groups = world.size if groups is None else groups
    specs = [
        TableSpec(
            name=f"t{i}", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=(f"f{i}",),
            id_space="hash",
        )
        for i in range(TABLES)
    ]  # fmt: skip
    scale = groups if replicas == "weights" else 1
    rule = OptimizerSpec(lr=0.01, moment_scale=float(scale))
    kind: Sharding = "table_wise" if groups == world.size else "row_wise"
    plan = place_tables(
        specs,
        {spec.name: kind for spec in specs},
        table_shard=world.size // groups,
        table_replicate=groups,
        fully_sharded=fully_sharded,
        optimizer=rule,
    )
    gathers = GatherChoice("copy_engine", named=("fully_sharded", "gathers"), what="tables")
    engine = build_tables(
        specs, (), plan, rule, world, wire_dtype=wire, replicas=replicas,
        gathers=gathers if copies else None,
    )  # fmt: skip
    if not isinstance(engine, TorchTables):
        raise TypeError(type(engine))
    return engine


def ids_of(world: World, step: int) -> dict[str, Jagged]:
    draw = torch.Generator().manual_seed(10 * step + world.rank)
    found: dict[str, Jagged] = {}
    for index in range(TABLES):
        lengths = torch.randint(0, 2 * IDS + 1, (EXAMPLES,), generator=draw)
        skewed = torch.rand(int(lengths.sum()), generator=draw) ** -1.2
        values = skewed.clamp(max=2.0**40).to(torch.int64)
        found[f"f{index}"] = Jagged.from_lengths(values, lengths).to(world.device)
    return found


def dense(world: World) -> nn.Sequential:
    widths = [TABLES * WIDTH, *[DENSE_WIDTH] * LAYERS]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out, bias=False), nn.ReLU()]
    return nn.Sequential(*layers).to(world.device, torch.bfloat16)


def timed(
    engine: TorchTables, net: nn.Sequential, batches: list[dict[str, Jagged]], name: str
) -> list[float]:
    """Milliseconds of each of some steps."""
    started = engine.start(batches[0])
    times: list[float] = []
    for step in range(STEPS):
        wait()
        begun = time.perf_counter()
        started = train(engine, net, started, batches[(step + 1) % len(batches)], name)
        wait()
        times.append((time.perf_counter() - begun) * 1e3)
        net.zero_grad()
    return times


def train(
    engine: TorchTables,
    net: nn.Sequential,
    started: StartedLookup,
    following: dict[str, Jagged],
    name: str,
) -> StartedLookup:
    vectors = engine(started)
    coming = engine.start(following)
    x_BD = torch.cat([vector.to(torch.bfloat16) for vector in vectors.values()], dim=1)
    middle_BF = net[:LAYERS](x_BD)
    ahead = name in AHEAD
    if ahead:

        def gather(_: Tensor) -> None:
            engine.gather_ahead(backward=True)

        middle_BF.register_hook(gather)
    net[LAYERS:](middle_BF).float().square().mean().backward()
    if name == "plain":
        engine.sync()
    if ahead:
        engine.gather_ahead(backward=False)
    with torch.no_grad():
        for param in net.parameters():
            if param.grad is not None:
                param.sub_(param.grad, alpha=1e-4)
    return coming


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

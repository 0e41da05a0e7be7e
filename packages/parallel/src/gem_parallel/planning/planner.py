"""Find the plans whose step is shortest, and say why: enumerate, forecast, rank.

The dense part is forecast by itself under each of its plans. The best of these are put together
with the ways to spread tables that are cheapest beside them, since what tables exchange may run
beside the dense optimizer.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gem_opkit.errors import ConfigError, refusal
from gem_parallel.contract import DENSE_AXES, SPARSE_AXES, ParallelPlan, TableCopies, Topology
from gem_parallel.planning.compute import optimizer_ms
from gem_parallel.planning.exchanged import Exchanged, contention_of, table_times
from gem_parallel.planning.forecast import Forecast, accelerator_of, forecast
from gem_parallel.planning.links import axis_group
from gem_parallel.planning.rates import Rates
from gem_parallel.planning.work import Hider, TableStep, Work

TablesFor = Callable[[ParallelPlan, Topology], TableStep]
_PLAIN = ParallelPlan()
# Of each side the best that are put together: enough that memory can rule some out.
_PAIRED = 6
# Each part of each table is placed, under each plan of the tables: more ranks take minutes.
MOST_RANKS = 16_384
# What a plan says of tables beside their axes.
_OF_TABLES = ("fully_sharded_tables", "table_copies")


@dataclass(frozen=True, slots=True)
class Ranked:
    """One plan with what speaks for and against it.

    Attributes:
        forecast: of its step.
        reason: which collectives it waits for, over which links, and what it costs in memory.
    """

    forecast: Forecast
    reason: str

    @property
    def plan(self) -> ParallelPlan:
        """The plan."""
        return self.forecast.plan


@dataclass(frozen=True, slots=True)
class Search:
    """The outcome of a search.

    Attributes:
        best: plans in the order of their step times, those that fit first.
        tried: plans that were forecast.
        refused: reason -> number of plans that were left out for it.
        single: the forecast of one rank alone, which weak scaling is measured against.
    """

    best: tuple[Ranked, ...]
    tried: int
    refused: Mapping[str, int]
    single: Forecast

    def weak_scaling(self, found: Forecast) -> float:
        """MFU of a plan over that of one rank.

        Args:
            found: forecast of the plan.

        Returns:
            above 1 where a plan saves more than it exchanges.
        """
        return found.e2e_mfu / self.single.e2e_mfu


def divisors(number: int) -> list[int]:
    """All divisors.

    Args:
        number: at least 1.

    Returns:
        them, rising.
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def dense_plans(work: Work, ranks: int, like: ParallelPlan = _PLAIN) -> Iterator[ParallelPlan]:
    """Every way to spread the dense part that deals experts out evenly.

    Args:
        work: says how many experts there are.
        ranks: number of ranks.
        like: what else than its axes every plan has.

    Yields:
        plans whose tables are copies.
    """
    counts = [len(unit.experts) for unit in work.units if unit.experts]
    experts = math.gcd(*counts) if counts else 1
    for expert in divisors(math.gcd(experts, ranks)):
        for shard in divisors(ranks // expert):
            yield ParallelPlan(
                replicate=ranks // expert // shard,
                shard=shard,
                expert=expert,
                table_replicate=ranks,
                replicate_below=like.replicate_below,
                gather_dtype=like.gather_dtype,
                reduce_dtype=like.reduce_dtype,
                keep_gathered=like.keep_gathered,
            )


def table_plans(topology: Topology) -> Iterator[ParallelPlan]:
    """Every way to spread tables.

    Copies are neighbours that fill hosts or divide one; or they lie far apart, where there are
    several hosts, and each fills hosts or divides one.

    Args:
        topology: hosts.

    Yields:
        plans whose dense parameters are copies.
    """
    ranks, host = topology.world_size, topology.ranks_per_host
    for copies in divisors(ranks):
        parts = ranks // copies
        inner_of: dict[TableCopies, int] = {"near": copies, "far": parts}
        for where, inner in inner_of.items():
            if host % inner and inner % host:
                continue
            # Alike where only one of the two is cut, or one host holds all; of no use across zones.
            alike = copies == 1 or parts == 1 or topology.hosts == 1
            if where == "far" and (alike or parts > host * topology.hosts_per_zone):
                continue
            for fully in (False, True) if copies > 1 else (False,):
                yield ParallelPlan(
                    replicate=ranks,
                    table_shard=parts,
                    table_replicate=copies,
                    table_copies=where,
                    fully_sharded_tables=fully,
                )


def search(
    work: Work,
    topology: Topology,
    *,
    tables: TablesFor,
    rates: Rates,
    fixed: Mapping[str, int | bool | str] | None = None,
    like: ParallelPlan = _PLAIN,
    most: int = 5,
) -> Search:
    """Rank the plans for some machines.

    Args:
        work: what one rank's batch needs.
        topology: the machines.
        tables: what tables cost under a plan; raises ConfigError where they do not fit.
        rates: of the forecast.
        fixed: axis, ``fully_sharded_tables`` or ``table_copies`` -> value that every plan must
            have.
        like: what else than its axes every plan has, such as the format of its gathers.
        most: plans wanted.

    Returns:
        the best plans, fewer where there are fewer.

    Raises:
        ConfigError: a fixed axis that no plan has, tables that fit under no plan, more than
            `MOST_RANKS` ranks, or no plan wanted.
    """
    if topology.world_size > MOST_RANKS:
        raise ConfigError(
            refusal(
                "planner",
                "topology",
                must=f"have at most {MOST_RANKS} ranks: every part of every table is placed under "
                "every plan",
                got=f"hosts={topology.hosts} * ranks_per_host={topology.ranks_per_host} = "
                f"{topology.world_size}",
                fix="plan for fewer ranks",
            )
        )
    if most < 1:
        raise ConfigError(
            refusal("planner", "most", must="be at least 1", got=most, fix="ask for a plan")
        )
    fixed = dict(fixed or {})
    _check_fixed(fixed)
    tables = _once(tables)
    device = accelerator_of(topology)
    refused: dict[str, int] = {}
    dense = [
        forecast(work, plan, topology, rates=rates)
        for plan in dense_plans(work, topology.world_size, like)
        if _has(plan, fixed, DENSE_AXES)
    ]
    sparse = _table_steps(topology, tables, fixed, refused)
    if not dense or not sparse:
        axes = SPARSE_AXES if dense else DENSE_AXES
        raise _nothing(fixed, topology, work, refused, axes)
    dense.sort(key=lambda found: (not found.fits, found.step_ms))
    pairs: list[Forecast] = []
    for one in _varied(dense):
        for plan, step in _cheapest(one, work, sparse, topology, rates):
            whole = one.plan.model_copy(
                update={
                    "table_shard": plan.table_shard,
                    "table_replicate": plan.table_replicate,
                    "fully_sharded_tables": plan.fully_sharded_tables,
                    "table_copies": plan.table_copies,
                }
            )
            pairs.append(forecast(work, whole, topology, tables=step, rates=rates))
    pairs.sort(key=lambda found: (not found.fits, found.step_ms))
    too_large = sum(not found.fits for found in (*dense, *pairs))
    if too_large:
        refused[f"more memory than the {device.memory_gib:g} GiB of a rank"] = too_large
    alone = topology.model_copy(update={"hosts": 1, "ranks_per_host": 1})
    single = forecast(
        work, ParallelPlan(), alone, tables=tables(ParallelPlan(), alone), rates=rates
    )
    best = [Ranked(found, _reason(found, pairs[0])) for found in pairs[:most]]
    return Search(tuple(best), len(dense) + len(pairs), refused, single)


def _once(tables: TablesFor) -> TablesFor:
    """Ask for each cut of the tables once: many plans have the same."""
    known: dict[tuple[int, int, int, bool, str], TableStep] = {}

    def ask(plan: ParallelPlan, topology: Topology) -> TableStep:
        key = (
            topology.world_size,
            plan.table_shard,
            plan.table_replicate,
            plan.fully_sharded_tables,
            plan.table_copies,
        )
        if key not in known:
            known[key] = tables(plan, topology)
        return known[key]

    return ask


def _table_steps(
    topology: Topology,
    tables: TablesFor,
    fixed: Mapping[str, int | bool | str],
    refused: dict[str, int],
) -> list[tuple[ParallelPlan, TableStep]]:
    """Every way to spread tables that fits, with what it costs."""
    found: list[tuple[ParallelPlan, TableStep]] = []
    for plan in table_plans(topology):
        if not _has(plan, fixed, (*SPARSE_AXES, *_OF_TABLES)):
            continue
        try:
            found.append((plan, tables(plan, topology)))
        except ConfigError as fault:
            # Its rule, without what it got: that differs from plan to plan.
            why = str(fault).partition("; got ")[0]
            refused[why] = refused.get(why, 0) + 1
    return found


def _cheapest(
    dense: Forecast,
    work: Work,
    sparse: Sequence[tuple[ParallelPlan, TableStep]],
    topology: Topology,
    rates: Rates,
) -> list[tuple[ParallelPlan, TableStep]]:
    """The ways to spread tables that cost least beside what a dense plan has them run beside."""
    norms_ms, adam_ms = optimizer_ms(work, dense.plan, accelerator_of(topology), rates)
    hiders: dict[Hider, float] = {
        "model": dense.parts_ms["compute"],
        "norms": norms_ms,
        "optimizer": adam_ms,
    }

    def cost(pair: tuple[ParallelPlan, TableStep]) -> float:
        plan, step = pair
        found = table_times(
            step, lambda axis: axis_group(plan, axis, topology), topology, rates, hiders
        )
        slowed = sum(contention_of(rates, links) * ms for links, ms in found.hidden_ms.items())
        return found.local_ms + found.exposed_ms + slowed

    return sorted(sparse, key=cost)[:_PAIRED]


def _varied(dense: Sequence[Forecast]) -> list[Forecast]:
    """The fastest dense plans, and the one that holds least, for tables that leave little room."""
    chosen = list(dense[:_PAIRED])
    least = min(dense, key=lambda found: found.memory.total)
    return chosen if least in chosen else [*chosen, least]


def _has(plan: ParallelPlan, fixed: Mapping[str, int | bool | str], names: Sequence[str]) -> bool:
    return all(getattr(plan, name) == fixed[name] for name in names if name in fixed)


def _check_fixed(fixed: Mapping[str, int | bool | str]) -> None:
    known = (*DENSE_AXES, *SPARSE_AXES, *_OF_TABLES)
    for name in fixed:
        if name not in known:
            raise ConfigError(
                refusal(
                    "planner",
                    "fixed",
                    must=f"name axes ({', '.join(known)})",
                    got=repr(name),
                    fix="correct or remove it",
                )
            )


def _nothing(
    fixed: Mapping[str, int | bool | str],
    topology: Topology,
    work: Work,
    refused: Mapping[str, int],
    axes: Sequence[str],
) -> ConfigError:
    """Say with every factor why no plan is left."""
    wanted = " * ".join(f"{axis}={fixed.get(axis, 'any')}" for axis in axes)
    counts = sorted({len(unit.experts) for unit in work.units if unit.experts})
    why = "; ".join(f"{number} plans: {reason}" for reason, number in refused.items())
    return ConfigError(
        refusal(
            "planner",
            "plan",
            must=f"multiply to hosts={topology.hosts} * ranks_per_host={topology.ranks_per_host} = "
            f"{topology.world_size} with an expert axis that divides the experts "
            f"({', '.join(map(str, counts)) or 'there are none'})",
            got=wanted + (f"; {why}" if why else ""),
            fix="change or free one of these axes, or take more ranks",
        )
    )


def _reason(found: Forecast, best: Forecast) -> str:
    """Name what the step waits for, and how it differs from the best plan."""
    parts: list[str] = []
    if found is not best:
        parts.append(f"{found.step_ms - best.step_ms:+.2f} ms against the best")
    if not found.fits:
        parts.append(f"does not fit: {_gib(found.memory.total)} a rank")
    waits = [each for each in found.exchanged if each.ms > 0]
    waits.sort(key=lambda each: -each.ms)
    for part in ("dense", "tables"):
        of = [each for each in waits if each.part == part]
        if of:
            exposed = found.parts_ms[f"exposed {part}"]
            parts.append(f"{part} exposed {exposed:.2f} ms; longest: {_told(of[0])}")
    if not waits:
        parts.append("no collective")
    return "; ".join(parts)


def _told(each: Exchanged) -> str:
    return (
        f"{each.collective} of {', '.join(each.what)} over {each.axis} ({each.members} ranks, "
        f"{each.tier}): {each.given_bytes / 2**20:.1f} MiB a rank, {each.ms:.2f} ms alone"
    )


def _gib(amount: float) -> str:
    return f"{amount / 2**30:.1f} GiB"

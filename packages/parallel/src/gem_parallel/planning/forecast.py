"""The forecast of a training step: time by part, exposed communication, memory, MFU.

    step = tables before + forward + backward + tables behind + optimizer + host gaps
    compute of a unit = Σ max(FLOPs / matmul rate, bytes / bandwidth) / share that its kind reaches
    the slowest rank has mean + spread · √(2 ln ranks) of that work

Collectives run beside compute as `timeline` says, those of tables beside what their traffic names;
what is left over is exposed. Hidden ones slow what they run beside.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gem_opkit.errors import ConfigError, refusal
from gem_parallel.contract import Accelerator, ParallelPlan, Topology
from gem_parallel.planning.compute import compute_ms, kinds_ms, optimizer_ms, slowest, weights_ms
from gem_parallel.planning.exchanged import (
    Exchanged,
    GroupOf,
    TableTimes,
    contention_of,
    gathered_up,
    queue_of,
    table_times,
)
from gem_parallel.planning.links import AxisGroup, axis_group, collective_ms
from gem_parallel.planning.memory import Memory, memory
from gem_parallel.planning.rates import Rates
from gem_parallel.planning.timeline import Queues, Segment, Transfer, end, run
from gem_parallel.planning.traffic import DenseTraffic, dense_traffic
from gem_parallel.planning.work import Hider, TableStep, Unit, Work


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a step of a plan takes, on the slowest rank.

    Attributes:
        plan: the plan.
        ranks: number of ranks.
        step_ms: time of a step.
        parts_ms: where it goes; the parts add up to it.
        kinds_ms: kind of work -> time of forward and backward compute, a share of ``compute``.
        exchanged: every collective.
        memory: bytes of a rank.
        fits: whether the accelerator's memory holds it.
        flops: model FLOPs of one rank's batch.
        e2e_mfu: share of the peak that the step reaches.
        local_mfu: that of forward and backward compute alone, on one rank, without collectives.
        scaling_ratio: the first over the second.
    """

    plan: ParallelPlan
    ranks: int
    step_ms: float
    parts_ms: Mapping[str, float]
    kinds_ms: Mapping[str, float]
    exchanged: tuple[Exchanged, ...]
    memory: Memory
    fits: bool
    flops: int
    e2e_mfu: float
    local_mfu: float
    scaling_ratio: float

    @property
    def exposed_ms(self) -> float:
        """Time in which nothing but collectives runs."""
        return self.parts_ms["exposed dense"] + self.parts_ms["exposed tables"]


def forecast(
    work: Work,
    plan: ParallelPlan,
    topology: Topology,
    *,
    tables: TableStep | None = None,
    rates: Rates,
) -> Forecast:
    """Forecast a step.

    Args:
        work: what one rank's batch needs.
        plan: sizes of the axes.
        topology: machines, of as many ranks, with an accelerator.
        tables: what tables cost under this plan; None for a model without.
        rates: shares of the roofline, overlap, overheads.

    Returns:
        the forecast.

    Raises:
        ConfigError: another number of ranks, an expert count that the axis does not divide, a
            topology without an accelerator or whose figures give no step time, or a kind of work
            without a rate.
    """
    plan.check_world(topology.world_size)
    check_experts(work, plan)
    device = accelerator_of(topology)
    tables = TableStep() if tables is None else tables
    groups: dict[str, AxisGroup] = {}

    def group_of(axis: str) -> AxisGroup:
        if axis not in groups:
            groups[axis] = axis_group(plan, axis, topology)
        return groups[axis]

    timed: list[tuple[DenseTraffic, float]] = []
    for each in dense_traffic(work, plan):
        group = group_of(each.axis)
        given = each.given_bytes
        ms = collective_ms(each.collective, given, group, topology, rates, calls=each.calls)
        timed.append((each, ms))
    slow = slowest(work, plan.world_size)
    own = compute_ms(work, plan, device, rates)
    copied = {unit.name: weights_ms(unit, work, plan, device) for unit in work.units}
    alone = sum(sum(ms) for ms in compute_ms(work, ParallelPlan(), device, rates).values())
    queues = Queues()
    for index in range(2):
        phase = ("forward", "backward")[index]
        spent = {name: ms[index] * slow + copied[name][index] for name, ms in own.items()}
        segments = [
            _segment(units, phase, spent, timed, group_of, topology)
            for units in _run_together(work.units)
        ]
        run(segments if index == 0 else segments[::-1], queues, rates.prefetch_units)
    even = sum(sum(ms) for ms in own.values())
    copies = sum(sum(ms) for ms in copied.values())
    compute = slow * even + copies
    exposed = max(0.0, end(queues) - compute)
    norms_ms, adam_ms = optimizer_ms(work, plan, device, rates)
    hiders: dict[Hider, float] = {"model": compute, "norms": norms_ms, "optimizer": adam_ms}
    of_tables = table_times(tables, group_of, topology, rates, hiders)
    parts = {
        "compute": even,
        "imbalance": (slow - 1.0) * even,
        "weight copies": copies,
        "contention": _contention_ms(timed, exposed, of_tables, group_of, topology, rates),
        "exposed dense": exposed,
        "tables": of_tables.local_ms,
        "exposed tables": of_tables.exposed_ms,
        "optimizer": norms_ms + adam_ms,
        "host": rates.host_ms,
    }
    step_ms = sum(parts.values())
    peak = device.peak_tflops * 1e12
    flops = work.flops()
    held = memory(work, plan, tables, prefetch=rates.prefetch_units)
    e2e, local = (1e3 * flops / (peak * ms) if ms > 0 else 0.0 for ms in (step_ms, alone))
    if not math.isfinite(step_ms) or (flops and not 0.0 < e2e < math.inf):
        raise ConfigError(
            refusal(
                "forecast",
                "topology",
                must="have bandwidths, latencies and rates that give a step time",
                got=f"{step_ms:g} ms at {device.peak_tflops:g} TFLOP/s",
                fix="check their units: 10^9 bytes/s, microseconds, 10^12 FLOP/s",
            )
        )
    return Forecast(
        plan=plan,
        ranks=plan.world_size,
        step_ms=step_ms,
        parts_ms=parts,
        kinds_ms=kinds_ms(work, plan, device, rates),
        exchanged=gathered_up(timed, group_of, topology) + of_tables.exchanged,
        memory=held,
        fits=held.total <= device.memory_gib * 2**30,
        flops=flops,
        e2e_mfu=e2e,
        local_mfu=local,
        scaling_ratio=e2e / local if local > 0 else 0.0,
    )


def accelerator_of(topology: Topology) -> Accelerator:
    """Return what a topology's ranks compute with.

    Args:
        topology: the machines.

    Returns:
        its memory and its rates.

    Raises:
        ConfigError: it says nothing of that.
    """
    if topology.accelerator is None:
        raise ConfigError(
            refusal(
                "forecast",
                "topology.accelerator",
                must="be given: without its rates no step time is known",
                got=None,
                fix="add the table [accelerator], or take a preset that has one (h200x8)",
            )
        )
    return topology.accelerator


def check_experts(work: Work, plan: ParallelPlan) -> None:
    """Refuse a plan that deals experts out unevenly.

    Args:
        work: the model.
        plan: sizes of the axes.

    Raises:
        ConfigError: a unit whose number of experts the axis does not divide, with every factor.
    """
    for unit in work.units:
        if unit.experts and len(unit.experts) % plan.expert:
            raise ConfigError(
                refusal(
                    "forecast",
                    "expert",
                    must=f"divide the {len(unit.experts)} experts of {unit.name}",
                    got=f"replicate={plan.replicate} * shard={plan.shard} * expert={plan.expert} "
                    f"= {plan.world_size}",
                    fix="change the expert axis or the number of experts",
                )
            )
    if plan.expert > 1 and not any(unit.experts for unit in work.units):
        raise ConfigError(
            refusal(
                "forecast",
                "expert",
                must="be 1 for a model without experts",
                got=plan.expert,
                fix="use the shard axis",
            )
        )


def _contention_ms(
    timed: Sequence[tuple[DenseTraffic, float]],
    exposed_ms: float,
    of_tables: TableTimes,
    group_of: GroupOf,
    topology: Topology,
    rates: Rates,
) -> float:
    """By how much hidden collectives slow what they run beside.

    The timeline does not tell which links are waited for, so that the exposed time of the dense
    part is shared out over all of them by their load.
    """
    busy = dict.fromkeys(of_tables.hidden_ms, 0.0)
    for each, ms in timed:
        busy[queue_of(group_of(each.axis), topology)] += ms
    whole = sum(busy.values())
    share = max(0.0, whole - exposed_ms) / whole if whole else 0.0
    return sum(
        contention_of(rates, queue) * (share * busy[queue] + ms)
        for queue, ms in of_tables.hidden_ms.items()
    )


def _run_together(units: Sequence[Unit]) -> Iterator[tuple[Unit, ...]]:
    """Each unit, with the one behind it where that runs beside it."""
    place = 0
    while place < len(units):
        both = place + 1 < len(units) and units[place + 1].beside == units[place].name
        yield tuple(units[place : place + 1 + both])
        place += 1 + both


def _segment(
    units: Sequence[Unit],
    phase: str,
    spent_ms: Mapping[str, float],
    timed: Sequence[tuple[DenseTraffic, float]],
    group_of: GroupOf,
    topology: Topology,
) -> Segment:
    """What units that run together do in a pass."""
    names = [unit.name for unit in units]
    own = [(each, ms) for each, ms in timed if each.unit in names and each.phase == phase]

    def transfers(chosen: Callable[[DenseTraffic], bool]) -> list[Transfer]:
        return [
            Transfer(queue_of(group_of(each.axis), topology), ms)
            for each, ms in own
            if chosen(each)
        ]

    return Segment(
        compute_ms=sum(spent_ms[name] for name in names),
        before=transfers(lambda each: not each.blocks and each.collective == "all_gather"),
        within=transfers(lambda each: each.blocks),
        after=transfers(lambda each: not each.blocks and each.collective != "all_gather"),
        # The first one; what the one beside it exchanges travels meanwhile.
        free_ms=spent_ms[names[0]] if len(names) > 1 else 0.0,
    )

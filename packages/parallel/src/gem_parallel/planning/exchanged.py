"""The collectives of a forecast step with their times, as a forecast lists them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gem_parallel.contract import Topology
from gem_parallel.planning.links import AxisGroup, collective_ms, slowest_tier
from gem_parallel.planning.rates import Rates
from gem_parallel.planning.traffic import DenseTraffic
from gem_parallel.planning.work import Hider, TableStep, TableTraffic

GroupOf = Callable[[str], AxisGroup]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """All collectives of one kind over one axis in a step.

    Attributes:
        axis: of the mesh.
        collective: its name.
        tier: outermost links that it crosses; None for a group of one.
        members: ranks of a group.
        given_bytes: what one rank gives.
        calls: number of calls.
        ms: time of all of them, alone.
        what: what travels.
        part: ``dense`` or ``tables``.
    """

    axis: str
    collective: str
    tier: str | None
    members: int
    given_bytes: float
    calls: int
    ms: float
    what: tuple[str, ...]
    part: str


@dataclass(frozen=True, slots=True)
class TableTimes:
    """What tables cost a step.

    Attributes:
        local_ms: reading and moving rows.
        exposed_ms: exchanges that are waited for.
        hidden_ms: links, as `queue_of` names them -> exchanges beside something else.
        exchanged: every exchange.
    """

    local_ms: float
    exposed_ms: float
    hidden_ms: Mapping[str, float]
    exchanged: tuple[Exchanged, ...]


def queue_of(group: AxisGroup, topology: Topology) -> str:
    """Name the links that a collective keeps busy.

    Args:
        group: its members.
        topology: hosts and links.

    Returns:
        ``host``, or ``adapter``: those of whatever reach are one queue.
    """
    tier = slowest_tier(group, topology)
    return "host" if tier is None or tier == topology.host_tier else "adapter"


def contention_of(rates: Rates, queue: str) -> float:
    """By how much a millisecond of a hidden collective slows what it runs beside.

    Args:
        rates: of the forecast.
        queue: links that it keeps busy, as `queue_of` names them.

    Returns:
        milliseconds; between hosts those inside one, where nothing else is known.
    """
    if queue == "adapter" and rates.adapter_contention is not None:
        return rates.adapter_contention
    return rates.contention


def table_times(
    tables: TableStep,
    group_of: GroupOf,
    topology: Topology,
    rates: Rates,
    hiders_ms: Mapping[Hider, float],
) -> TableTimes:
    """Say what tables cost a step.

    What runs beside something else goes one after the other there, and what is left over when that
    has ended is waited for.

    Args:
        tables: their work and traffic under a plan.
        group_of: axis -> its group.
        topology: hosts and links.
        rates: launches, and factors of the tables' own work.
        hiders_ms: how long that takes which exchanges may run beside.

    Returns:
        times, and every exchange.
    """
    found: list[Exchanged] = []
    beside: dict[Hider, dict[str, float]] = {}
    for each in tables.traffic:
        group = group_of(each.axis)
        ms = _table_ms(each, group, topology, rates)
        links, queue = beside.setdefault(each.beside, {}), queue_of(group, topology)
        links[queue] = links.get(queue, 0.0) + ms
        tier = slowest_tier(group, topology)
        found.append(
            Exchanged(
                axis=each.axis,
                collective=each.collective,
                tier=None if tier is None else tier.name,
                members=group.members,
                given_bytes=each.given_bytes,
                calls=1,
                ms=ms,
                what=(each.what,),
                part="tables",
            )
        )
    factor = rates.table_factor if tables.whole else rates.engine_factor
    exposed, hidden = 0.0, {"host": 0.0, "adapter": 0.0}
    for hider, links in beside.items():
        all_ms = sum(links.values())
        over = max(0.0, all_ms - hiders_ms.get(hider, 0.0))
        exposed += over
        for queue, ms in links.items():
            hidden[queue] += ms * (all_ms - over) / all_ms if all_ms else 0.0
    return TableTimes(tables.local_ms * factor, exposed, hidden, tuple(found))


def _table_ms(each: TableTraffic, group: AxisGroup, topology: Topology, rates: Rates) -> float:
    if each.ms is not None:
        return each.ms
    return collective_ms(each.collective, each.given_bytes, group, topology, rates)


def gathered_up(
    timed: Sequence[tuple[DenseTraffic, float]], group_of: GroupOf, topology: Topology
) -> tuple[Exchanged, ...]:
    """Add up what is of one axis and collective.

    Args:
        timed: collectives of the dense part, with their times alone.
        group_of: axis -> its group.
        topology: hosts and links.

    Returns:
        one line for each axis and collective.
    """
    sums: dict[tuple[str, str], list[tuple[DenseTraffic, float]]] = {}
    for each, ms in timed:
        sums.setdefault((each.axis, each.collective), []).append((each, ms))
    found: list[Exchanged] = []
    for (axis, collective), members in sums.items():
        group = group_of(axis)
        tier = slowest_tier(group, topology)
        found.append(
            Exchanged(
                axis=axis,
                collective=collective,
                tier=None if tier is None else tier.name,
                members=group.members,
                given_bytes=sum(each.given_bytes for each, _ in members),
                calls=sum(each.calls for each, _ in members),
                ms=sum(ms for _, ms in members),
                what=tuple(dict.fromkeys(each.what for each, _ in members)),
                part="dense",
            )
        )
    return tuple(found)

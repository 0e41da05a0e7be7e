"""The collectives of a forecast step with their times, as a forecast lists them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gem_parallel.contract import Topology
from gem_parallel.planning.links import AxisGroup, collective_ms, slowest_tier
from gem_parallel.planning.rates import Rates
from gem_parallel.planning.traffic import DenseTraffic
from gem_parallel.planning.work import TableStep, TableTraffic

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


def table_times(
    tables: TableStep, group_of: GroupOf, topology: Topology, rates: Rates
) -> tuple[float, float, tuple[Exchanged, ...]]:
    """What tables cost a step.

    Args:
        tables: their work and traffic under a plan.
        group_of: axis -> its group.
        topology: hosts and links.
        rates: launches, and factors of the tables' own work.

    Returns:
        milliseconds of reading and moving rows, those of exchanges that nothing hides, and every
        exchange.
    """
    exposed = 0.0
    found: list[Exchanged] = []
    for each in tables.traffic:
        group = group_of(each.axis)
        ms = _table_ms(each, group, topology, rates)
        if not each.hidden:
            exposed += ms
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
    return tables.local_ms * factor, exposed, tuple(found)


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

"""How long a collective takes: alpha-beta on every tier of links that its group spans.

    time = launch + latency of each tier crossed, times log2 of the members that it joins
                  + bytes over the slowest tier / what collectives reach on it

A ring or tree enters each host once, and its traffic is spread over the adapters of the members
that sit there, so that a group with k members on a host loads each adapter with 1/k of it. Traffic
on NVLink and on adapters runs at the same time; the slower one counts.
"""

import math
from dataclasses import dataclass

from gem_opkit.errors import ConfigError, refusal
from gem_parallel.contract import DENSE_AXES, SPARSE_AXES, LinkTier, ParallelPlan, Topology
from gem_parallel.planning.rates import Rates
from gem_parallel.planning.work import Collective


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The members of one group of an axis, as they sit on hosts and in zones.

    Attributes:
        axis: name of the axis.
        members: ranks of a group.
        on_host: of these the ones on one host.
        in_zone: of these the ones in one zone.
    """

    axis: str
    members: int
    on_host: int
    in_zone: int

    def tiers(self, topology: Topology) -> list[tuple[LinkTier, int, int]]:
        """List the tiers that the group crosses, nearest first.

        Args:
            topology: hosts and links.

        Returns:
            (tier, members that share an exit of it, members that lie behind it and nearer).
        """
        found: list[tuple[LinkTier, int, int]] = []
        if self.on_host > 1:
            found.append((topology.host_tier, 1, self.on_host))
        if self.in_zone > self.on_host and topology.zone_tier is not None:
            found.append((topology.zone_tier, self.on_host, self.in_zone))
        if self.members > self.in_zone:
            tier = topology.cluster_tier or topology.zone_tier or topology.host_tier
            found.append((tier, self.in_zone, self.members))
        return found


def axis_group(plan: ParallelPlan, axis: str, topology: Topology) -> AxisGroup:
    """Place one group of an axis on the machines.

    Ranks are numbered host by host; the innermost axis varies fastest. Where a group does not
    divide a host evenly, the emptiest host counts.

    Args:
        plan: sizes of the axes.
        axis: one of the five, ``shard_expert`` or ``replicate_shard`` for two together, or
            ``world``.
        topology: hosts and links, of as many ranks.

    Returns:
        the group.

    Raises:
        ConfigError: an unknown axis.
    """
    members, stride = _span(plan, axis)
    host = topology.ranks_per_host
    zone = host * topology.hosts_per_zone
    if topology.hosts <= topology.hosts_per_zone:
        zone = topology.world_size
    return AxisGroup(
        axis=axis,
        members=members,
        on_host=_within(members, stride, host),
        in_zone=max(_within(members, stride, zone), _within(members, stride, host)),
    )


def _span(plan: ParallelPlan, axis: str) -> tuple[int, int]:
    """Members of a group, and how far apart two neighbours are numbered."""
    if axis == "world":
        return plan.world_size, 1
    if axis == "shard_expert":
        return plan.shard * plan.expert, 1
    if axis == "replicate_shard":
        return plan.replicate * plan.shard, plan.expert
    for axes in (DENSE_AXES, plan.sparse_axes()):
        if axis in axes:
            inner = axes[axes.index(axis) + 1 :]  # pyright: ignore[reportArgumentType]
            return getattr(plan, axis), math.prod(getattr(plan, name) for name in inner)
    known = (*DENSE_AXES, "shard_expert", "replicate_shard", *SPARSE_AXES, "world")
    raise ConfigError(
        refusal("forecast", "axis", must=f"be one of {', '.join(known)}", got=axis, fix="mend it")
    )


def _within(members: int, stride: int, ranks: int) -> int:
    """Members of a group among some consecutive ranks."""
    return max(1, min(members, ranks // stride))


def wire_bytes(collective: Collective, given_bytes: float, members: int) -> float:
    """Bytes that a rank sends to others.

    Args:
        collective: which.
        given_bytes: what a rank gives: its shard in an all-gather, the whole otherwise.
        members: ranks of the group.

    Returns:
        bytes, as a ring sends them.
    """
    others = members - 1
    if collective == "all_gather":
        return given_bytes * others
    if collective == "all_reduce":
        return 2 * given_bytes * others / members
    if collective == "broadcast":
        return given_bytes if others else 0.0
    return given_bytes * others / members


def collective_ms(
    collective: Collective,
    given_bytes: float,
    group: AxisGroup,
    topology: Topology,
    rates: Rates,
    *,
    calls: int = 1,
) -> float:
    """Time of a collective that nothing else disturbs.

    Args:
        collective: which.
        given_bytes: what a rank gives over all calls: its shard in an all-gather, the whole of
            what is reduced, exchanged or broadcast.
        group: its members.
        topology: hosts and links.
        rates: launch overhead.
        calls: calls that the bytes are spread over.

    Returns:
        milliseconds; 0 for a group of one.
    """
    if group.members == 1:
        return 0.0
    passes = 2 if collective == "all_reduce" else 1
    chunk = given_bytes if collective == "all_gather" else given_bytes / group.members
    latency_us, transfer_ms = rates.launch_us, 0.0
    for tier, exits, behind in group.tiers(topology):
        beyond = group.members - exits
        if exits == 1:  # inside a host every member has links of its own to all others
            beyond = behind - 1 if collective == "all_to_all" else group.members - 1
        # An exchange cannot be passed on: each member sends its own parts through its own exit.
        sharing = 1 if collective == "all_to_all" else exits
        sent = passes * chunk * beyond / sharing
        if collective == "broadcast":
            sent = given_bytes / sharing
        reach = tier.gbytes_per_s * tier.collective_frac * 1e6
        transfer_ms = max(transfer_ms, sent / reach)
        latency_us += passes * tier.latency_us * math.log2(max(2.0, behind / exits))
    if collective == "all_to_all":
        latency_us += rates.peer_us * (group.members - 1)
    return calls * latency_us / 1e3 + transfer_ms


def slowest_tier(group: AxisGroup, topology: Topology) -> LinkTier | None:
    """The outermost tier that a group crosses; None for a group of one.

    Args:
        group: its members.
        topology: hosts and links.

    Returns:
        links of the topology, or None.
    """
    tiers = group.tiers(topology)
    return tiers[-1][0] if tiers else None

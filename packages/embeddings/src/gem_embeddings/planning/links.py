"""Which links the exchanges of a sharding group cross, and how long a byte takes on them."""

from dataclasses import dataclass

from gem_opkit.errors import ConfigError, refusal
from gem_parallel.contract import LinkTier, ParallelPlan, TableCopies, Topology
from gem_parallel.topology import axis_tiers

# A rank's own part of an exchange crosses no link.
_FREE = LinkTier(name="one rank", gbytes_per_s=1e9, latency_us=0.0)


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """The links between the ranks of one sharding group, and between copies of a shard.

    Attributes:
        table_shard: ranks of a sharding group.
        table_replicate: sharding groups.
        host_ranks: ranks of one group on one host.
        tiers: name of each tier -> its links, nearest first.
        shares: name of each tier -> share of a group's ranks that are reached through it; the
            rank itself is missing, so that they add up to less than 1.
        replica_tier: links between the copies of a shard; None with one copy.
        spread_tier: the slowest links inside a group; None for a group of one rank.
    """

    table_shard: int
    table_replicate: int
    host_ranks: int
    tiers: dict[str, LinkTier]
    shares: dict[str, float]
    replica_tier: LinkTier | None
    spread_tier: LinkTier | None

    def ms_per_byte(self) -> float:
        """Return the time of a byte that a rank sends evenly to all ranks of its group, ms.

        Links inside a host work beside those between hosts; zone and cluster share one adapter.
        """
        near = far = 0.0
        for position, (name, tier) in enumerate(self.tiers.items()):
            needed = self.shares[name] / (tier.gbytes_per_s * 1e6)
            if position == 0:
                near = needed
            else:
                far += needed
        return max(near, far)

    def latency_ms(self, message_us: float) -> float:
        """Return what an all-to-all in the group costs beside its bytes, milliseconds.

        Args:
            message_us: time that each peer adds, microseconds.
        """
        if self.spread_tier is None:
            return 0.0
        return 1e-3 * (self.spread_tier.latency_us + message_us * (self.table_shard - 1))


def group_links(
    topology: Topology | None,
    *,
    ranks: int,
    table_shard: int,
    table_replicate: int,
    copies: TableCopies = "near",
) -> GroupLinks:
    """Lay the two axes of the sparse mesh over the machines.

    Args:
        topology: hosts and links; None for one host whose links cost nothing.
        ranks: ranks that train together.
        table_shard: ranks of a sharding group.
        table_replicate: sharding groups.
        copies: ``near``, copies of a shard are neighbours; ``far``, the ranks of a group are.

    Returns:
        the links of a group.

    Raises:
        ConfigError: another number of ranks in the topology, a product that is not ``ranks``, or
            neighbours that neither fill a host nor divide it.
    """
    if topology is None:
        topology = Topology(ranks_per_host=ranks, host_tier=_FREE)
    if topology.world_size != ranks or table_shard * table_replicate != ranks:
        raise ConfigError(
            refusal(
                "plan_tables",
                "ranks",
                must="be hosts * ranks_per_host and table_shard * table_replicate",
                got=f"ranks={ranks}, {topology.hosts} * {topology.ranks_per_host} = "
                f"{topology.world_size} and {table_shard} * {table_replicate} = "
                f"{table_shard * table_replicate}",
                fix="change one of the five",
            )
        )
    on_host = topology.ranks_per_host
    name, inner = ("table_replicate", table_replicate)
    of = "copies of a shard"
    if copies == "far":
        name, inner, of = "table_shard", table_shard, "the ranks of a group"
    if on_host % inner and inner % on_host:
        raise ConfigError(
            refusal(
                "plan_tables",
                name,
                must=f"divide ranks_per_host={on_host} or be a multiple of it, because {of} are "
                "neighbours",
                got=inner,
                fix=f"use a divisor of {on_host}",
            )
        )
    apart = table_replicate if copies == "near" else 1
    host_ranks = max(1, on_host // apart)
    zone_ranks = max(1, on_host * topology.hosts_per_zone // apart)
    # A zone of more hosts than there are holds the whole group.
    zone_ranks = max(host_ranks, min(zone_ranks, table_shard))
    tiers, shares = {topology.host_tier.name: topology.host_tier}, {}
    shares[topology.host_tier.name] = (min(host_ranks, table_shard) - 1) / table_shard
    if topology.zone_tier is not None:
        tiers[topology.zone_tier.name] = topology.zone_tier
        shares[topology.zone_tier.name] = max(0, zone_ranks - host_ranks) / table_shard
    if topology.cluster_tier is not None:
        tiers[topology.cluster_tier.name] = topology.cluster_tier
        shares[topology.cluster_tier.name] = max(0, table_shard - zone_ranks) / table_shard
    axes = axis_tiers(
        ParallelPlan(
            replicate=ranks,
            table_shard=table_shard,
            table_replicate=table_replicate,
            table_copies=copies,
        ),
        topology,
    )
    return GroupLinks(
        table_shard=table_shard,
        table_replicate=table_replicate,
        host_ranks=min(host_ranks, table_shard),
        tiers=tiers,
        shares=shares,
        replica_tier=axes["table_replicate"],
        spread_tier=axes["table_shard"],
    )

"""Which axis of a plan lies on which tier of links, and topologies that ship. Torch-free."""

from math import prod

from gem_opkit.errors import ConfigError
from gem_parallel.contract import DENSE_AXES, SPARSE_AXES, LinkTier, ParallelPlan, Topology

# Loopback on a laptop: a figure to plan with, not a measurement.
_LOOPBACK = LinkTier(name="loopback", gbytes_per_s=2.0, latency_us=50.0)
# NVLink of an H200 carries 900 GB/s in both directions together.
_NVLINK_H200 = LinkTier(name="nvlink", gbytes_per_s=450.0, latency_us=5.0)

PRESETS: dict[str, Topology] = {
    "laptop": Topology(host_tier=_LOOPBACK),
    "h200": Topology(host_tier=_NVLINK_H200),
    "h200x2": Topology(ranks_per_host=2, host_tier=_NVLINK_H200),
}


def preset(name: str) -> Topology:
    """Return a topology that ships.

    Args:
        name: ``laptop`` (one process), ``h200`` or ``h200x2`` (one host with 1 or 2 GPUs).

    Raises:
        ConfigError: no such preset; the message lists those that exist.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"topology: name must be one of {', '.join(PRESETS)}; got {name!r}; "
            "build a Topology for other machines"
        )
    return PRESETS[name]


def axis_tiers(plan: ParallelPlan, topology: Topology) -> dict[str, LinkTier | None]:
    """Say which links the collectives of each axis use.

    Ranks are numbered host by host, and the innermost axis varies fastest. The members of one
    group of an axis span ``size * stride`` consecutive ranks, where the stride is the product of
    the axes inside it, so the widest link that this span needs is the tier of the axis.

    Args:
        plan: sizes of the five axes.
        topology: hosts and links; its world size must be the plan's.

    Returns:
        axis name -> tier, None for an axis of size 1 (no collective).

    Raises:
        ConfigError: plan and topology hold different numbers of ranks.
    """
    plan.check_world(topology.world_size)
    tiers: dict[str, LinkTier | None] = {}
    for axes in (DENSE_AXES, SPARSE_AXES):
        sizes = [getattr(plan, axis) for axis in axes]
        for position, axis in enumerate(axes):
            stride = prod(sizes[position + 1 :])
            tiers[axis] = _tier_of_span(sizes[position], stride, topology)
    return tiers


def _tier_of_span(size: int, stride: int, topology: Topology) -> LinkTier | None:
    if size == 1:
        return None
    span = size * stride
    host = topology.ranks_per_host
    zone = host * topology.hosts_per_zone
    # A group whose span divides a host never crosses its edge; one that does not divide it does.
    if span <= host and host % span == 0:
        return topology.host_tier
    if topology.hosts == 1:
        return topology.host_tier
    if span <= zone and zone % span == 0:
        return topology.zone_tier
    return (
        topology.zone_tier if topology.hosts <= topology.hosts_per_zone else topology.cluster_tier
    )

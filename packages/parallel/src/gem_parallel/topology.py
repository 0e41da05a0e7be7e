"""Which axis of a plan lies on which tier of links; topologies that ship, or lie in a file.

Torch-free. A file is TOML with the fields of ``contract.Topology``::

    hosts = 16
    ranks_per_host = 8
    hosts_per_zone = 8
    [accelerator]
    name = "H200"
    ...
    [host_tier]
    name = "nvlink"
    gbytes_per_s = 450.0
    latency_us = 20.0
"""

import tomllib
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from gem_opkit.errors import ConfigError, refusal
from gem_parallel.contract import (
    DENSE_AXES,
    Accelerator,
    LinkTier,
    ParallelPlan,
    Topology,
)

# Peak: NVIDIA's data sheet. Matmul rate and copy bandwidth: measured on one H200, see
# docs/kernels/h200.md. Memory: what the driver leaves to a program.
_H200 = Accelerator(
    name="H200",
    memory_gib=139.0,
    peak_tflops=989.0,
    matmul_tflops=811.0,
    memory_gbytes_per_s=4240.0,
)
# Loopback on a laptop: a figure to plan with, not a measurement.
_LOOPBACK = LinkTier(name="loopback", gbytes_per_s=2.0, latency_us=50.0)
# NVLink of an H200 carries 900 GB/s in both directions together. The share is a fit to NCCL's
# collectives between two of them, 4 KiB to 512 MiB (results/h200x2/collectives.jsonl).
_NVLINK_H200 = LinkTier(name="nvlink", gbytes_per_s=450.0, latency_us=5.0, collective_frac=0.62)
# One adapter of 400 Gbit/s for each GPU; zones of 1,024 GPUs at full speed, joined by a spine that
# carries a seventh of it, which is what Llama 3 was trained on (arXiv:2407.21783, section 3.3.1,
# there with zones of 3,072). Shares and latencies are assumptions.
_ROCE = LinkTier(name="roce", gbytes_per_s=50.0, latency_us=15.0, collective_frac=0.85)
_SPINE = LinkTier(name="spine", gbytes_per_s=50.0 / 7, latency_us=25.0, collective_frac=0.85)

PRESETS: dict[str, Topology] = {
    "laptop": Topology(host_tier=_LOOPBACK),
    "h200": Topology(accelerator=_H200, host_tier=_NVLINK_H200),
    "h200x2": Topology(accelerator=_H200, ranks_per_host=2, host_tier=_NVLINK_H200),
    "h200x8": Topology(accelerator=_H200, ranks_per_host=8, host_tier=_NVLINK_H200),
    "gem4096": Topology(
        accelerator=_H200,
        hosts=512,
        ranks_per_host=8,
        hosts_per_zone=128,
        host_tier=_NVLINK_H200,
        zone_tier=_ROCE,
        cluster_tier=_SPINE,
    ),
}
# No description of machines needs more.
_MOST_BYTES = 1 << 20


def preset(name: str) -> Topology:
    """Return a topology that ships.

    Args:
        name: ``laptop`` (one process), ``h200``, ``h200x2`` or ``h200x8`` (one host with 1, 2 or 8
            GPUs), ``gem4096`` (512 hosts of 8 in 4 zones).

    Returns:
        hosts, links and accelerator of that name.

    Raises:
        ConfigError: no such preset; the message lists those that exist.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"topology: name must be one of {', '.join(PRESETS)}; got {name!r}"
            f"{_nearest(name, PRESETS)}; build a Topology for other machines"
        )
    return PRESETS[name]


def read_topology(source: Path | str) -> Topology:
    """Read a topology from a TOML file, or take one that ships.

    Args:
        source: path of a file, or the name of a preset. A preset wins over a file of its name.

    Returns:
        the topology.

    Raises:
        ConfigError: neither a file nor a preset; not TOML; an unknown key, whose nearest known one
            is named; a key that is missing, of another type or out of its range; a tier that the
            hosts need.
    """
    if str(source) in PRESETS:
        return PRESETS[str(source)]
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            refusal(
                "topology",
                "source",
                must=f"be a TOML file or one of {', '.join(PRESETS)}",
                got=repr(str(source)) + _nearest(str(source), PRESETS),
                fix="check the path or the name",
            )
        )
    if path.stat().st_size > _MOST_BYTES:
        raise ConfigError(
            refusal(
                str(path),
                "file",
                must=f"be at most {_MOST_BYTES} bytes",
                got=path.stat().st_size,
                fix="it describes tiers, not single links",
            )
        )
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    # Broken TOML is a ValueError, as is a number of thousands of digits; arrays may nest too deep.
    except (ValueError, RecursionError) as fault:
        raise ConfigError(
            refusal(str(path), "file", must="be TOML in UTF-8", got=fault, fix="mend that line")
        ) from None
    try:
        return Topology.model_validate(raw)
    except ValidationError as fault:
        raise ConfigError(f"{path}: {_explained(fault, raw)}") from None


def scaled_to(topology: Topology, ranks: int) -> Topology:
    """Return the part of a topology that holds some ranks: whole hosts, or one host in part.

    Args:
        topology: hosts and links.
        ranks: ranks wanted, at most those of the topology.

    Returns:
        the same tiers with fewer hosts; with fewer ranks a host where one host is enough. Tiers
        that are no longer crossed stay.

    Raises:
        ConfigError: more ranks than there are, or a number that leaves a host half used.
    """
    host = topology.ranks_per_host
    if ranks < 1 or ranks > topology.world_size or (ranks > host and ranks % host):
        raise ConfigError(
            refusal(
                "topology",
                "ranks",
                must=f"be at most hosts * ranks_per_host = {topology.hosts} * {host} = "
                f"{topology.world_size}, and fill whole hosts or lie in one",
                got=ranks,
                fix="take another number of ranks, or describe these machines in a file",
            )
        )
    if ranks <= host:
        return topology.model_copy(update={"hosts": 1, "ranks_per_host": ranks})
    return topology.model_copy(update={"hosts": ranks // host})


def _nearest(name: str, known: Any) -> str:
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _explained(fault: ValidationError, raw: dict[str, Any]) -> str:
    """Say the first fault by the full path of its key."""
    faults = fault.errors()
    # A key that is misspelt is missing as well; the misspelt one says more.
    first = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _fields(first["loc"][:-1])
        got = first["loc"][-1]
        return refusal(
            "topology",
            path,
            must=f"be one of {', '.join(known)}",
            got=repr(str(got)) + _nearest(str(got), known),
            fix="correct or remove the key",
        )
    if first["type"] == "missing":
        return refusal(
            "topology", path, must="be given", got="none", fix="add the key to that table"
        )
    if not path:  # a rule over several keys, whose message names them
        return first["msg"].removeprefix("Value error, ")
    return refusal("topology", path, must="be valid", got=repr(first["input"]), fix=first["msg"])


def _fields(path: tuple[int | str, ...]) -> list[str]:
    """Names of the keys that the table at a path may have."""
    model: type[BaseModel] = Topology
    for part in path:
        model = Accelerator if part == "accelerator" else LinkTier
    return list(model.model_fields)


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
    for axes in (DENSE_AXES, plan.sparse_axes()):
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

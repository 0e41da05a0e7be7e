"""A model of two layers whose numbers can be added up by hand, on machines with round rates."""

from gem_opkit.cost import Cost
from gem_parallel.contract import Accelerator, LinkTier, Topology
from gem_parallel.planning.rates import PassShare, Rates
from gem_parallel.planning.work import Expert, Operator, Parameter, Unit, Work

# One TFLOP/s and one GB/s: 1e9 FLOPs or 1e6 bytes take a millisecond.
DEVICE = Accelerator(
    name="slow", memory_gib=1.0, peak_tflops=2.0, matmul_tflops=1.0, memory_gbytes_per_s=1.0
)
RATES = Rates(
    shares={"matmul": PassShare(forward=1.0, backward=1.0)},
    optimizer_share=1.0,
    optimizer_passes=7.0,
    launch_us=0.0,
    peer_us=0.0,
    contention=0.0,
)


def machines(hosts=1, ranks_per_host=1, hosts_per_zone=1, *, latency_us=0.0):
    """Hosts whose links carry 10, 1 and 0.1 GB/s."""
    tiers = {
        name: LinkTier(name=name, gbytes_per_s=rate, latency_us=latency_us)
        for name, rate in (("near", 10.0), ("far", 1.0), ("farther", 0.1))
    }
    return Topology(
        accelerator=DEVICE,
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        hosts_per_zone=hosts_per_zone,
        host_tier=tiers["near"],
        zone_tier=tiers["far"],
        cluster_tier=tiers["farther"],
    )


def work(*, experts=0, flops=10**9, rows=1000, columns=1000, kept_bytes=0):
    """Two layers of one matrix of a million elements each, and a bias of ten."""
    operators = (Operator("matmul", Cost(flops, 0), Cost(2 * flops, 0)),)
    units = tuple(
        Unit(
            name=f"layers.{index}",
            parameters=(
                Parameter(f"layers.{index}.weight", rows, columns),
                Parameter(f"layers.{index}.bias", 10),
            ),
            operators=operators,
            kept_bytes=kept_bytes,
            experts=tuple(
                Expert(
                    parameters=(Parameter(f"layers.{index}.experts.{e}.weight", rows, columns),),
                    operators=operators,
                    kept_bytes=kept_bytes,
                    input_bytes=400,
                )
                for e in range(experts)
            ),
            output_bytes=400,
        )
        for index in range(2)
    )
    return Work(name="two layers", units=units, examples=4, tokens=4.0)

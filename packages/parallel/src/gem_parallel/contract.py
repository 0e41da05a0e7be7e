"""What the parallel package promises and asks for: topology and plan.

Torch-free, so that a plan can be checked on a machine without a GPU. One mesh of ranks is seen two
ways: dense ``(replicate, shard, expert)`` with expert innermost, and sparse
``(table_shard, table_replicate)`` with table_replicate innermost, or outermost where copies of
tables lie far apart. Innermost ranks are neighbours, so the innermost axis gets the fastest link.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from gem_opkit.contract import Contract
from gem_opkit.errors import ConfigError

DenseAxis = Literal["replicate", "shard", "expert"]
TableCopies = Literal["near", "far"]
SparseAxis = Literal["table_shard", "table_replicate"]
DENSE_AXES: tuple[DenseAxis, ...] = ("replicate", "shard", "expert")
SPARSE_AXES: tuple[SparseAxis, ...] = ("table_shard", "table_replicate")


class LinkTier(Contract):
    """One kind of link between ranks."""

    name: str = Field(min_length=1, description="name that a plan's table prints, such as nvlink")
    gbytes_per_s: float = Field(
        gt=0, description="bandwidth of one rank into this tier, one direction, 10^9 bytes/s"
    )
    latency_us: float = Field(ge=0, description="time of an empty message, microseconds")
    collective_frac: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of the bandwidth that collectives of large messages reach",
    )


class Accelerator(Contract):
    """What one rank computes with."""

    name: str = Field(min_length=1, description="name that a forecast prints, such as H200")
    memory_gib: float = Field(gt=0, description="memory of one rank, GiB")
    peak_tflops: float = Field(
        gt=0, description="dense BF16 peak of the data sheet, the denominator of MFU, 10^12 FLOP/s"
    )
    matmul_tflops: float = Field(
        gt=0, description="BF16 rate that a large matrix product reaches, 10^12 FLOP/s"
    )
    memory_gbytes_per_s: float = Field(
        gt=0, description="bandwidth of a large copy, bytes read plus written, 10^9 bytes/s"
    )

    @model_validator(mode="after")
    def _matmul_below_peak(self) -> Self:
        if self.matmul_tflops > self.peak_tflops:
            raise ConfigError(
                "Accelerator: matmul_tflops must be at most peak_tflops; got "
                f"{self.matmul_tflops:g} and {self.peak_tflops:g}; give the dense BF16 peak, not "
                "the sparse figure or the rate of another number format"
            )
        return self


class Topology(Contract):
    """Machines and links of a job: hosts of GPUs, zones of hosts, and what joins them."""

    accelerator: Accelerator | None = Field(
        default=None,
        description="what a rank computes with; None where only the links are known, which is "
        "too little for a forecast of step times",
    )
    hosts: int = Field(default=1, ge=1, description="number of hosts")
    ranks_per_host: int = Field(default=1, ge=1, description="ranks (GPUs or processes) a host")
    hosts_per_zone: int = Field(default=1, ge=1, description="hosts that share a full-speed fabric")
    host_tier: LinkTier = Field(description="links inside a host")
    zone_tier: LinkTier | None = Field(
        default=None, description="links between the hosts of a zone; None where hosts is 1"
    )
    cluster_tier: LinkTier | None = Field(
        default=None, description="links between zones; None where one zone holds every host"
    )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host

    @model_validator(mode="after")
    def _tiers_cover_hosts(self) -> Self:
        if self.hosts > 1 and self.zone_tier is None:
            raise ConfigError(
                f"Topology: zone_tier must be given when hosts is {self.hosts}; got None; "
                "describe the links between hosts"
            )
        if self.hosts > self.hosts_per_zone and self.hosts > 1 and self.cluster_tier is None:
            raise ConfigError(
                "Topology: cluster_tier must be given when the hosts fill more than one zone; got "
                f"None with hosts={self.hosts} and hosts_per_zone={self.hosts_per_zone}; describe "
                "the links between zones or raise hosts_per_zone"
            )
        return self


class ParallelPlan(Contract):
    """How many ways each axis of the two meshes is split.

    The dense product ``replicate * shard * expert`` and the sparse product
    ``table_shard * table_replicate`` both equal the number of ranks.
    """

    replicate: int = Field(default=1, ge=1, description="copies of the dense parameters")
    shard: int = Field(default=1, ge=1, description="parts that dense parameters are cut into")
    expert: int = Field(default=1, ge=1, description="ranks that share the experts out")
    table_shard: int = Field(default=1, ge=1, description="parts that tables are cut into")
    table_replicate: int = Field(default=1, ge=1, description="copies of every table part")
    fully_sharded_tables: bool = Field(
        default=False,
        description="each replica keeps 1 / table_replicate of its table rows between steps",
    )
    table_copies: TableCopies = Field(
        default="near",
        description="where the copies of a table part lie: near, on neighbouring ranks, so that "
        "parts are spread over all machines; far, each copy of the tables on neighbouring ranks of "
        "its own, so that vectors stay on near links, and means or gradients of copies travel far",
    )
    replicate_below: int = Field(
        default=65_536,
        ge=0,
        description="dense parameters with fewer elements are copies on every rank",
    )
    gather_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="format in which cut dense parameters are gathered for use: bf16 moves half of "
        "the bytes, for models whose products read bf16; weights and reductions stay fp32",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="format in which gradients of dense parameters are summed over ranks: bf16 "
        "moves half of the bytes and rounds each sum that a rank passes on, which many ranks add "
        "up; weights and moments stay fp32",
    )
    keep_gathered: bool = Field(
        default=False,
        description="keep cut dense parameters whole from the forward to the backward pass, in "
        "place of gathering them twice: less traffic, for the memory of the whole dense model",
    )

    @classmethod
    def data_parallel(cls, world_size: int) -> "ParallelPlan":
        """The plan in which every rank holds a copy of everything.

        Args:
            world_size: number of ranks, at least 1.

        Returns:
            replicate = table_replicate = world_size, every other axis 1.
        """
        return cls(replicate=world_size, table_replicate=world_size)

    @property
    def world_size(self) -> int:
        """Number of ranks that the plan is for."""
        return self.replicate * self.shard * self.expert

    def sparse_axes(self) -> tuple[SparseAxis, ...]:
        """The axes of tables, the innermost one last."""
        return SPARSE_AXES if self.table_copies == "near" else SPARSE_AXES[::-1]

    @model_validator(mode="after")
    def _meshes_agree(self) -> Self:
        sparse = self.table_shard * self.table_replicate
        if self.world_size != sparse:
            raise ConfigError(
                "ParallelPlan: both meshes must hold the same number of ranks; got "
                f"replicate={self.replicate} * shard={self.shard} * expert={self.expert} = "
                f"{self.world_size} and table_shard={self.table_shard} * "
                f"table_replicate={self.table_replicate} = {sparse}; change one of the five"
            )
        return self

    def check_world(self, world_size: int) -> None:
        """Refuse to run the plan on another number of ranks.

        Args:
            world_size: ranks that are there.

        Raises:
            ConfigError: the plan's product differs; the message names every factor.
        """
        if self.world_size != world_size:
            raise ConfigError(
                f"ParallelPlan: replicate * shard * expert must be the world size {world_size}; "
                f"got {self.replicate} * {self.shard} * {self.expert} = {self.world_size}; "
                "start as many ranks as the plan asks for, or change the plan"
            )

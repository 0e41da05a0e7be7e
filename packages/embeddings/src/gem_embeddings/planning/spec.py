"""What a plan of tables is made for: machines, batch, memory, and what each table allows."""

from typing import Literal, Self

from pydantic import Field, model_validator

from gem_embeddings.contract import (
    LookupSpec,
    OptimizerSpec,
    Pooling,
    RowDtype,
    Sharding,
    TableLoad,
    TableSpec,
)
from gem_opkit.contract import Contract
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.contract import TableCopies, Topology

EngineName = Literal["torch", "torchrec"]


class TableRates(Contract):
    """How fast a device reads and updates rows, and what a table costs beside its bytes.

    The defaults are an H200: 4,240 GB/s copied, of which fbgemm's fused tables reached 33 to 79 %
    in lookups and 21 to 36 % in updates of fp32 rows; the defaults lie in the lower half.
    """

    memory_gbytes_per_s: float = Field(
        default=4240.0, gt=0, description="copy bandwidth of the device memory, 10^9 bytes/s"
    )
    lookup_frac: float = Field(
        default=0.42, gt=0, le=1, description="share of the bandwidth that lookups reach"
    )
    update_frac: float = Field(
        default=0.27, gt=0, le=1, description="share of the bandwidth that updates reach"
    )
    shard_us: float = Field(
        default=1.0,
        ge=0,
        description="time of a step that each shard costs its rank beside its bytes, microseconds",
    )
    message_us: float = Field(
        default=0.5,
        ge=0,
        description="time that each peer adds to an all-to-all beside its bytes, microseconds",
    )


class PlanningSpec(Contract):
    """What a plan has to serve, and what it may do.

    Memory counts weights, optimizer rows, and, while rows are read and updated, the gathered
    copies of a fully sharded plan; it leaves out buffers of ids and vectors.
    """

    topology: Topology | None = Field(
        default=None,
        description="hosts and links; None for one host whose links cost nothing",
    )
    loads: tuple[TableLoad, ...] = Field(
        default=(), description="statistics of features; those left out have one id an example"
    )
    batch_per_rank: int = Field(
        default=1024, gt=0, lt=2**63, description="examples of a rank and step"
    )
    memory_gib: float | None = Field(
        default=None, gt=0, description="GiB of tables that a rank may hold between steps"
    )
    gathered_gib: float | None = Field(
        default=None,
        gt=0,
        description="GiB of tables that a rank may hold while copies are gathered; None for no "
        "limit, because nothing else of a step is in memory then",
    )
    allowed: dict[str, tuple[Sharding, ...]] = Field(
        default={}, description="table -> kinds it may take; tables left out take any"
    )
    table_shard: int | None = Field(
        default=None, gt=0, description="ranks of a sharding group; None lets the planner choose"
    )
    table_replicate: int | None = Field(
        default=None, gt=0, description="sharding groups; None lets the planner choose"
    )
    table_copies: TableCopies = Field(
        default="near",
        description="where the copies of a shard lie: near, on neighbouring ranks; far, each "
        "sharding group on neighbouring ranks",
    )
    fully_sharded: bool | None = Field(
        default=None,
        description="copies of a shard are cut between steps; None does so where memory asks",
    )
    replicas: Literal["weights", "gradients"] = Field(
        default="weights",
        description="what sharding groups exchange, as in build_tables: means of their rows, or "
        "the gradients of every step",
    )
    sync_every: int = Field(
        default=1,
        gt=0,
        description="steps between averages of the groups; 1 if fully sharded, and not read where "
        "groups exchange gradients",
    )
    engine: EngineName = Field(
        default="torch",
        description="torch: different ids travel and pooling is done where the batch is; torchrec: "
        "all ids travel and vectors are pooled where the rows are",
    )
    wire_dtype: RowDtype = Field(default="fp32", description="format in which vectors travel")
    rates: TableRates = Field(default=TableRates(), description="speed of a device")

    @model_validator(mode="after")
    def _loads_differ(self) -> Self:
        names = [load.feature_name for load in self.loads]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"loads must name each feature once; got {', '.join(repeated)} twice")
        empty = sorted(name for name, kinds in self.allowed.items() if not kinds)
        if empty:
            raise ValueError(f"allowed must name a kind for each table; got none for {empty[0]}")
        if self.engine == "torchrec" and self.fully_sharded:
            raise ValueError(
                'fully_sharded must be left out or false with engine "torchrec"; got true'
            )
        if self.engine == "torchrec" and self.replicas != "weights" and self.table_replicate != 1:
            raise ValueError(
                'replicas must be "weights" with engine "torchrec" and several sharding groups; '
                'got "gradients"'
            )
        return self


class TableFamily(Contract):
    """Tables that are described together: their rows grow in equal ratios from first to last."""

    name: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_\-]*$",
        description="start of the tables' names; the number of the table follows",
    )
    tables: int = Field(gt=0, le=10**6, description="number of tables")
    least_rows: int = Field(gt=0, lt=2**63, description="rows of the first table")
    most_rows: int = Field(gt=0, lt=2**63, description="rows of the last table")
    embedding_dim: int = Field(gt=0, lt=2**31, description="elements of a row")
    pooling: Pooling = Field(default="sum", description="as in TableSpec")
    row_dtype: RowDtype = Field(default="fp32", description="as in TableSpec")
    ids_per_example: float = Field(default=1.0, ge=0, description="as in TableLoad")
    zipf_exponent: float = Field(default=0.0, ge=0, description="as in TableLoad")

    def expand(self) -> list[tuple[TableSpec, TableLoad]]:
        """Return the tables, each with a feature of its own name and that feature's load."""
        ratio = self.most_rows / self.least_rows
        found = []
        for index in range(self.tables):
            rows = round(self.least_rows * ratio ** (index / max(1, self.tables - 1)))
            name = f"{self.name}_{index}"
            spec = TableSpec(
                name=name,
                embedding_dim=self.embedding_dim,
                num_embeddings=rows,
                feature_names=(name,),
                pooling=self.pooling,
                row_dtype=self.row_dtype,
            )
            load = TableLoad(
                feature_name=name,
                ids_per_example=self.ids_per_example,
                zipf_exponent=self.zipf_exponent,
            )
            found.append((spec, load))
        return found


class PlanningFile(Contract):
    """A file that the command reads: tables, singly or in families, and what to plan for."""

    tables: tuple[TableSpec, ...] = Field(default=(), description="tables described singly")
    families: tuple[TableFamily, ...] = Field(default=(), description="tables described together")
    lookups: tuple[LookupSpec, ...] = Field(
        default=(), description="features beyond those that the tables name"
    )
    optimizer: OptimizerSpec = Field(default=OptimizerSpec(), description="how rows learn")
    planning: PlanningSpec = Field(description="machines, batch, memory and what is allowed")

    def expanded(self) -> tuple[tuple[TableSpec, ...], PlanningSpec]:
        """Write families out.

        Returns:
            all tables, and the planning with the loads of all features.

        Raises:
            ConfigError: statistics of a feature that a family describes already.
        """
        pairs = [pair for family in self.families for pair in family.expand()]
        described = {load.feature_name for _, load in pairs}
        twice = [x.feature_name for x in self.planning.loads if x.feature_name in described]
        if twice:
            raise ConfigError(
                refusal(
                    "PlanningFile",
                    "planning.loads",
                    must="leave out the features of families",
                    got=", ".join(twice),
                    fix="say it in the family, or describe the table singly",
                )
            )
        loads = (*self.planning.loads, *(load for _, load in pairs))
        tables = (*self.tables, *(spec for spec, _ in pairs))
        return tables, self.planning.model_copy(update={"loads": loads})

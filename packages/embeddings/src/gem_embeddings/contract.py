"""What embedding tables are, who looks them up, how they learn and where they lie.

Field names of ``TableSpec`` and ``LookupSpec`` follow torchrec where torchrec has the thing. No
torch here: a plan of tables is made and costed without it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from gem_opkit.contract import Contract
from gem_parallel.contract import TableCopies

Pooling = Literal["sum", "mean", "none"]
IdSpace = Literal["row", "hash"]
OutOfRange = Literal["error", "clamp", "zero"]
RowDtype = Literal["fp32", "fp16", "bf16"]
TableOptimizer = Literal["rowwise_adagrad", "adagrad", "sgd", "adam"]
Sharding = Literal["replicated", "table_wise", "row_wise", "column_wise", "table_row_wise", "grid"]
ROW_BYTES: dict[RowDtype, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
# Optimizer rows are fp32 whatever the weights are.
_STATE_BYTES = 4


class TableSpec(Contract):
    """One embedding table and the features that look it up."""

    name: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_\-]*$",
        description="name of the table, also the name of its weight in the state dict",
    )
    embedding_dim: int = Field(gt=0, lt=2**63, description="elements of a row")
    num_embeddings: int = Field(gt=0, lt=2**63, description="rows; ids are int64")
    feature_names: tuple[str, ...] = Field(
        default=(), description="features that look up this table with its own pooling"
    )
    pooling: Pooling = Field(
        default="sum",
        description="how the ids of an example become one vector; none keeps one vector an id",
    )
    id_space: IdSpace = Field(
        default="row", description="row: an id is a row; hash: any int64 id is hashed to a row"
    )
    hash_seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="seed of the hash, so that two tables collide in different ids",
    )
    out_of_range: OutOfRange = Field(
        default="error",
        description="what becomes of an id outside the rows: an error, the nearest row, or a "
        "vector of zeros; the last two are counted",
    )
    init_std: float | None = Field(
        default=None,
        ge=0,
        description="standard deviation of normal initial weights; None draws them uniformly "
        "within ±sqrt(1 / num_embeddings)",
    )
    row_dtype: RowDtype = Field(
        default="fp32",
        description="number format in which rows are stored; fp16 and bf16 rows are updated with "
        "stochastic rounding",
    )

    @model_validator(mode="after")
    def _features_differ(self) -> Self:
        repeated = sorted({n for n in self.feature_names if self.feature_names.count(n) > 1})
        if repeated:
            raise ValueError(f"feature_names must differ; got {', '.join(repeated)} twice")
        return self

    @property
    def weight_bytes(self) -> int:
        """Bytes of the table's weights, in the format of its rows."""
        return ROW_BYTES[self.row_dtype] * self.num_embeddings * self.embedding_dim


class LookupSpec(Contract):
    """How one feature looks up a table, where that differs from the table's own pooling."""

    feature_name: str = Field(min_length=1, description="feature that carries the ids")
    table_name: str = Field(description="name of the table that it looks up")
    pooling: Pooling = Field(default="none", description="as in TableSpec, for this feature")


class OptimizerSpec(Contract):
    """How the rows of tables learn. Rows that no id of a batch has hit never move."""

    kind: TableOptimizer = Field(
        default="rowwise_adagrad",
        description="rowwise_adagrad: one accumulator a row; adagrad: one an element; sgd: none; "
        "adam: two moments an element",
    )
    lr: float = Field(default=0.02, gt=0, description="learning rate")
    eps: float = Field(default=1e-8, gt=0, description="added to the square root; unused by sgd")
    beta1: float = Field(
        default=0.9, ge=0, lt=1, description="decay of adam's first moment; unused by others"
    )
    beta2: float = Field(
        default=0.999, ge=0, lt=1, description="decay of adam's second moment; unused by others"
    )
    moment_scale: float = Field(
        default=1.0,
        gt=0,
        description="row-wise AdaGrad divides its accumulator by it: c of momentum-scaled AdaGrad, "
        "the number of replica groups; only 1 with another kind",
    )

    @model_validator(mode="after")
    def _scale_has_an_accumulator(self) -> Self:
        if self.moment_scale != 1.0 and self.kind != "rowwise_adagrad":
            raise ValueError(
                'moment_scale must be 1 unless kind is "rowwise_adagrad"; got '
                f'{self.moment_scale} with kind "{self.kind}"'
            )
        return self

    def state_bytes(self, table: TableSpec) -> int:
        """Return the bytes of the state that this optimizer keeps for a table.

        Args:
            table: the table.

        Returns:
            bytes of fp32 state, without the step counter.
        """
        return self.shard_state_bytes(table.num_embeddings, table.embedding_dim)

    def shard_state_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of the state that this optimizer keeps for a part of a table.

        Args:
            rows: rows of the part.
            columns: elements of a row that the part holds.

        Returns:
            bytes of fp32 state. A part of a row keeps an accumulator of its own under row-wise
            AdaGrad, so cutting columns multiplies them.
        """
        if self.kind == "rowwise_adagrad":
            return _STATE_BYTES * rows if columns else 0
        moments = {"adagrad": 1, "sgd": 0, "adam": 2}[self.kind]
        return _STATE_BYTES * moments * rows * columns


class TableLoad(Contract):
    """Statistics of the ids that one feature brings, which a plan is costed with."""

    feature_name: str = Field(min_length=1, description="feature that carries the ids")
    ids_per_example: float = Field(
        default=1.0, ge=0, description="mean number of ids of an example; empty ones count as 0"
    )
    unique_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="different rows among the ids of one rank's batch, as a share of these ids; "
        "None derives it from zipf_exponent",
    )
    zipf_exponent: float = Field(
        default=0.0,
        ge=0,
        description="skew of the ids: the row of popularity k is drawn in proportion to "
        "k**-zipf_exponent; 0 draws all rows alike",
    )
    weighted: bool = Field(default=False, description="each id carries an fp32 weight of pooling")


class TableShard(Contract):
    """The rectangle of a table that one rank of a sharding group holds.

    Ends are exclusive. A shard without rows is allowed: its rank owns nothing of the table. A
    placement checks its shards; on its own a shard is four numbers.
    """

    rank: int = Field(ge=0, description="rank inside its sharding group, below table_shard")
    row_start: int = Field(ge=0, description="first row")
    row_end: int = Field(ge=0, description="row after the last")
    column_start: int = Field(ge=0, description="first element of a row")
    column_end: int = Field(ge=0, description="element after the last")
    shard_bytes: int = Field(
        default=0,
        ge=0,
        description="bytes of its weights and optimizer rows on one rank between steps; 0 where "
        "nobody counted them",
    )

    @property
    def rows(self) -> int:
        """Rows of the shard."""
        return self.row_end - self.row_start

    @property
    def columns(self) -> int:
        """Elements of a row that the shard holds."""
        return self.column_end - self.column_start


class TablePlacement(Contract):
    """Where the rows of one table lie inside a sharding group.

    Shards are rectangles: the ranges of columns cut the width, and the shards of one range of
    columns cut the rows. No rank holds two of them.
    """

    table_name: str = Field(description="name of the table")
    sharding: Sharding = Field(
        default="replicated",
        description="replicated: every rank holds all rows; table_wise: one rank does; row_wise: "
        "rows cut over ranks; column_wise: columns cut over ranks; table_row_wise: rows cut over "
        "the ranks of one host; grid: columns cut over hosts, and rows over the ranks of each",
    )
    shards: tuple[TableShard, ...] = Field(
        default=(), description="what each rank of a group holds; none for a replicated table"
    )
    rank_bytes: int = Field(
        default=0,
        ge=0,
        description="most bytes of weights and optimizer rows that a rank holds between steps; 0 "
        "where nobody counted them",
    )

    @model_validator(mode="after")
    def _shards_cut_the_table(self) -> Self:
        _check_shards(self.table_name, self.sharding, self.shards)
        return self

    @property
    def rows(self) -> int:
        """Rows that the shards cover; 0 for a replicated table."""
        return max((shard.row_end for shard in self.shards), default=0)

    @property
    def columns(self) -> int:
        """Elements of a row that the shards cover; 0 for a replicated table."""
        return max((shard.column_end for shard in self.shards), default=0)


class TablePlan(Contract):
    """Where every table lies: the same cut in every sharding group.

    World ranks are numbered with ``table_replicate`` innermost: rank ``g * table_replicate + m``
    is rank ``g`` of sharding group ``m``, as in the sparse view of ``gem_parallel.mesh``; with
    ``table_copies`` far, rank ``m * table_shard + g`` is.
    """

    ranks: int = Field(gt=0, description="ranks that train together")
    table_shard: int = Field(default=1, gt=0, description="ranks of a sharding group")
    table_replicate: int = Field(default=1, gt=0, description="sharding groups")
    table_copies: TableCopies = Field(
        default="near",
        description="which world ranks are neighbours: near, the copies of a shard; far, the "
        "ranks of a sharding group",
    )
    fully_sharded: bool = Field(
        default=False,
        description="each of the table_replicate copies of a shard keeps 1 / table_replicate of "
        "it between steps",
    )
    host_ranks: int | None = Field(
        default=None,
        gt=0,
        description="ranks of one sharding group on one host: table_row_wise and grid keep rows "
        "among them; None where hosts do not matter",
    )
    placements: tuple[TablePlacement, ...] = Field(description="one for each table")

    @model_validator(mode="after")
    def _names_ranks_of_its_group(self) -> Self:
        _check_plan(self)
        return self

    @property
    def rank_bytes(self) -> int:
        """Most bytes of weights and optimizer rows that one rank holds between steps.

        Shards count with their ``shard_bytes``, replicated tables with their ``rank_bytes``.
        """
        return max(self.group_rank_bytes())

    def group_rank_bytes(self) -> tuple[int, ...]:
        """Return the bytes that each rank of a sharding group holds between steps.

        Returns:
            ``table_shard`` numbers of bytes of weights and optimizer rows.
        """
        everywhere = sum(p.rank_bytes for p in self.placements if p.sharding == "replicated")
        held = [everywhere] * self.table_shard
        for placement in self.placements:
            for shard in placement.shards:
                held[shard.rank] += shard.shard_bytes
        return tuple(held)

    def world_rank(self, group_rank: int, replica: int) -> int:
        """Return the world rank of a rank of a sharding group.

        Args:
            group_rank: rank inside the group, 0 to ``table_shard - 1``.
            replica: number of the group, 0 to ``table_replicate - 1``.

        Returns:
            rank in the world.
        """
        if self.table_copies == "far":
            return replica * self.table_shard + group_rank
        return group_rank * self.table_replicate + replica

    def place_of(self, world_rank: int) -> tuple[int, int]:
        """Return where a rank of the world stands.

        Args:
            world_rank: 0 to ``ranks - 1``.

        Returns:
            rank inside its sharding group, and number of the group.
        """
        if self.table_copies == "far":
            replica, group_rank = divmod(world_rank, self.table_shard)
            return group_rank, replica
        group_rank, replica = divmod(world_rank, self.table_replicate)
        return group_rank, replica


def _check_shards(table: str, sharding: Sharding, shards: tuple[TableShard, ...]) -> None:
    """Refuse shards that do not cut one table in the way that the sharding says."""
    if sharding == "replicated":
        if shards:
            raise ValueError(
                f'table {table}: shards must be empty when sharding is "replicated"; got '
                f"{len(shards)}"
            )
        return
    by_columns: dict[tuple[int, int], list[TableShard]] = {}
    ranks: list[int] = []
    rows = 0
    # One pass: a plan for thousands of ranks has a million shards.
    for shard in shards:
        ranks.append(shard.rank)
        if shard.row_end < shard.row_start or shard.column_end < shard.column_start:
            raise ValueError(
                f"table {table}: a shard must end where it starts or later; got rows "
                f"{shard.row_start} to {shard.row_end} and columns {shard.column_start} to "
                f"{shard.column_end} on rank {shard.rank}"
            )
        if shard.row_end > shard.row_start and shard.column_end > shard.column_start:
            rows = max(rows, shard.row_end)
            columns = (shard.column_start, shard.column_end)
            by_columns.setdefault(columns, []).append(shard)
    if not by_columns:
        raise ValueError(
            f'table {table}: shards must hold its rows when sharding is "{sharding}"; got none'
        )
    if len(set(ranks)) != len(ranks):
        repeated = sorted(rank for rank, times in Counter(ranks).items() if times > 1)
        raise ValueError(
            f"table {table}: a rank must hold one shard at most; got several on rank "
            f"{', '.join(map(str, repeated))}"
        )
    _check_ranges(table, "columns", [(start, end, None) for start, end in sorted(by_columns)])
    for (start, end), group in by_columns.items():
        ranges = sorted((s.row_start, s.row_end, s.rank) for s in group)
        _check_ranges(f"{table}, columns {start} to {end}", "rows", ranges)
        if ranges[-1][1] != rows:
            raise ValueError(
                f"table {table}, columns {start} to {end}: shards must cover every row once; got "
                f"none for rows {ranges[-1][1]} to {rows}"
            )
    _check_kind(table, sharding, [len(group) for group in by_columns.values()])


def _check_ranges(where: str, what: str, ranges: Sequence[tuple[int, int, int | None]]) -> None:
    reached = 0
    for start, end, rank in ranges:
        if start != reached:
            fault = "none for" if start > reached else "two for"
            low, high = min(start, reached), max(start, reached)
            owner = "" if rank is None else f" on rank {rank}"
            raise ValueError(
                f"table {where}: shards must cover the {what} once; got {fault} {what} {low} to "
                f"{high}, before the shard of {what} {start} to {end}{owner}"
            )
        reached = end


def _check_kind(table: str, sharding: Sharding, row_cuts: list[int]) -> None:
    """Hold the number of ranges of columns, and of shards in each, to the kind of sharding."""
    one_range = len(row_cuts) == 1
    rules = {
        "table_wise": (one_range and row_cuts == [1], "one shard"),
        "row_wise": (one_range, "shards as wide as the table"),
        "table_row_wise": (one_range, "shards as wide as the table"),
        "column_wise": (max(row_cuts) == 1, "shards that hold every row"),
    }
    fits, rule = rules.get(sharding, (True, ""))
    if not fits:
        raise ValueError(
            f"table {table}: {sharding} must have {rule}; got {len(row_cuts)} ranges of columns "
            f"with {', '.join(map(str, row_cuts))} shards"
        )


def _check_plan(plan: TablePlan) -> None:
    """Refuse a plan whose factors disagree, or whose shards lie outside their own group."""
    if plan.table_shard * plan.table_replicate != plan.ranks:
        raise ValueError(
            f"table_shard * table_replicate must be ranks; got {plan.table_shard} * "
            f"{plan.table_replicate} = {plan.table_shard * plan.table_replicate} and ranks="
            f"{plan.ranks}"
        )
    if plan.host_ranks is not None and plan.table_shard % min(plan.host_ranks, plan.table_shard):
        raise ValueError(
            f"host_ranks must divide table_shard; got host_ranks={plan.host_ranks} and "
            f"table_shard={plan.table_shard}"
        )
    names = [placement.table_name for placement in plan.placements]
    repeated = sorted(name for name, times in Counter(names).items() if times > 1)
    if repeated:
        raise ValueError(f"placements must name each table once; got {', '.join(repeated)} twice")
    for placement in plan.placements:
        for shard in placement.shards:
            if shard.rank >= plan.table_shard:
                raise ValueError(
                    f"table {placement.table_name}: a shard's rank must be one of its sharding "
                    f"group, below table_shard={plan.table_shard}; got {shard.rank} (ranks="
                    f"{plan.ranks}, table_replicate={plan.table_replicate})"
                )
        if plan.host_ranks is not None and placement.sharding in ("table_row_wise", "grid"):
            _check_hosts(placement, plan.host_ranks)


def _check_hosts(placement: TablePlacement, host_ranks: int) -> None:
    hosts: dict[int, set[int]] = {}
    for shard in placement.shards:
        if shard.rows and shard.columns:
            hosts.setdefault(shard.column_start, set()).add(shard.rank // host_ranks)
    for start, found in hosts.items():
        if len(found) > 1:
            raise ValueError(
                f"table {placement.table_name}: {placement.sharding} must keep the rows of a "
                f"range of columns on one host of {host_ranks} ranks; got hosts "
                f"{', '.join(map(str, sorted(found)))} for the columns from {start}"
            )

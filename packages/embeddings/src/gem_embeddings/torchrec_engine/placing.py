"""Which rank holds which rows, as torchrec takes it, and what torchrec cannot do.

A refusal names the table, its sharding, this engine and the one that can.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from gem_embeddings.contract import (
    OptimizerSpec,
    RowDtype,
    TablePlacement,
    TablePlan,
    TableShard,
    TableSpec,
)
from gem_opkit.errors import ConfigError, UnsupportedError, refusal

OP = "TorchrecTables"
# Kind -> what fbgemm calls it.
OPTIMIZERS = {
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
    "adagrad": "EXACT_ADAGRAD",
    "sgd": "EXACT_SGD",
}
# fbgemm reads rows in words of this many elements.
_WIDTH_STEP = 4


@dataclass(frozen=True, slots=True)
class PlacedTable:
    """A table with its cut.

    Attributes:
        spec: the table.
        sharding: as in ``TablePlacement``, but for ``replicated``.
        shards: in the order that torchrec expects; ranks are those of a sharding group. A rank
            that has to hold rows but has none is given one beyond the last, which no id reaches.
        rows: rows as torchrec sees them: with these.
    """

    spec: TableSpec
    sharding: str
    shards: tuple[TableShard, ...]
    rows: int

    @property
    def key(self) -> str:
        """Its name in torchrec, where names of tables become attributes: ``items`` would not do."""
        return f"table_{self.spec.name}"


def place_tables(
    specs: Sequence[TableSpec],
    plan: TablePlan,
    optimizer: OptimizerSpec,
    *,
    device: str,
    wire_dtype: RowDtype,
) -> tuple[PlacedTable, ...]:
    """Read a plan, and refuse what torchrec cannot do.

    Args:
        specs: the tables.
        plan: where they lie.
        optimizer: how rows learn.
        device: ``cpu`` or ``cuda``.
        wire_dtype: format of vectors between ranks.

    Returns:
        the tables in the order of the specs, but for those of ``replicated_tables``.

    Raises:
        ConfigError: the plan is of other tables.
        UnsupportedError: what torchrec cannot do.
    """
    placements = {placement.table_name: placement for placement in plan.placements}
    names = {spec.name for spec in specs}
    if placements.keys() != names:
        raise ConfigError(
            refusal(
                OP,
                "plan",
                must=f"place the tables {', '.join(sorted(names)) or 'none'}",
                got=", ".join(sorted(placements)) or "none",
                fix="make it with plan_tables from the same specs",
            )
        )
    if optimizer.kind not in OPTIMIZERS:
        refuse("optimizer", f"be one of {', '.join(OPTIMIZERS)}", optimizer.kind)
    if plan.fully_sharded and plan.table_replicate > 1:
        # Its strategy of that name forms the mean after rows are read, so that each group reads
        # its own rows of the step before, and never forms that of optimizer rows.
        refuse("plan.fully_sharded", "be False, as rows are to be read after their mean", "True")
    if plan.table_copies == "far" and plan.table_replicate > 1:
        refuse("plan.table_copies", "be near, as its groups of ranks are laid out", "far")
    if wire_dtype == "bf16" and device == "cpu":
        refuse("wire_dtype", "be fp32 or fp16 on a CPU: gloo has no bf16 for it", "bf16")
    away = set(replicated_tables(plan))
    placed = [_place(s, placements[s.name], plan) for s in specs if s.name not in away]
    for table in placed:
        _refuse_table(table, optimizer, wire_dtype)
    return tuple(placed)


def replicated_tables(plan: TablePlan) -> tuple[str, ...]:
    """Return the tables that several ranks of a sharding group hold whole.

    torchrec has no such tables that learn inside the backward pass: it leaves them to an optimizer
    of the dense part. A group of one rank holds a replicated table as it holds any other.

    Args:
        plan: of the tables.
    """
    if plan.table_shard == 1:
        return ()
    return tuple(p.table_name for p in plan.placements if p.sharding == "replicated")


def refuse(name: str, must: str, got: object, *, table: PlacedTable | None = None) -> NoReturn:
    """Refuse what torchrec cannot do.

    Args:
        name: what is asked for.
        must: what torchrec can do.
        got: what was asked for.
        table: the table that it is about.

    Raises:
        UnsupportedError: always.
    """
    where = "" if table is None else f" of table {table.spec.name!r} ({table.sharding})"
    raise UnsupportedError(
        refusal(
            OP,
            f"{name}{where}",
            must=f"{must} with engine torchrec",
            got=got,
            fix='use engine="torch"',
        )
    )


def _refuse_table(table: PlacedTable, optimizer: OptimizerSpec, wire_dtype: RowDtype) -> None:
    if table.spec.row_dtype == "bf16":
        refuse("row_dtype", "be fp32 or fp16", "bf16", table=table)
    ranges = sorted({(shard.column_start, shard.column_end) for shard in table.shards})
    odd = [end - start for start, end in ranges if (end - start) % _WIDTH_STEP]
    if odd:
        refuse("width", f"be a multiple of {_WIDTH_STEP} on each rank", odd[0], table=table)
    if len(ranges) > 1 and optimizer.kind == "rowwise_adagrad":
        # fbgemm would keep an accumulator for each piece of a row, and learn otherwise than a
        # table in one piece does.
        refuse(
            "optimizer",
            "be adagrad or sgd where columns are cut, to learn as an uncut table does",
            optimizer.kind,
            table=table,
        )
    if wire_dtype != "fp32" and table.sharding not in ("table_wise", "column_wise"):
        # Partial sums of rows travel here, and are added up in the format of the wire.
        refuse("wire_dtype", "be fp32 where rows are cut", wire_dtype, table=table)


def _place(spec: TableSpec, placement: TablePlacement, plan: TablePlan) -> PlacedTable:
    rows, columns = spec.num_embeddings, spec.embedding_dim
    sharding, shards = placement.sharding, placement.shards
    if sharding == "replicated":
        whole = TableShard(rank=0, row_start=0, row_end=rows, column_start=0, column_end=columns)
        sharding, shards = "table_wise", (whole,)
    held = [shard for shard in shards if shard.rows and shard.columns]
    reach = max(s.row_end for s in held), max(s.column_end for s in held)
    if reach != (rows, columns):
        raise ConfigError(
            refusal(
                OP,
                f"plan of table {spec.name!r}",
                must=f"cover {rows} rows of {columns}",
                got=f"{reach[0]} rows of {reach[1]}",
                fix="make it with plan_tables from the same specs",
            )
        )
    table = PlacedTable(spec, sharding, tuple(held), rows)
    if sharding in ("table_wise", "column_wise"):
        held.sort(key=lambda shard: shard.column_start)
        return PlacedTable(spec, sharding, tuple(held), rows)
    host = plan.table_shard if sharding == "row_wise" else host_ranks(plan)
    filled: list[TableShard] = []
    last = rows
    for start, end in sorted({(s.column_start, s.column_end) for s in held}):
        group = {s.rank: s for s in held if s.column_start == start}
        first = min(group) // host * host
        if max(group) >= first + host:
            refuse("ranks", f"lie on one host of {host}", sorted(group), table=table)
        reached = 0
        for rank in range(first, first + host):
            shard = group.get(rank)
            if shard is None:
                shard = TableShard(
                    rank=rank,
                    row_start=max(reached, rows),
                    row_end=max(reached, rows) + 1,
                    column_start=start,
                    column_end=end,
                )
            if shard.row_start != reached:
                refuse("rows", "ascend with the ranks", f"{shard}", table=table)
            reached = shard.row_end
            filled.append(shard)
        last = max(last, reached)
    # All ranges of columns have as many rows: torchrec knows one number of rows a table.
    if any(s.row_end != last for s in filled[host - 1 :: host]):
        refuse("rows", "be cut alike for all columns", "different cuts", table=table)
    return PlacedTable(spec, sharding, tuple(filled), last)


def host_ranks(plan: TablePlan) -> int:
    """Return how many ranks of a sharding group torchrec takes for one host.

    Args:
        plan: of the tables.

    Returns:
        the plan's own number; the whole group where it has none.
    """
    return min(plan.host_ranks or plan.table_shard, plan.table_shard)

"""How a table is cut into the shards of a placement, and the bytes that a shard takes.

A cut is decided elsewhere; here it becomes rectangles. Rows and columns are cut by ceiling
division, so that an owner is found by one division and the last ranks may own nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gem_embeddings.contract import (
    ROW_BYTES,
    OptimizerSpec,
    Sharding,
    TablePlacement,
    TablePlan,
    TableShard,
    TableSpec,
)
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.contract import TableCopies


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """What a sharding group looks like to a table.

    Attributes:
        table_shard: ranks of a group.
        table_replicate: groups, each of which holds every table once.
        fully_sharded: the copies of a shard keep ``1 / table_replicate`` of it each.
        host_ranks: consecutive ranks of a group that share a host.
        optimizer: whose state lies beside the rows.
    """

    table_shard: int
    table_replicate: int
    fully_sharded: bool
    host_ranks: int
    optimizer: OptimizerSpec

    def held_bytes(self, table: TableSpec, rows: int, columns: int) -> int:
        """Return the bytes that a shard takes on a rank between steps.

        Args:
            table: the table.
            rows: rows of the shard.
            columns: elements of a row that it holds.

        Returns:
            bytes of weights and optimizer rows, a ``1 / table_replicate`` part of them where fully
            sharded. The padding of buffers is left out.
        """
        whole = self.whole_bytes(table, rows, columns)
        return -(-whole // self.table_replicate) if self.fully_sharded else whole

    def copy_bytes(self, table: TableSpec, rows: int, columns: int) -> int:
        """Return the bytes of the whole copy of a shard that a fully sharded rank gathers.

        Args:
            table: the table.
            rows: rows of the shard.
            columns: elements of a row that it holds.

        Returns:
            bytes of weights and optimizer rows while they are updated; 0 where nothing is gathered.
        """
        if not self.fully_sharded or self.table_replicate == 1:
            return 0
        return self.whole_bytes(table, rows, columns)

    def whole_bytes(self, table: TableSpec, rows: int, columns: int) -> int:
        """Return the bytes of the weights and optimizer rows of a shard.

        Args:
            table: the table.
            rows: rows of the shard.
            columns: elements of a row that it holds.
        """
        weights = ROW_BYTES[table.row_dtype] * rows * columns
        return weights + self.optimizer.shard_state_bytes(rows, columns)


def cut_table(
    table: TableSpec, sharding: Sharding, ranks: Sequence[int], layout: GroupLayout
) -> TablePlacement:
    """Cut a table over ranks.

    Args:
        table: the table.
        sharding: how; ``grid`` takes the ranks host by host, ``layout.host_ranks`` of each.
        ranks: ranks of the sharding group that share the table, in the order of their parts;
            unused for a replicated table.
        layout: the sharding group.

    Returns:
        one shard for each rank, some of them empty where there are more ranks than parts.
    """
    if sharding == "replicated":
        whole = layout.held_bytes(table, table.num_embeddings, table.embedding_dim)
        return TablePlacement(table_name=table.name, sharding=sharding, rank_bytes=whole)
    row_cuts = {"table_wise": 1, "column_wise": 1, "grid": layout.host_ranks}.get(
        sharding, len(ranks)
    )
    column_cuts = max(1, len(ranks) // row_cuts)
    rows = -(-table.num_embeddings // row_cuts)
    columns = -(-table.embedding_dim // column_cuts)
    shards, held = [], {}
    for position, rank in enumerate(ranks):
        row_part, column_part = position % row_cuts, position // row_cuts
        row_start, row_end = _part(row_part, rows, table.num_embeddings)
        column_start, column_end = _part(column_part, columns, table.embedding_dim)
        shape = row_end - row_start, column_end - column_start
        # All shards but the last ones are alike.
        if shape not in held:
            held[shape] = layout.held_bytes(table, *shape)
        shards.append(
            TableShard(
                rank=rank,
                row_start=row_start,
                row_end=row_end,
                column_start=column_start,
                column_end=column_end,
                shard_bytes=held[shape],
            )
        )
    return TablePlacement(
        table_name=table.name,
        sharding=sharding,
        shards=tuple(shards),
        rank_bytes=max(shard.shard_bytes for shard in shards),
    )


def _part(index: int, block: int, whole: int) -> tuple[int, int]:
    return min(index * block, whole), min((index + 1) * block, whole)


def place_tables(
    tables: Sequence[TableSpec],
    shardings: Mapping[str, Sharding],
    *,
    table_shard: int,
    table_replicate: int = 1,
    table_copies: TableCopies = "near",
    fully_sharded: bool = False,
    host_ranks: int | None = None,
    optimizer: OptimizerSpec | None = None,
) -> TablePlan:
    """Make the plan that cuts every table in the way that is asked for, without costing it.

    Tables that take one rank or one host go to the next one in turn, in the order of ``tables``.
    ``plan_tables`` decides by cost instead.

    Args:
        tables: the tables.
        shardings: table name -> how it is cut; tables that are left out are replicated.
        table_shard: ranks of a sharding group.
        table_replicate: sharding groups.
        table_copies: which world ranks are neighbours, as in `TablePlan`.
        fully_sharded: each copy of a shard keeps its part of the weights between steps.
        host_ranks: ranks of a group on one host, a divisor of ``table_shard``; None for all.
        optimizer: whose state lies beside the rows; None for the default one.

    Returns:
        the plan for ``table_shard * table_replicate`` ranks. ``column_wise`` and ``row_wise`` use
        every rank of a group, ``table_row_wise`` every rank of one host, ``grid`` every host.

    Raises:
        ConfigError: a sharding for a table that is not there, fewer than one rank or group, or a
            ``host_ranks`` that does not divide the group.
    """
    unknown = sorted(set(shardings) - {table.name for table in tables})
    if unknown:
        raise ConfigError(
            refusal(
                "place_tables",
                "shardings",
                must="name tables that are there",
                got=", ".join(unknown),
                fix="use the names of the specs",
            )
        )
    for name, number in (("table_shard", table_shard), ("table_replicate", table_replicate)):
        if number < 1:
            raise ConfigError(
                refusal(
                    "place_tables", name, must="be at least 1", got=number, fix="count the ranks"
                )
            )
    on_host = table_shard if host_ranks is None else host_ranks
    if on_host < 1 or table_shard % on_host:
        raise ConfigError(
            refusal(
                "place_tables",
                "host_ranks",
                must=f"divide table_shard={table_shard}",
                got=on_host,
                fix="give the ranks of one sharding group that share a host",
            )
        )
    layout = GroupLayout(
        table_shard=table_shard,
        table_replicate=table_replicate,
        fully_sharded=fully_sharded,
        host_ranks=on_host,
        optimizer=OptimizerSpec() if optimizer is None else optimizer,
    )
    next_rank = next_host = 0
    placements = []
    for table in tables:
        sharding = shardings.get(table.name, "replicated")
        ranks: Sequence[int] = range(table_shard)
        if sharding == "table_wise":
            ranks = (next_rank % table_shard,)
            next_rank += 1
        elif sharding == "table_row_wise":
            first = next_host * on_host % table_shard
            ranks = range(first, first + on_host)
            next_host += 1
        placements.append(cut_table(table, sharding, ranks, layout))
    return TablePlan(
        ranks=table_shard * table_replicate,
        table_shard=table_shard,
        table_replicate=table_replicate,
        table_copies=table_copies,
        fully_sharded=fully_sharded,
        host_ranks=host_ranks,
        placements=tuple(placements),
    )

"""Which rank holds which rectangle of which table, and in what order ids and vectors travel.

Everything here follows from specs and plan alone and is the same on every rank, so two ranks agree
on the order of what they send each other without a word.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from gem_embeddings.contract import OptimizerSpec, TablePlan, TableSpec
from gem_embeddings.rules import is_row_wise
from gem_opkit.errors import ConfigError, UnsupportedError, refusal

OP = "TorchTables"
TORCH_DTYPE: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangle of a table on one rank of a sharding group; never empty.

    Attributes:
        table: index of the table.
        rank: rank inside the group.
        row_start, row_end, column_start, column_end: as in ``TableShard``.
    """

    table: int
    rank: int
    row_start: int
    row_end: int
    column_start: int
    column_end: int

    @property
    def rows(self) -> int:
        """Rows of the shard."""
        return self.row_end - self.row_start

    @property
    def columns(self) -> int:
        """Columns of the shard."""
        return self.column_end - self.column_start


# What the shards of one store share: row dtype, whether their rows lie in pieces, and width.
StoreKey = tuple[str, bool, int]


@dataclass(frozen=True, slots=True)
class Places:
    """Where all tables lie.

    Attributes:
        specs: the tables.
        ranks: ranks of a sharding group.
        by_rank: shards of each rank in the order in which they travel: store after store.
        replicated: tables that every rank holds whole.
        in_pieces: tables whose rows are cut and that learn by a number for the whole row.
        first_key: number of the first row of each table where all tables are numbered through, and
            last the number of all rows.
    """

    specs: tuple[TableSpec, ...]
    ranks: int
    by_rank: tuple[tuple[Shard, ...], ...]
    replicated: tuple[int, ...]
    in_pieces: frozenset[int]
    first_key: tuple[int, ...]

    @property
    def routes(self) -> tuple[Shard, ...]:
        """All shards in the order in which a rank sends ids to them."""
        return tuple(shard for shards in self.by_rank for shard in shards)

    def store_of(self, shard: Shard) -> StoreKey:
        """Return what the shard shares with those that lie in one buffer with it."""
        dtype = self.specs[shard.table].row_dtype
        return dtype, shard.table in self.in_pieces, shard.columns

    @property
    def stores(self) -> tuple[StoreKey, ...]:
        """The stores of all ranks, in the order in which they travel."""
        return tuple(sorted({self.store_of(shard) for shard in self.routes}))

    def first_rows(self, shards: Sequence[Shard]) -> list[int]:
        """Return the row of its store at which each shard of one rank begins."""
        reached: dict[StoreKey, int] = {}
        first: list[int] = []
        for shard in shards:
            key = self.store_of(shard)
            first.append(reached.get(key, 0))
            reached[key] = first[-1] + shard.rows
        return first


def places_of(specs: Sequence[TableSpec], plan: TablePlan, optimizer: OptimizerSpec) -> Places:
    """Read a plan.

    Args:
        specs: the tables.
        plan: where they lie.
        optimizer: how rows learn.

    Returns:
        the places.

    Raises:
        ConfigError: the plan is of other tables, or its shards do not cover one.
        UnsupportedError: row-wise AdaGrad over columns whose rows are cut differently.
    """
    placements = {placement.table_name: placement for placement in plan.placements}
    named = {spec.name for spec in specs}
    if placements.keys() != named:
        raise ConfigError(
            refusal(
                OP,
                "plan",
                must=f"place the tables {', '.join(sorted(named)) or 'none'}",
                got=", ".join(sorted(placements)) or "none",
                fix="make it with plan_tables from the same specs",
            )
        )
    shards: list[Shard] = []
    replicated: list[int] = []
    in_pieces: set[int] = set()
    for index, spec in enumerate(specs):
        placement = placements[spec.name]
        if placement.sharding == "replicated":
            replicated.append(index)
            continue
        held = [
            Shard(index, s.rank, s.row_start, s.row_end, s.column_start, s.column_end)
            for s in placement.shards
            if s.row_end > s.row_start and s.column_end > s.column_start
        ]
        _check_cover(spec, held)
        if is_row_wise(optimizer.kind) and any(s.columns < spec.embedding_dim for s in held):
            _check_rows_agree(spec, held, placement.sharding)
            in_pieces.add(index)
        shards.extend(held)
    found: list[list[Shard]] = [[] for _ in range(plan.table_shard)]
    for shard in shards:
        found[shard.rank].append(shard)
    for held in found:
        held.sort(
            key=lambda s: (
                (specs[s.table].row_dtype, s.table in in_pieces, s.columns),
                (s.table, s.row_start, s.column_start),
            )
        )
    first_key = tuple(accumulate((spec.num_embeddings for spec in specs), initial=0))
    return Places(
        tuple(specs),
        plan.table_shard,
        tuple(tuple(held) for held in found),
        tuple(replicated),
        frozenset(in_pieces),
        first_key,
    )


def _check_cover(spec: TableSpec, held: Sequence[Shard]) -> None:
    """The contract has seen that shards do not overlap; here that they are of this table."""
    rows = max((shard.row_end for shard in held), default=0)
    columns = max((shard.column_end for shard in held), default=0)
    if (rows, columns) != (spec.num_embeddings, spec.embedding_dim):
        raise ConfigError(
            refusal(
                OP,
                f"plan of table {spec.name!r}",
                must=f"cover {spec.num_embeddings} rows of {spec.embedding_dim}",
                got=f"{rows} rows of {columns}",
                fix="make it with plan_tables from the same specs",
            )
        )


def _check_rows_agree(spec: TableSpec, held: Sequence[Shard], sharding: str) -> None:
    """One accumulator a row needs the pieces of a row to lie on ranks that see the same rows."""
    cuts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for shard in held:
        columns = (shard.column_start, shard.column_end)
        cuts.setdefault(columns, []).append((shard.row_start, shard.row_end))
    different = {tuple(sorted(rows)) for rows in cuts.values()}
    if len(different) > 1:
        raise UnsupportedError(
            refusal(
                OP,
                f"plan of table {spec.name!r} ({sharding}, engine torch)",
                must="cut the rows of all columns alike under rowwise_adagrad",
                got=f"{len(different)} ways",
                fix="give every range of columns the same number of ranks, or use adagrad",
            )
        )

"""What a plan costs that was made elsewhere: by hand, by ``place_tables``, by another planner."""

from collections.abc import Sequence

from gem_embeddings.contract import (
    LookupSpec,
    OptimizerSpec,
    TablePlacement,
    TablePlan,
    TableSpec,
)
from gem_embeddings.planning.balance import Limits, RankLoads
from gem_embeddings.planning.candidates import candidate_of
from gem_embeddings.planning.planner import (
    GroupShape,
    Solution,
    limits_of,
    setting_of,
    traffic_of,
)
from gem_embeddings.planning.spec import PlanningSpec
from gem_embeddings.planning.step import step_cost
from gem_embeddings.planning.traffic import check_loads
from gem_opkit.errors import ConfigError, UnsupportedError, refusal


def evaluate(
    plan: TablePlan,
    tables: Sequence[TableSpec],
    lookups: Sequence[LookupSpec],
    *,
    optimizer: OptimizerSpec,
    spec: PlanningSpec,
) -> Solution:
    """Cost a plan as it is. Parts of a table are taken to be as large as its largest.

    Args:
        plan: where the tables lie; it may hold more than ``spec`` allows.
        tables: the tables.
        lookups: features beyond those that the tables name.
        optimizer: whose state lies beside the rows.
        spec: machines, batch and statistics.

    Returns:
        what the plan costs, without other cuts to compare with.

    Raises:
        ConfigError: a plan of other tables, or one that does not fit the topology.
        UnsupportedError: ranges of columns that are cut into different numbers of rows.
    """
    check_loads(tables, lookups, {load.feature_name: load for load in spec.loads})
    by_name = {table.name: table for table in tables}
    placements = {placement.table_name: placement for placement in plan.placements}
    if by_name.keys() != placements.keys():
        raise ConfigError(
            refusal(
                "explain_tables",
                "plan",
                must=f"place the tables {', '.join(sorted(by_name))}",
                got=", ".join(sorted(placements)),
                fix="make it from the same specs",
            )
        )
    shape = GroupShape(plan.ranks, plan.table_shard, plan.table_replicate, plan.fully_sharded)
    spec = spec.model_copy(update={"table_copies": plan.table_copies})
    setting = setting_of(shape, optimizer, spec)
    traffic = traffic_of(tables, lookups, spec, plan.table_shard)
    zeros = [0] * plan.table_shard
    loads = RankLoads([0.0] * plan.table_shard, list(zeros), list(zeros), {})
    chosen = {}
    for name, asked in traffic.items():
        row_cuts, column_cuts, ranks = _cut(placements[name], plan.table_shard)
        kind = placements[name].sharding
        way = candidate_of(kind, row_cuts, column_cuts, by_name[name], asked, setting)
        chosen[name], loads.ranks[name] = way, ranks
        for rank in ranks:
            loads.add(rank, way)
    limits: Limits = limits_of(spec)
    return Solution(
        setting=setting,
        traffic=traffic,
        options=dict.fromkeys(chosen, ()),
        chosen=chosen,
        loads=loads,
        limits=limits,
        part_ms=float("inf"),
        part_bytes=float("inf"),
        step=step_cost(by_name, traffic, chosen, loads, setting),
    )


def _cut(placement: TablePlacement, table_shard: int) -> tuple[int, int, tuple[int, ...]]:
    """Return the ranks along rows and columns, and who they are, part after part."""
    if placement.sharding == "replicated":
        return 1, 1, tuple(range(table_shard))
    held = sorted(
        (shard for shard in placement.shards if shard.rows and shard.columns),
        key=lambda shard: (shard.column_start, shard.row_start),
    )
    by_columns: dict[int, int] = {}
    for shard in held:
        by_columns[shard.column_start] = by_columns.get(shard.column_start, 0) + 1
    if len(set(by_columns.values())) > 1:
        raise UnsupportedError(
            refusal(
                "explain_tables",
                f"table {placement.table_name}",
                must="have as many parts along the rows in each range of columns",
                got=", ".join(map(str, by_columns.values())),
                fix="cut it with place_tables",
            )
        )
    return len(held) // len(by_columns), len(by_columns), tuple(shard.rank for shard in held)

"""The door to plans of tables. Imports no torch: a plan is made before any tensor exists.

``plan_tables`` decides where tables lie, ``explain_tables`` says why, and ``place_tables`` cuts
tables as it is told.
"""

from collections.abc import Sequence

from gem_embeddings.contract import LookupSpec, OptimizerSpec, TablePlan, TableSpec
from gem_embeddings.planning.evaluate import evaluate
from gem_embeddings.planning.explain import Explanation, explain
from gem_embeddings.planning.layout import place_tables as place_tables
from gem_embeddings.planning.planner import solve
from gem_embeddings.planning.spec import PlanningSpec
from gem_opkit.errors import ConfigError, refusal


def plan_tables(
    tables: Sequence[TableSpec],
    lookups: Sequence[LookupSpec] = (),
    *,
    ranks: int | None = None,
    optimizer: OptimizerSpec | None = None,
    planning: PlanningSpec | None = None,
) -> TablePlan:
    """Decide where every table lies.

    Args:
        tables: the tables; their order changes nothing but the order of the placements.
        lookups: features beyond those that the tables name.
        ranks: ranks that train together; None for those of the topology, or 1 without one.
        optimizer: whose state lies beside the rows; None for the default one.
        planning: machines, batch, memory and what each table allows; None replicates every table.

    Returns:
        the plan: the one of least estimated time that fits, with the bytes that each table takes
        on a rank. The same arguments give the same plan.

    Raises:
        ConfigError: names that are not there, factors whose product is not ``ranks``, or tables
            that do not fit, with the bytes that are missing.
        UnsupportedError: only cuts are allowed that the engine of ``planning`` does not have.
    """
    if planning is None:
        whole = 1 if ranks is None else ranks
        return place_tables(tables, {}, table_shard=whole, optimizer=optimizer)
    return explain_tables(tables, lookups, ranks=ranks, optimizer=optimizer, planning=planning).plan


def explain_tables(
    tables: Sequence[TableSpec],
    lookups: Sequence[LookupSpec] = (),
    *,
    ranks: int | None = None,
    optimizer: OptimizerSpec | None = None,
    planning: PlanningSpec,
    plan: TablePlan | None = None,
) -> Explanation:
    """Decide where every table lies, and say what that costs and why; or cost a given plan.

    Args:
        tables: as in ``plan_tables``.
        lookups: as in ``plan_tables``.
        ranks: as in ``plan_tables``.
        optimizer: as in ``plan_tables``.
        planning: as in ``plan_tables``.
        plan: a plan to cost as it is, whether or not it fits; None to make one.

    Returns:
        the plan with its costs; ``str`` writes them as one table.

    Raises:
        ConfigError: as in ``plan_tables``, or a given plan of other tables, ranks or machines.
        UnsupportedError: as in ``plan_tables``, or a given plan cut in a way that is not costed.
    """
    optimizer = OptimizerSpec() if optimizer is None else optimizer
    if plan is not None:
        if ranks not in (None, plan.ranks):
            raise ConfigError(
                refusal(
                    "explain_tables",
                    "ranks",
                    must=f"be those of the plan, {plan.ranks}",
                    got=ranks,
                    fix="leave it out",
                )
            )
        costed = evaluate(plan, tables, lookups, optimizer=optimizer, spec=planning)
        return explain(costed, tables, plan)
    if ranks is None:
        ranks = 1 if planning.topology is None else planning.topology.world_size
    if ranks < 1:
        raise ConfigError(
            refusal("plan_tables", "ranks", must="be at least 1", got=ranks, fix="give the ranks")
        )
    solution = solve(
        tables,
        lookups,
        ranks=ranks,
        optimizer=optimizer,
        spec=planning,
    )
    return explain(solution, tables)

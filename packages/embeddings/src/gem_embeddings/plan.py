"""Where tables lie. Imports no torch: a plan is made before any tensor exists.

Built: every table on every rank. Left out until it is built: tables sharded over ranks.
"""

from collections.abc import Sequence

from gem_embeddings.contract import OptimizerSpec, TablePlacement, TablePlan, TableSpec
from gem_opkit.errors import UnsupportedError, refusal


def plan_tables(
    tables: Sequence[TableSpec],
    *,
    ranks: int = 1,
    optimizer: OptimizerSpec | None = None,
    placement: str = "replicated",
) -> TablePlan:
    """Decide where every table lies.

    Args:
        tables: the tables.
        ranks: ranks that train together, at least 1.
        optimizer: whose state lies beside the rows; None for the default one.
        placement: ``"replicated"``: every rank holds all rows, and gradients are averaged.

    Returns:
        the plan, with the bytes that each table takes on a rank.

    Raises:
        UnsupportedError: another placement.
    """
    if placement != "replicated":
        raise UnsupportedError(
            refusal(
                "plan_tables",
                "placement",
                must='be "replicated", the only one that is built',
                got=repr(placement),
                fix='use "replicated", or fewer rows',
            )
        )
    optimizer = OptimizerSpec() if optimizer is None else optimizer
    return TablePlan(
        ranks=ranks,
        placements=tuple(
            TablePlacement(
                table_name=table.name,
                rank_bytes=table.weight_bytes + optimizer.state_bytes(table),
            )
            for table in tables
        ),
    )

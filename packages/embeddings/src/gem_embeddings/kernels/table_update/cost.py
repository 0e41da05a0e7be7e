"""Cost of one call of ``table_update``, from plain integers."""

from collections.abc import Sequence

from gem_embeddings.contract import OptimizerSpec, TableOptimizer
from gem_opkit.cost import Cost

_ID_BYTES = 8
# FLOPs of an element, and of a row, once its gradient is there.
RULE_FLOPS: dict[TableOptimizer, tuple[int, int]] = {
    "rowwise_adagrad": (4, 4),
    "adagrad": (5, 0),
    "sgd": (2, 0),
    "adam": (12, 0),
}


def table_update_cost(
    spec: OptimizerSpec,
    *,
    ids: Sequence[int],
    vectors: Sequence[int],
    rows: Sequence[int],
    widths: Sequence[int],
    row_bytes: int = 4,
    grad_bytes: int = 4,
    weighted: bool = False,
) -> Cost:
    """Return the cost of merging the gradients of ids by row and moving the rows.

    Args:
        spec: how rows learn.
        ids: ids of each feature.
        vectors: rows of its gradient.
        rows: different rows that its ids name and no feature before it; ``ids`` where that is not
            known.
        widths: elements of a row.
        row_bytes: bytes of an element of a table.
        grad_bytes: bytes of an element of the gradient.
        weighted: ids have weights.

    Returns:
        an addition for each element beyond the first of its row, and the FLOPs of the rule; ids
        and gradients read once, rows and their state read and written once. What sorting moves is
        not counted: it is not needed in principle.
    """
    of_element, of_row = RULE_FLOPS[spec.kind]
    flops = moved = 0
    for n, v, r, width in zip(ids, vectors, rows, widths, strict=True):
        flops += (max(0, n - r) + (n if weighted else 0) + of_element * r) * width + of_row * r
        moved += n * (_ID_BYTES + (4 if weighted else 0)) + v * width * grad_bytes
        state = spec.shard_state_bytes(r, width)
        moved += 2 * (r * width * row_bytes + state)
    return Cost(flops=flops, bytes=moved)

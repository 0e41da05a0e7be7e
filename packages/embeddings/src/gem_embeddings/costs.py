"""FLOPs and bytes of lookups and table optimizers, from plain ints; imports no torch.

Rows are fp32 unless ``row_bytes`` says otherwise; optimizer rows always are. Ids are counted as the
8 bytes that they take; offsets and counts are left out.
"""

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.kernels.table_lookup.cost import (
    table_lookup_backward_cost,
    table_lookup_cost,
    table_lookup_id_weights_backward_cost,
)
from gem_embeddings.kernels.table_update.cost import RULE_FLOPS, table_update_cost
from gem_opkit.cost import Cost

__all__ = [
    "lookup_backward_cost",
    "lookup_cost",
    "optimizer_cost",
    "table_lookup_backward_cost",
    "table_lookup_cost",
    "table_lookup_id_weights_backward_cost",
    "table_update_cost",
]

_VALUE_BYTES = 4
_ID_BYTES = 8


def lookup_cost(*, ids: int, vectors: int, rows: int, embedding_dim: int) -> Cost:
    """Return the cost of looking up a feature.

    Args:
        ids: ids of all examples.
        vectors: vectors that come out: ``ids`` without pooling, else examples.
        rows: different rows among the ids.
        embedding_dim: elements of a row.

    Returns:
        an addition for each element that is pooled away; ids and different rows read once, the
        vectors written.
    """
    return Cost(
        flops=max(0, ids - vectors) * embedding_dim,
        bytes=ids * _ID_BYTES + (rows + vectors) * embedding_dim * _VALUE_BYTES,
    )


def lookup_backward_cost(*, ids: int, vectors: int, rows: int, embedding_dim: int) -> Cost:
    """Return the cost of the gradient of a table.

    Args:
        ids: ids of all examples.
        vectors: vectors that came out of the lookup.
        rows: different rows among the ids.
        embedding_dim: elements of a row.

    Returns:
        an addition for each element beyond the first of its row; the vectors' gradients read, one
        gradient a row written.
    """
    return Cost(
        flops=max(0, ids - rows) * embedding_dim,
        bytes=(ids + rows) * _ID_BYTES + (vectors + rows) * embedding_dim * _VALUE_BYTES,
    )


def optimizer_cost(
    spec: OptimizerSpec, *, rows: int, embedding_dim: int, row_bytes: int = _VALUE_BYTES
) -> Cost:
    """Return the cost of a step of a table optimizer.

    Args:
        spec: the optimizer.
        rows: different rows that the batch has seen.
        embedding_dim: elements of a row.
        row_bytes: bytes of an element of a row, 4 or 2.

    Returns:
        4 FLOPs an element and 4 a row for row-wise Adagrad, 5 an element for Adagrad, 2 for SGD,
        12 for Adam; fp32 gradients read, weights and state of the rows read and written.
    """
    elements = rows * embedding_dim
    of_element, of_row = RULE_FLOPS[spec.kind]
    flops = of_element * elements + of_row * rows
    moved = elements * (_VALUE_BYTES + 2 * row_bytes)
    state = spec.shard_state_bytes(rows, embedding_dim)
    return Cost(flops=flops, bytes=rows * _ID_BYTES + moved + 2 * state)

"""FLOPs and bytes of lookups and table optimizers, from plain ints; imports no torch.

Tables are fp32. Ids are counted as the 8 bytes that they take; offsets and counts are left out.
"""

from gem_embeddings.contract import OptimizerSpec
from gem_opkit.cost import Cost

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


def optimizer_cost(spec: OptimizerSpec, *, rows: int, embedding_dim: int) -> Cost:
    """Return the cost of a step of a table optimizer.

    Args:
        spec: the optimizer.
        rows: different rows that the batch has seen.
        embedding_dim: elements of a row.

    Returns:
        4 FLOPs an element and 4 a row for row-wise Adagrad, 12 an element for Adam; gradients
        read, weights and state of the rows read and written.
    """
    elements = rows * embedding_dim
    if spec.kind == "rowwise_adagrad":
        return Cost(
            flops=4 * elements + 4 * rows,
            bytes=rows * _ID_BYTES + (3 * elements + 2 * rows) * _VALUE_BYTES,
        )
    return Cost(flops=12 * elements, bytes=rows * _ID_BYTES + 7 * elements * _VALUE_BYTES)

"""Cost of one call of ``table_lookup``, from plain integers."""

from collections.abc import Sequence

from gem_opkit.cost import Cost

_ID_BYTES = 8


def table_lookup_cost(
    *,
    ids: Sequence[int],
    vectors: Sequence[int],
    rows: Sequence[int],
    widths: Sequence[int],
    row_bytes: int = 4,
    out_bytes: int = 4,
    weighted: bool = False,
) -> Cost:
    """Return the cost of the forward.

    Args:
        ids: ids of each feature.
        vectors: output rows of each feature.
        rows: different rows among its ids; ``ids`` where that is not known.
        widths: elements of a row.
        row_bytes: bytes of an element of a table.
        out_bytes: bytes of an element of the output.
        weighted: ids have weights.

    Returns:
        an addition for each element that is pooled away, and a product for each that is weighted;
        ids and different rows read once, the output written.
    """
    flops = moved = 0
    for n, v, r, width in zip(ids, vectors, rows, widths, strict=True):
        flops += (max(0, n - v) + (n if weighted else 0)) * width
        moved += n * (_ID_BYTES + (4 if weighted else 0))
        moved += (r * row_bytes + v * out_bytes) * width
    return Cost(flops=flops, bytes=moved)


def table_lookup_backward_cost(
    *,
    ids: Sequence[int],
    vectors: Sequence[int],
    rows: Sequence[int],
    widths: Sequence[int],
    out_bytes: int = 4,
    weighted: bool = False,
) -> Cost:
    """Return the cost of the dense gradient of the tables; arguments as in the forward.

    Returns:
        an addition for each element beyond the first of its row, and a product for each that is
        weighted; the gradient of the output read, one gradient a row written. Zeros of the other
        rows are not counted.
    """
    flops = moved = 0
    for n, v, r, width in zip(ids, vectors, rows, widths, strict=True):
        flops += (max(0, n - r) + (n if weighted else 0)) * width
        moved += n * (_ID_BYTES + (4 if weighted else 0)) + (r * 4 + v * out_bytes) * width
    return Cost(flops=flops, bytes=moved)


def table_lookup_id_weights_backward_cost(
    *, ids: Sequence[int], vectors: Sequence[int], rows: Sequence[int], widths: Sequence[int]
) -> Cost:
    """Return the cost of the gradient of the weights of ids; arguments as in the forward.

    Returns:
        a product and an addition for each element of an id; rows and gradients read once.
    """
    flops = moved = 0
    for n, v, r, width in zip(ids, vectors, rows, widths, strict=True):
        flops += 2 * n * width
        moved += n * (_ID_BYTES + 4) + (r + v) * 4 * width
    return Cost(flops=flops, bytes=moved)

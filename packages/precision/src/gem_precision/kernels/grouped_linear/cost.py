"""Cost of one call of ``grouped_linear`` and of its backward, from plain integers."""

from gem_opkit.cost import Cost


def grouped_linear_cost(
    *, rows: int, experts: int, width: int, columns: int, element_bytes: int
) -> Cost:
    """Return the cost of the map.

    Args:
        rows: of x; as if each belonged to an expert.
        experts: number of weights.
        width: elements of a row of x.
        columns: elements of a row of y.
        element_bytes: bytes of an element.

    Returns:
        the FLOPs of one product; x and weights read once, y written once.
    """
    moved = rows * (width + columns) + experts * columns * width
    return Cost(flops=2 * rows * width * columns, bytes=moved * element_bytes)


def grouped_linear_backward_cost(
    *, rows: int, experts: int, width: int, columns: int, element_bytes: int
) -> Cost:
    """Return the cost of both gradients.

    Args:
        rows: as ``grouped_linear_cost``.
        experts: as there.
        width: as there.
        columns: as there.
        element_bytes: as there.

    Returns:
        the FLOPs of two products; x, the gradient of y and the weights read once, gradients written
        once.
    """
    moved = rows * (2 * width + columns) + 2 * experts * columns * width
    return Cost(flops=4 * rows * width * columns, bytes=moved * element_bytes)

"""Cost of one call of ``quantized_linear`` and of its backward, from plain integers."""

from gem_opkit.cost import Cost


def quantized_linear_cost(*, rows: int, width: int, columns: int, element_bytes: int) -> Cost:
    """Return the cost of the map.

    Args:
        rows: of x.
        width: elements of a row of x.
        columns: elements of a row of y.
        element_bytes: bytes of an element of x and y.

    Returns:
        the FLOPs of one product; x read and y written once, the weight read once. What is written
        and read again in 8 bits is no part of it: a kernel could keep it.
    """
    moved = rows * (width + columns) + columns * width
    return Cost(flops=2 * rows * width * columns, bytes=moved * element_bytes)


def quantized_linear_backward_cost(
    *, rows: int, width: int, columns: int, element_bytes: int, products: int = 2
) -> Cost:
    """Return the cost of the gradients.

    Args:
        rows: as ``quantized_linear_cost``.
        width: as there.
        columns: as there.
        element_bytes: as there.
        products: 2, or 1 where one of the gradients is not asked for.

    Returns:
        the FLOPs of the products; each gradient written, and what it is made of read, once.
    """
    moved = rows * (width + columns) + columns * width
    return Cost(
        flops=2 * products * rows * width * columns,
        bytes=(moved + (products - 1) * (rows * width + columns * width)) * element_bytes,
    )

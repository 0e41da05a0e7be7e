"""Cost of one call of ``tensor_norms``, from plain integers."""

from gem_opkit.cost import Cost


def tensor_norms_cost(*, elements: int, element_bytes: int = 2) -> Cost:
    """Return the cost of norms.

    Args:
        elements: of all tensors together.
        element_bytes: bytes of an element.

    Returns:
        no FLOPs of products, so 0, like the norms of rows; every element read once.
    """
    return Cost(flops=0, bytes=elements * element_bytes)

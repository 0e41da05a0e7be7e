"""Cost of one call of ``adam_update``, from plain integers."""

from gem_opkit.cost import Cost


def adam_update_cost(
    *, elements: int, gradient_bytes: int = 4, copied: bool = False, element_bytes: int = 4
) -> Cost:
    """Return the cost of moving weights.

    Args:
        elements: of all weights together.
        gradient_bytes: bytes of an element of a gradient.
        copied: a bf16 copy of the weights is written.
        element_bytes: bytes of an element of a weight and of its moments.

    Returns:
        no FLOPs of products, so 0, like the norms; weights and both moments read and written once,
        gradients read once.
    """
    return Cost(flops=0, bytes=elements * (6 * element_bytes + gradient_bytes + 2 * copied))

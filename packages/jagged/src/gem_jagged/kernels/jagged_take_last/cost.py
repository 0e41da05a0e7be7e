"""Cost of one call of ``jagged_take_last``: it moves rows and computes nothing."""

from gem_opkit.cost import Cost


def jagged_take_last_cost(*, kept_tokens: int, width: int, element_bytes: int) -> Cost:
    """Return the cost of the forward.

    Args:
        kept_tokens: tokens that stay.
        width: model width D.
        element_bytes: bytes of one element.

    Returns:
        0 FLOPs; the kept tokens read and written.
    """
    return Cost(flops=0, bytes=2 * kept_tokens * width * element_bytes)


def jagged_take_last_backward_cost(
    *, kept_tokens: int, total_tokens: int, width: int, element_bytes: int
) -> Cost:
    """Return the cost of the backward.

    Args:
        kept_tokens: tokens that stayed.
        total_tokens: tokens T.
        width: model width D.
        element_bytes: bytes of one element.

    Returns:
        0 FLOPs; the gradients of the kept tokens read, those of all written.
    """
    return Cost(flops=0, bytes=(kept_tokens + total_tokens) * width * element_bytes)

"""Cost of one call of ``jagged_sum``."""

from gem_opkit.cost import Cost


def jagged_sum_cost(*, batch: int, total_tokens: int, width: int, element_bytes: int) -> Cost:
    """Return the cost of the forward.

    Args:
        batch: sequences B.
        total_tokens: tokens T.
        width: model width D.
        element_bytes: bytes of one element.

    Returns:
        one addition an element; tokens read, sums written.
    """
    rows = total_tokens + batch
    return Cost(flops=total_tokens * width, bytes=rows * width * element_bytes)


def jagged_sum_backward_cost(
    *, batch: int, total_tokens: int, width: int, element_bytes: int
) -> Cost:
    """Return the cost of the backward; arguments as in the forward.

    Returns:
        0 FLOPs; gradients of the sums read, those of the tokens written.
    """
    rows = total_tokens + batch
    return Cost(flops=0, bytes=rows * width * element_bytes)

"""Cost of one call of ``jagged_broadcast_add``."""

from gem_opkit.cost import Cost


def jagged_broadcast_add_cost(
    *, batch: int, total_tokens: int, width: int, element_bytes: int
) -> Cost:
    """Return the cost of the forward.

    Args:
        batch: sequences B.
        total_tokens: tokens T.
        width: model width D.
        element_bytes: bytes of one element.

    Returns:
        one addition an element; tokens read and written, the rows of the sequences read.
    """
    return Cost(
        flops=total_tokens * width, bytes=(2 * total_tokens + batch) * width * element_bytes
    )


def jagged_broadcast_add_backward_cost(
    *, batch: int, total_tokens: int, width: int, element_bytes: int
) -> Cost:
    """Return the cost of the backward; arguments as in the forward.

    Returns:
        one addition an element; gradients of the tokens read, those of the sequences written. The
        gradient of the values is that of the output and not counted; where the kernel runs, it is
        copied, with 0 behind the last offset.
    """
    return Cost(flops=total_tokens * width, bytes=(total_tokens + batch) * width * element_bytes)

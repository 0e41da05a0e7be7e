"""Cost of one call of ``jagged_index_select``."""

from gem_opkit.cost import Cost


def jagged_index_select_cost(*, selected_tokens: int, width: int, element_bytes: int) -> Cost:
    """Return the cost of the forward.

    Args:
        selected_tokens: tokens of the result; those of a repeated sequence count each time.
        width: model width D.
        element_bytes: bytes of one element.

    Returns:
        0 FLOPs; the tokens of the result written, and read once each.
    """
    return Cost(flops=0, bytes=2 * selected_tokens * width * element_bytes)


def jagged_index_select_backward_cost(
    *, selected_tokens: int, total_tokens: int, width: int, element_bytes: int
) -> Cost:
    """Return the cost of the backward.

    Args:
        selected_tokens: tokens of the result.
        total_tokens: tokens T.
        width: model width D.
        element_bytes: bytes of one element.

    Returns:
        one addition an element of the gradient; it is read, and that of all tokens written.
    """
    return Cost(
        flops=selected_tokens * width,
        bytes=(selected_tokens + total_tokens) * width * element_bytes,
    )

"""Cost of one call of ``jagged_mean``."""

from gem_opkit.cost import Cost


def jagged_mean_cost(*, batch: int, total_tokens: int, width: int, element_bytes: int) -> Cost:
    """Return the cost of the forward.

    Args:
        batch: sequences B.
        total_tokens: tokens T.
        width: model width D.
        element_bytes: bytes of one element.

    Returns:
        one addition an element and one division a mean; tokens read, means written.
    """
    rows = total_tokens + batch
    return Cost(flops=rows * width, bytes=rows * width * element_bytes)


def jagged_mean_backward_cost(
    *, batch: int, total_tokens: int, width: int, element_bytes: int
) -> Cost:
    """Return the cost of the backward; arguments as in the forward.

    Returns:
        one division a mean; gradients of the means read, those of the tokens written.
    """
    rows = total_tokens + batch
    return Cost(flops=batch * width, bytes=rows * width * element_bytes)

"""Cost of one call of ``jagged_concat``: it moves rows and computes nothing."""

from gem_opkit.cost import Cost


def jagged_concat_cost(
    *, left_tokens: int, right_tokens: int, width: int, element_bytes: int
) -> Cost:
    """Return the cost of the forward; the backward costs the same.

    Args:
        left_tokens: tokens of the left.
        right_tokens: tokens of the right.
        width: model width D.
        element_bytes: bytes of one element.

    Returns:
        0 FLOPs; every token read and written once.
    """
    return Cost(flops=0, bytes=2 * (left_tokens + right_tokens) * width * element_bytes)

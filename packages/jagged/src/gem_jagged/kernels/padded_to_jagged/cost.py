"""Cost of one call of ``padded_to_jagged``: it moves rows and computes nothing."""

from gem_opkit.cost import Cost


def padded_to_jagged_cost(*, total_tokens: int, width: int, element_bytes: int) -> Cost:
    """Return the cost of the forward.

    Args:
        total_tokens: tokens T; slots without a token need not be read.
        width: model width D.
        element_bytes: bytes of one element.

    Returns:
        0 FLOPs; T rows read and written.
    """
    return Cost(flops=0, bytes=2 * total_tokens * width * element_bytes)


def padded_to_jagged_backward_cost(
    *, batch: int, total_tokens: int, length: int, width: int, element_bytes: int
) -> Cost:
    """Return the cost of the backward.

    Args:
        batch: sequences B.
        total_tokens: tokens T.
        length: padded length N.
        width: model width D.
        element_bytes: bytes of one element.

    Returns:
        0 FLOPs; the gradients of the tokens read and the padded gradient written.
    """
    return Cost(flops=0, bytes=(total_tokens + batch * length) * width * element_bytes)

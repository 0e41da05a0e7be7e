"""Cost of one call of ``jagged_to_padded``: it moves rows and computes nothing."""

from gem_opkit.cost import Cost


def jagged_to_padded_cost(
    *, batch: int, total_tokens: int, length: int, width: int, element_bytes: int
) -> Cost:
    """Return the cost of the forward.

    Args:
        batch: sequences B.
        total_tokens: tokens T; each is read once, also where a short ``length`` drops it.
        length: padded length N.
        width: model width D.
        element_bytes: bytes of one element.

    Returns:
        0 FLOPs; the tokens read and the padded batch written.
    """
    return Cost(flops=0, bytes=(total_tokens + batch * length) * width * element_bytes)


def jagged_to_padded_backward_cost(
    *, batch: int, total_tokens: int, length: int, width: int, element_bytes: int
) -> Cost:
    """Return the cost of the backward; arguments as in the forward.

    Returns:
        0 FLOPs; at most T rows of the padded gradient read, T rows written.
    """
    read = min(total_tokens, batch * length)
    return Cost(flops=0, bytes=(read + total_tokens) * width * element_bytes)

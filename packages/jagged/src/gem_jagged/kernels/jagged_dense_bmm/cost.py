"""Cost of one call of ``jagged_dense_bmm``."""

from gem_opkit.cost import Cost


def jagged_dense_bmm_cost(
    *,
    batch: int,
    total_tokens: int,
    width: int,
    out_width: int,
    element_bytes: int,
    has_bias: bool = False,
) -> Cost:
    """Return the cost of the forward.

    Args:
        batch: sequences B.
        total_tokens: tokens T.
        width: model width D.
        out_width: width F of the result.
        element_bytes: bytes of one element.
        has_bias: whether a row is added for each sequence.

    Returns:
        a multiply-add for each token, element and column; everything read and written once.
    """
    flops = total_tokens * out_width * (2 * width + int(has_bias))
    rows = total_tokens * (width + out_width) + batch * out_width * (width + int(has_bias))
    return Cost(flops=flops, bytes=rows * element_bytes)


def jagged_dense_bmm_backward_cost(
    *,
    batch: int,
    total_tokens: int,
    width: int,
    out_width: int,
    element_bytes: int,
    has_bias: bool = False,
) -> Cost:
    """Return the cost of the backward; arguments as in the forward.

    Returns:
        two products as large as that of the forward; gradient, tokens and matrices read, their
        gradients written.
    """
    flops = total_tokens * out_width * (4 * width + int(has_bias))
    rows = total_tokens * (2 * width + out_width)
    rows += batch * out_width * (2 * width + int(has_bias))
    return Cost(flops=flops, bytes=rows * element_bytes)

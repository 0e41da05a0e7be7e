"""Cost of one call of ``normed_linear`` and of its backward, from plain integers."""

from gem_opkit.cost import Cost


def normed_linear_cost(
    *, tokens: int, width: int, out_width: int, element_bytes: int, affine: bool = False
) -> Cost:
    """Return the cost of a forward pass.

    Args:
        tokens: rows T.
        width: elements D of a token.
        out_width: elements F of a result.
        element_bytes: bytes of an element of every tensor.
        affine: each column has a gain.

    Returns:
        2·T·D·F FLOPs; tokens and weights read once, the results written once.
    """
    elements = tokens * (width + out_width) + out_width * width + affine * width
    return Cost(flops=2 * tokens * width * out_width, bytes=elements * element_bytes)


def normed_linear_backward_cost(
    *, tokens: int, width: int, out_width: int, element_bytes: int, affine: bool = False
) -> Cost:
    """Return the cost of a backward pass; arguments as in the forward.

    Returns:
        4·T·D·F FLOPs; the gradient, tokens and weights read once, the gradients of both written.
    """
    elements = tokens * (2 * width + out_width) + 2 * out_width * width + 2 * affine * width
    return Cost(flops=4 * tokens * width * out_width, bytes=elements * element_bytes)

"""Cost of one call of ``gated_residual`` and of its backward, from plain integers."""

from gem_opkit.cost import Cost


def gated_residual_cost(*, batch: int, total_tokens: int, width: int, element_bytes: int) -> Cost:
    """Return the cost of a forward pass.

    Args:
        batch: sequences.
        total_tokens: of all of them.
        width: columns.
        element_bytes: bytes of an element of every tensor.

    Returns:
        no FLOPs, as there is no matrix product; two tensors of all tokens read, one written, and
        the gates read.
    """
    return Cost(flops=0, bytes=(3 * total_tokens + batch) * width * element_bytes)


def gated_residual_backward_cost(
    *, batch: int, total_tokens: int, width: int, element_bytes: int
) -> Cost:
    """Return the cost of a backward pass.

    Args:
        batch: sequences.
        total_tokens: of all of them.
        width: columns.
        element_bytes: bytes of an element of every tensor.

    Returns:
        no FLOPs; the gradient and what was added read, its gradient written; gates read, and their
        gradients written.
    """
    return Cost(flops=0, bytes=(3 * total_tokens + 2 * batch) * width * element_bytes)

"""Cost of one call of ``row_norm`` and of its backward, from plain integers."""

from gem_opkit.cost import Cost


def row_norm_cost(
    *,
    rows: int,
    width: int,
    element_bytes: int,
    before: bool = False,
    after: bool = False,
    affine: bool = False,
) -> Cost:
    """Return the cost of a forward pass.

    Args:
        rows: how many.
        width: elements of a row.
        element_bytes: bytes of an element of every tensor.
        before: a tensor is added first.
        after: a tensor is added last.
        affine: each column has a gain.

    Returns:
        no FLOPs, as there is no matrix product; every input read once, the output written once.
    """
    tensors = 2 + before + after
    return Cost(flops=0, bytes=(tensors * rows * width + affine * width) * element_bytes)


def row_norm_backward_cost(
    *,
    rows: int,
    width: int,
    element_bytes: int,
    before: bool = False,
    affine: bool = False,
    added: bool = False,
) -> Cost:
    """Return the cost of a backward pass.

    Args:
        rows: how many.
        width: elements of a row.
        element_bytes: bytes of an element of every tensor.
        before: a tensor was added first; its gradient is that of the input.
        affine: each column has a gain.
        added: another gradient of the input is added in the same pass.

    Returns:
        no FLOPs; the gradient and the inputs read once, the gradient of the input written once.
    """
    tensors = 3 + before + added
    return Cost(flops=0, bytes=(tensors * rows * width + 2 * affine * width) * element_bytes)

"""Cost of one call of ``rotary_heads`` and of its backward, from plain integers."""

from gem_opkit.cost import Cost


def rotary_heads_cost(
    *,
    total_tokens: int,
    heads: int,
    key_heads: int,
    width: int,
    element_bytes: int,
    copies_values: bool = True,
) -> Cost:
    """Return the cost of a forward pass.

    Args:
        total_tokens: tokens.
        heads: query heads.
        key_heads: key and value heads.
        width: of a head.
        element_bytes: bytes of an element.
        copies_values: whether values are read and written too.

    Returns:
        no FLOPs, as there is no matrix product; every head read once and written once.
    """
    elements = total_tokens * (heads + (1 + copies_values) * key_heads) * width
    return Cost(flops=0, bytes=2 * elements * element_bytes)


def rotary_heads_backward_cost(
    *, total_tokens: int, heads: int, key_heads: int, width: int, element_bytes: int, normed: bool
) -> Cost:
    """Return the cost of a backward pass.

    Args:
        total_tokens: tokens.
        heads: query heads.
        key_heads: key and value heads.
        width: of a head.
        element_bytes: bytes of an element.
        normed: queries and keys were normalised, so that they are read again.

    Returns:
        no FLOPs; three gradients read, one written, and queries and keys read where normalised.
    """
    both = heads + key_heads if normed else 0
    elements = total_tokens * (2 * (heads + 2 * key_heads) + both) * width
    return Cost(flops=0, bytes=elements * element_bytes)

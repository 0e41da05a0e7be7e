"""Cost of one call of ``block_attention``, from plain ints."""

from gem_opkit.cost import Cost


def block_pairs_in_sequence(tokens: int, block_tokens: int) -> int:
    """Count the pairs of tokens of one sequence that share a block.

    Args:
        tokens: tokens of the sequence.
        block_tokens: length of a block, above 0.

    Returns:
        pairs that see each other; ``patterns.visible_pairs_block`` without torch.
    """
    rest = tokens % block_tokens
    return (tokens - rest) * block_tokens + rest * rest


def block_attention_cost(
    *,
    visible_pairs: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    value_width: int,
    element_bytes: int,
) -> Cost:
    """Return the cost of the forward.

    Args:
        visible_pairs: pairs of tokens that share a block, over all sequences.
        tokens: tokens T of all sequences.
        heads: query heads H.
        kv_heads: key/value heads G.
        head_width: width K of queries and keys.
        value_width: width V of values.
        element_bytes: bytes of one element of q, k, v and the output.

    Returns:
        2·H·pairs·(K + V) FLOPs; q, k, v read once, the output written, no logsumexp.
    """
    width = head_width + value_width
    return Cost(
        flops=2 * heads * visible_pairs * width,
        bytes=tokens * (heads + kv_heads) * width * element_bytes,
    )


def block_attention_backward_cost(
    *,
    visible_pairs: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    value_width: int,
    element_bytes: int,
) -> Cost:
    """Return the cost of the backward; arguments as in the forward.

    Returns:
        2·H·pairs·(3K + 2V) FLOPs: five products, of which the scores are one, because they are
        never stored. Reads q, k, v, and the gradient of the output, and writes three gradients;
        a row sum of P ∘ dP makes reading the output unnecessary.
    """
    q_side = tokens * heads * (2 * head_width + value_width)
    k_side = tokens * kv_heads * 2 * (head_width + value_width)
    return Cost(
        flops=2 * heads * visible_pairs * (3 * head_width + 2 * value_width),
        bytes=(q_side + k_side) * element_bytes,
    )

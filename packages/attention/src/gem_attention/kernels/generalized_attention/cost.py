"""Cost of one call of ``generalized_attention``, from plain ints; activations count as 0 FLOPs."""

from gem_opkit.cost import Cost


def generalized_attention_cost(
    *,
    visible_pairs: int,
    q_tokens: int,
    k_tokens: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    value_width: int,
    element_bytes: int,
) -> Cost:
    """Return the cost of the forward.

    Args:
        visible_pairs: pairs of query and key that see each other, over all sequences.
        q_tokens: query tokens T of all sequences.
        k_tokens: key tokens S of all sequences.
        heads: query heads H.
        kv_heads: key/value heads G.
        head_width: width K of queries and keys.
        value_width: width V of values.
        element_bytes: bytes of one element of q, k, v and the output.

    Returns:
        2·H·pairs·(K + V) FLOPs; q, k, v read once, the output written.
    """
    width = head_width + value_width
    return Cost(
        flops=2 * heads * visible_pairs * width,
        bytes=(q_tokens * heads + k_tokens * kv_heads) * width * element_bytes,
    )


def generalized_attention_backward_cost(
    *,
    visible_pairs: int,
    q_tokens: int,
    k_tokens: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    value_width: int,
    element_bytes: int,
) -> Cost:
    """Return the cost of the backward; arguments as in the forward.

    Returns:
        2·H·pairs·(3K + 2V) FLOPs: five products, of which the scores are one, because they are
        never stored. Reads q, k, v and the gradient of the output, which it does not need
        itself, and writes three gradients.
    """
    q_side = q_tokens * heads * (2 * head_width + value_width)
    k_side = k_tokens * kv_heads * 2 * (head_width + value_width)
    return Cost(
        flops=2 * heads * visible_pairs * (3 * head_width + 2 * value_width),
        bytes=(q_side + k_side) * element_bytes,
    )

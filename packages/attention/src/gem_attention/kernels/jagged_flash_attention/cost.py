"""Cost of one call of ``jagged_flash_attention``, from plain ints."""

from gem_opkit.cost import Cost


def visible_pairs_in_sequence(
    q_tokens: int, k_tokens: int, left_tokens: int | None = None, right_tokens: int | None = None
) -> int:
    """Count the visible pairs of one sequence; ``patterns.visible_pairs`` without torch.

    Args:
        q_tokens: queries of the sequence.
        k_tokens: keys of the sequence.
        left_tokens: keys visible before the query's place, at least 0; None for all.
        right_tokens: keys visible after it, at least 0; None for all.

    Returns:
        pairs of query and key that see each other.
    """
    pairs = q_tokens * k_tokens
    if left_tokens is not None:
        hidden = max(k_tokens - 1 - left_tokens, 0)
        rows = min(q_tokens, hidden)
        pairs -= rows * hidden - rows * (rows - 1) // 2
    if right_tokens is not None:
        rows = max(q_tokens - 1 - right_tokens, 0)
        rising = min(rows, k_tokens)
        pairs -= rising * (rising + 1) // 2 + (rows - rising) * k_tokens
    return pairs


def jagged_flash_attention_cost(
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
        2·H·pairs·(K + V) FLOPs; q, k, v read once, the output and the fp32 logsumexp written.
    """
    moved = q_tokens * heads * (head_width + value_width)
    moved += k_tokens * kv_heads * (head_width + value_width)
    return Cost(
        flops=2 * heads * visible_pairs * (head_width + value_width),
        bytes=moved * element_bytes + 4 * q_tokens * heads,
    )


def jagged_flash_attention_backward_cost(
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
        never stored (2.5 times the forward where K = V). Reads q, k, v, out, its gradient and
        the logsumexp, writes three gradients.
    """
    q_side = q_tokens * heads * 2 * (head_width + value_width)
    k_side = k_tokens * kv_heads * 2 * (head_width + value_width)
    return Cost(
        flops=2 * heads * visible_pairs * (3 * head_width + 2 * value_width),
        bytes=(q_side + k_side) * element_bytes + 4 * q_tokens * heads,
    )

"""Cost of one call of ``pooled_attention``, from plain ints."""

from gem_opkit.cost import Cost


def pooled_attention_cost(
    *,
    batch: int,
    seeds: int,
    k_tokens: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    value_width: int,
    element_bytes: int,
) -> Cost:
    """Return the cost of the forward.

    Args:
        batch: sequences B.
        seeds: queries P, shared by all sequences.
        k_tokens: key tokens S of all sequences.
        heads: query heads H.
        kv_heads: key/value heads G.
        head_width: width K of queries and keys.
        value_width: width V of values.
        element_bytes: bytes of one element of seeds, k, v and the output.

    Returns:
        2·H·P·S·(K + V) FLOPs; the seeds read once for the whole batch, k and v once, the output
        written.
    """
    moved = seeds * heads * head_width + batch * seeds * heads * value_width
    moved += k_tokens * kv_heads * (head_width + value_width)
    return Cost(
        flops=2 * heads * seeds * k_tokens * (head_width + value_width),
        bytes=moved * element_bytes,
    )


def pooled_attention_backward_cost(
    *,
    batch: int,
    seeds: int,
    k_tokens: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    value_width: int,
    element_bytes: int,
) -> Cost:
    """Return the cost of the backward; arguments as in the forward.

    Returns:
        2·H·P·S·(3K + 2V) FLOPs: five products, of which the scores are one, because they are
        never stored. Reads seeds, k, v and the gradient of the output, writes three gradients,
        that of the seeds summed over the batch.
    """
    q_side = 2 * seeds * heads * head_width + batch * seeds * heads * value_width
    k_side = k_tokens * kv_heads * 2 * (head_width + value_width)
    return Cost(
        flops=2 * heads * seeds * k_tokens * (3 * head_width + 2 * value_width),
        bytes=(q_side + k_side) * element_bytes,
    )

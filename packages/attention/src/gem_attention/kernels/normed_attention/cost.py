"""Cost of one call of ``normed_attention``, from plain ints; norms and activations count 0."""

from gem_opkit.cost import Cost


def normed_attention_cost(  # noqa: PLR0913 - what decides the cost
    *,
    visible_pairs: int,
    tokens: int,
    k_tokens: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    token_bytes: int,
    key_bytes: int,
    keeps: int = 0,
) -> Cost:
    """Return the cost of the forward.

    Args:
        visible_pairs: pairs of token and key of one sequence, over all sequences.
        tokens: tokens T of all sequences.
        k_tokens: keys S of all sequences.
        heads: query heads H.
        kv_heads: key/value heads G.
        head_width: width K of queries, keys and values.
        token_bytes: bytes of one element of the tokens and the output.
        key_bytes: bytes of one element of keys and values.
        keeps: tensors of the tokens' size that are written for the backward.

    Returns:
        4·H·pairs·K FLOPs; tokens, keys and values read once, the output written.
    """
    return Cost(
        flops=4 * heads * visible_pairs * head_width,
        bytes=(2 + keeps) * tokens * heads * head_width * token_bytes
        + 2 * k_tokens * kv_heads * head_width * key_bytes,
    )


def normed_attention_backward_cost(  # noqa: PLR0913 - what decides the cost
    *,
    visible_pairs: int,
    tokens: int,
    k_tokens: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    token_bytes: int,
    key_bytes: int,
    kept: int = 0,
) -> Cost:
    """Return the cost of the backward; arguments as in the forward.

    Returns:
        12·H·pairs·K FLOPs: six products, of which the scores and the attention's output are two,
        because neither is stored; 10 where the forward has kept the latter. Reads tokens, keys,
        values, the gradient of the output and what was kept, and writes three gradients.
    """
    return Cost(
        flops=(10 if kept else 12) * heads * visible_pairs * head_width,
        bytes=(3 + kept) * tokens * heads * head_width * token_bytes
        + 4 * k_tokens * kv_heads * head_width * key_bytes,
    )

"""What the words full, causal, window, cross and block mean: boolean masks in plain torch.

A mask is True where a query (row) sees a key (column). Queries and keys of one sequence are
numbered from 0; where their numbers differ, the *last* query stands at the last key (bottom-right
alignment), so query i stands at key i + Lk - Lq. The operators never build these masks; tests
compare them with the masks, element by element.

Also here: how many pairs of a batch are visible, counted without a mask. The operators take that
number as an argument, for the FLOP count.
"""

import torch
from torch import Tensor


def window_mask(
    q_tokens: int, k_tokens: int, left_tokens: int | None, right_tokens: int | None
) -> Tensor:
    """Return which keys a query sees within a window around its own place.

        visible[i, j]  ⇔  i + Lk − Lq − left ≤ j ≤ i + Lk − Lq + right

    Args:
        q_tokens: queries Lq of the sequence.
        k_tokens: keys Lk of the sequence.
        left_tokens: keys visible before the query's place, at least 0; None for all.
        right_tokens: keys visible after it, at least 0; None for all.

    Returns:
        bool (Lq, Lk).
    """
    place = torch.arange(q_tokens)[:, None] + (k_tokens - q_tokens)
    key = torch.arange(k_tokens)[None, :]
    visible = torch.ones(q_tokens, k_tokens, dtype=torch.bool)
    if left_tokens is not None:
        visible &= key >= place - left_tokens
    if right_tokens is not None:
        visible &= key <= place + right_tokens
    return visible


def full_mask(tokens: int) -> Tensor:
    """Return the mask of self-attention in which every token sees every token.

    Args:
        tokens: tokens of the sequence.

    Returns:
        bool (L, L), all True.
    """
    return window_mask(tokens, tokens, None, None)


def causal_mask(q_tokens: int, k_tokens: int) -> Tensor:
    """Return the mask in which a query sees its own place and what is before it.

    Args:
        q_tokens: queries Lq.
        k_tokens: keys Lk. Where there are fewer keys than queries, the first Lq - Lk queries
            see nothing.

    Returns:
        bool (Lq, Lk); equals ``window_mask(q_tokens, k_tokens, None, 0)``.
    """
    return window_mask(q_tokens, k_tokens, None, 0)


def cross_mask(q_tokens: int, k_tokens: int) -> Tensor:
    """Return the mask of cross-attention: every query sees every key.

    Args:
        q_tokens: queries Lq.
        k_tokens: keys Lk.

    Returns:
        bool (Lq, Lk), all True.
    """
    return window_mask(q_tokens, k_tokens, None, None)


def block_mask(tokens: int, block_tokens: int) -> Tensor:
    """Return the mask of block attention: a token sees the tokens of its own block.

    Args:
        tokens: tokens L of the sequence.
        block_tokens: length of a block, above 0; the last block of a sequence may be shorter.

    Returns:
        bool (L, L).
    """
    block = torch.arange(tokens) // block_tokens
    return block[:, None] == block[None, :]


def visible_pairs(
    q_lengths: Tensor,
    k_lengths: Tensor,
    left_tokens: int | None = None,
    right_tokens: int | None = None,
) -> int:
    """Count the pairs of query and key that a window lets see each other, over a batch.

    Args:
        q_lengths: queries of each sequence, integers on the CPU (``Layout.lengths``).
        k_lengths: keys of each sequence, likewise.
        left_tokens: as in ``window_mask``.
        right_tokens: as in ``window_mask``.

    Returns:
        the number of True elements of all sequences' masks together.

    Cost: a dozen operations on B integers; no mask.
    """
    q_lengths, k_lengths = q_lengths.to(torch.int64), k_lengths.to(torch.int64)
    pairs = q_lengths * k_lengths
    # Counted from the end of the sequence, where queries and keys are aligned: query u and key w
    # (both 0 for the last one) are too far apart to the left where w > u + left, to the right
    # where w < u - right. At most one of the two holds, so both counts are taken away.
    if left_tokens is not None:
        hidden = (k_lengths - 1 - left_tokens).clamp(min=0)
        rows = torch.minimum(q_lengths, hidden)
        pairs = pairs - rows * hidden + rows * (rows - 1) // 2
    if right_tokens is not None:
        rows = (q_lengths - 1 - right_tokens).clamp(min=0)
        rising = torch.minimum(rows, k_lengths)
        pairs = pairs - rising * (rising + 1) // 2 - (rows - rising) * k_lengths
    return int(pairs.sum())


def visible_pairs_block(lengths: Tensor, block_tokens: int) -> int:
    """Count the pairs of tokens that share a block, over a batch.

    Args:
        lengths: tokens of each sequence, integers on the CPU (``Layout.lengths``).
        block_tokens: length of a block, above 0.

    Returns:
        the number of True elements of all sequences' masks together.
    """
    lengths = lengths.to(torch.int64)
    rest = lengths % block_tokens
    return int(((lengths - rest) * block_tokens + rest * rest).sum())

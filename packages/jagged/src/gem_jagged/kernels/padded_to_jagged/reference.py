"""The mathematics of ``padded_to_jagged``, forward and backward, in plain torch.

With o_b the offset of sequence b, L_b its length and N the padded length:

    left:   values[o_b + i] = padded[b, i]
    right:  values[o_b + i] = padded[b, N - L_b + i]         for 0 <= i < L_b

Slots without a token are dropped; their gradient is 0. Written out here rather than taken from
``jagged_to_padded``, of which it is the inverse, so that each can be read and changed alone.
"""

import torch
from torch import Tensor

from gem_jagged.movable import copy_rows
from gem_jagged.offsets import sequence_ids


def token_rows(offsets_O: Tensor, total_tokens: int, length: int, align: str) -> Tensor:
    """Return the row of each token in the (B·N, D) view of a padded batch.

    Args:
        offsets_O: int32 or int64.
        total_tokens: number of tokens T.
        length: padded length N, at least the longest sequence.
        align: ``"left"`` or ``"right"``.

    Returns:
        row_T, int64.
    """
    # int64 before any arithmetic: B·N passes 2^31 where no offset does.
    offsets = offsets_O.to(torch.int64)
    ids = sequence_ids(offsets, total_tokens)
    # Row of token 0 of each sequence, minus its place in the packed batch.
    rows = torch.arange(offsets.shape[0] - 1, device=offsets.device) * length
    shift = rows - offsets[:-1] if align == "left" else rows + length - offsets[1:]
    return torch.arange(total_tokens, device=offsets.device) + shift[ids]


def padded_to_jagged_reference(
    padded_BND: Tensor, offsets_O: Tensor, total_tokens: int, align: str
) -> Tensor:
    """Pack the tokens of a padded batch.

    Args:
        padded_BND: padded batch, any dtype and strides; N at least the longest sequence.
        offsets_O: int32 or int64.
        total_tokens: number of tokens T.
        align: the side of the row on which the tokens stand.

    Returns:
        values_TD, contiguous, in the dtype of the padded batch.
    """
    batch, length, width = padded_BND.shape
    if total_tokens == 0:
        return padded_BND.new_empty((0, width))
    row_T = token_rows(offsets_O, total_tokens, length, align)
    return padded_BND.reshape(batch * length, width).index_select(0, row_T)


def padded_to_jagged_backward_reference(
    grad_TD: Tensor, offsets_O: Tensor, length: int, align: str
) -> Tensor:
    """Move the gradients of tokens back to their slots.

    Args:
        grad_TD: gradient of the packed tokens, any strides.
        offsets_O: int32 or int64.
        length: padded length N.
        align: as in the forward.

    Returns:
        grad_BND; 0 in the slots without a token.
    """
    batch, (total_tokens, width) = offsets_O.shape[0] - 1, grad_TD.shape
    grad = grad_TD.new_zeros((batch * length, width))
    if total_tokens > 0:
        copy_rows(grad, token_rows(offsets_O, total_tokens, length, align), grad_TD)
    return grad.view(batch, length, width)

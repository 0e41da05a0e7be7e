"""The mathematics of ``jagged_to_padded``, forward and backward, in plain torch.

With L_b the length of sequence b, o_b its offset and N the padded length:

    left:   padded[b, n] = values[o_b + n]               where n < L_b
    right:  padded[b, n] = values[o_b + L_b - N + n]     where 0 <= L_b - N + n

and ``fill`` elsewhere. So ``left`` keeps the first N tokens of a longer sequence, ``right`` the
last N. Backward moves each gradient row back; a token that was cut off gets 0.
"""

import torch
from torch import Tensor

from gem_jagged.movable import copy_rows
from gem_jagged.offsets import sequence_ids


def padded_rows(
    offsets_O: Tensor, total_tokens: int, length: int, align: str
) -> tuple[Tensor, Tensor]:
    """Return where each token stands in a padded batch.

    Args:
        offsets_O: int32 or int64.
        total_tokens: number of tokens T.
        length: padded length N, at least 1.
        align: ``"left"`` or ``"right"``.

    Returns:
        row_T, int64, the row of the token in the (B·N, D) view of the padded batch, and holds_T,
        bool, False for a token that the batch cuts off (its row is one of its own sequence).
    """
    # int64 before any arithmetic: B·N passes 2^31 where no offset does.
    offsets = offsets_O.to(torch.int64)
    ids = sequence_ids(offsets, total_tokens)
    tokens = torch.arange(total_tokens, device=offsets.device)
    slots = tokens - offsets[ids] if align == "left" else tokens - offsets[1:][ids] + length
    holds = (slots >= 0) & (slots < length)
    return ids * length + slots.clamp(0, length - 1), holds


def jagged_to_padded_reference(
    values_TD: Tensor,
    offsets_O: Tensor,
    length: int,
    max_length: int,
    fill: float,
    align: str,
) -> Tensor:
    """Pad every sequence to ``length``.

    Args:
        values_TD: tokens, any dtype.
        offsets_O: int32 or int64.
        length: padded length N, at least 0.
        max_length: the longest length; where it is at most N, nothing is cut off.
        fill: what stands where no token is.
        align: ``"left"`` or ``"right"``.

    Returns:
        padded_BND, contiguous, in the dtype of the values.
    """
    batch, (total_tokens, width) = offsets_O.shape[0] - 1, values_TD.shape
    rows = batch * length
    if rows == 0 or total_tokens == 0:
        return values_TD.new_full((batch, length, width), fill)
    row_T, holds_T = padded_rows(offsets_O, total_tokens, length, align)
    # One row more than is kept: the place of tokens that are cut off. Selecting the others
    # instead would need their number on the host.
    padded = values_TD.new_full((rows + 1, width), fill)
    if max_length > length:
        row_T = torch.where(holds_T, row_T, rows)
    copy_rows(padded, row_T, values_TD)
    return padded[:rows].view(batch, length, width)


def jagged_to_padded_backward_reference(
    grad_BND: Tensor, offsets_O: Tensor, total_tokens: int, max_length: int, align: str
) -> Tensor:
    """Move the gradients of padded slots back to their tokens.

    Args:
        grad_BND: gradient of the padded batch, any strides.
        offsets_O: int32 or int64.
        total_tokens: number of tokens T.
        max_length: as in the forward.
        align: as in the forward.

    Returns:
        grad_TD; 0 for tokens that the padded batch does not hold.
    """
    batch, length, width = grad_BND.shape
    if batch * length == 0 or total_tokens == 0:
        return grad_BND.new_zeros((total_tokens, width))
    row_T, holds_T = padded_rows(offsets_O, total_tokens, length, align)
    grad_TD = grad_BND.reshape(batch * length, width).index_select(0, row_T)
    # Filling rather than multiplying: the row that a cut token reads may hold NaN.
    return grad_TD if max_length <= length else grad_TD.masked_fill_(~holds_T[:, None], 0)

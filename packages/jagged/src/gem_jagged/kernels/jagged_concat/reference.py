"""The mathematics of ``jagged_concat``, forward and backward, in plain torch.

With l_b and r_b the offsets of sequence b on the left and on the right, the result begins its
sequence b at l_b + r_b and holds there the left tokens, then the right ones. So token t of the left
moves on by r_b, token s of the right by l_{b+1}:

    lengths 2, 1 and 1, 2:   left  a a | b      right  x | y y      result  a a x | b y y

Backward takes the two parts out again. ``jagged_split`` is the same map read the other way.
"""

import torch
from torch import Tensor

from gem_jagged.movable import copy_rows
from gem_jagged.offsets import sequence_ids


def concat_rows(
    left_offsets_O: Tensor, right_offsets_O: Tensor, left_tokens: int, right_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return where each token of the two sides stands in the result.

    Args:
        left_offsets_O: int32 or int64.
        right_offsets_O: int32 or int64.
        left_tokens: tokens of the left.
        right_tokens: tokens of the right.

    Returns:
        left_row_T and right_row_S, int64.
    """
    left, right = left_offsets_O.to(torch.int64), right_offsets_O.to(torch.int64)
    left_ids = sequence_ids(left, left_tokens)
    right_ids = sequence_ids(right, right_tokens)
    left_rows = torch.arange(left_tokens, device=left.device) + right[:-1][left_ids]
    right_rows = torch.arange(right_tokens, device=right.device) + left[1:][right_ids]
    return left_rows, right_rows


def jagged_concat_reference(
    left_TD: Tensor, left_offsets_O: Tensor, right_SD: Tensor, right_offsets_O: Tensor
) -> Tensor:
    """Append to each sequence of the left that of the right.

    Args:
        left_TD: tokens, any dtype.
        left_offsets_O: int32 or int64.
        right_SD: tokens, of the same dtype.
        right_offsets_O: int32 or int64.

    Returns:
        the tokens of the result, T+S rows.
    """
    left_rows, right_rows = concat_rows(
        left_offsets_O, right_offsets_O, left_TD.shape[0], right_SD.shape[0]
    )
    values = left_TD.new_empty((left_TD.shape[0] + right_SD.shape[0], left_TD.shape[1]))
    copy_rows(values, left_rows, left_TD)
    return copy_rows(values, right_rows, right_SD)


def jagged_concat_backward_reference(
    grad_TD: Tensor, left_offsets_O: Tensor, right_offsets_O: Tensor, left_tokens: int
) -> tuple[Tensor, Tensor]:
    """Take the gradients of the two sides out of that of the result.

    Args:
        grad_TD: gradient of the result, any strides.
        left_offsets_O: int32 or int64.
        right_offsets_O: int32 or int64.
        left_tokens: tokens of the left.

    Returns:
        the gradients of left and right.
    """
    left_rows, right_rows = concat_rows(
        left_offsets_O, right_offsets_O, left_tokens, grad_TD.shape[0] - left_tokens
    )
    return grad_TD.index_select(0, left_rows), grad_TD.index_select(0, right_rows)

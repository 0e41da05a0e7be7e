"""The mathematics of ``jagged_split``, forward and backward, in plain torch.

Sequence b of the input holds the tokens of the left, then those of the right. With l_b and r_b the
offsets of the two sides, token t of the left stands at t + r_b, token s of the right at
s + l_{b+1}. Written out here rather than taken from ``jagged_concat``, of which it is the inverse,
so that each can be read and changed alone.
"""

import torch
from torch import Tensor

from gem_jagged.movable import copy_rows
from gem_jagged.offsets import sequence_ids


def split_rows(
    left_offsets_O: Tensor, right_offsets_O: Tensor, left_tokens: int, right_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return where each token of the two sides stands in the input.

    Args:
        left_offsets_O: int32 or int64.
        right_offsets_O: int32 or int64.
        left_tokens: tokens of the left.
        right_tokens: tokens of the right.

    Returns:
        left_row_T and right_row_S, int64.
    """
    left, right = left_offsets_O.to(torch.int64), right_offsets_O.to(torch.int64)
    left_rows = torch.arange(left_tokens, device=left.device)
    right_rows = torch.arange(right_tokens, device=right.device)
    left_rows += right[:-1][sequence_ids(left, left_tokens)]
    right_rows += left[1:][sequence_ids(right, right_tokens)]
    return left_rows, right_rows


def jagged_split_reference(
    values_TD: Tensor, left_offsets_O: Tensor, right_offsets_O: Tensor, left_tokens: int
) -> tuple[Tensor, Tensor]:
    """Cut each sequence into its left and its right part.

    Args:
        values_TD: tokens, any dtype.
        left_offsets_O: int32 or int64.
        right_offsets_O: int32 or int64.
        left_tokens: tokens of all left parts together.

    Returns:
        the tokens of the left and those of the right.
    """
    left_rows, right_rows = split_rows(
        left_offsets_O, right_offsets_O, left_tokens, values_TD.shape[0] - left_tokens
    )
    return values_TD.index_select(0, left_rows), values_TD.index_select(0, right_rows)


def jagged_split_backward_reference(
    grad_left_TD: Tensor, grad_right_SD: Tensor, left_offsets_O: Tensor, right_offsets_O: Tensor
) -> Tensor:
    """Put the gradients of the two parts back in their places.

    Args:
        grad_left_TD: gradient of the left part, any strides.
        grad_right_SD: gradient of the right part, any strides.
        left_offsets_O: int32 or int64.
        right_offsets_O: int32 or int64.

    Returns:
        the gradient of the input, T+S rows.
    """
    left_tokens, right_tokens = grad_left_TD.shape[0], grad_right_SD.shape[0]
    left_rows, right_rows = split_rows(left_offsets_O, right_offsets_O, left_tokens, right_tokens)
    grad = grad_left_TD.new_empty((left_tokens + right_tokens, grad_left_TD.shape[1]))
    copy_rows(grad, left_rows, grad_left_TD)
    return copy_rows(grad, right_rows, grad_right_SD)

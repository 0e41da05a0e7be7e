"""The mathematics of ``jagged_take_last``, forward and backward, in plain torch.

With o_b the offsets of the sequences, k_b those of what is kept, token s of the result, in sequence
b, is as far from the end of its sequence as it was before:

    out[s] = values[o_{b+1} - (k_{b+1} - s)]

Backward puts the gradients back; a token that was not kept gets 0.
"""

import torch
from torch import Tensor

from gem_jagged.movable import copy_rows
from gem_jagged.offsets import sequence_ids


def kept_rows(offsets_O: Tensor, kept_offsets_O: Tensor, kept_tokens: int) -> Tensor:
    """Return the token that each row of the result is.

    Args:
        offsets_O: int32 or int64.
        kept_offsets_O: int32 or int64.
        kept_tokens: rows of the result.

    Returns:
        row_S, int64.
    """
    ids = sequence_ids(kept_offsets_O, kept_tokens)
    shift = offsets_O[1:].to(torch.int64) - kept_offsets_O[1:].to(torch.int64)
    return torch.arange(kept_tokens, device=ids.device) + shift[ids]


def jagged_take_last_reference(
    values_TD: Tensor, offsets_O: Tensor, kept_offsets_O: Tensor, kept_tokens: int
) -> Tensor:
    """Keep the last tokens of each sequence.

    Args:
        values_TD: tokens, any dtype.
        offsets_O: int32 or int64.
        kept_offsets_O: where the kept tokens of each sequence begin, int32 or int64.
        kept_tokens: number of tokens kept.

    Returns:
        out_SD, in the dtype of the values.
    """
    return values_TD.index_select(0, kept_rows(offsets_O, kept_offsets_O, kept_tokens))


def jagged_take_last_backward_reference(
    grad_SD: Tensor, offsets_O: Tensor, kept_offsets_O: Tensor, total_tokens: int
) -> Tensor:
    """Give the kept tokens their gradient, the others 0.

    Args:
        grad_SD: gradient of the result, any strides.
        offsets_O: int32 or int64.
        kept_offsets_O: int32 or int64.
        total_tokens: number of tokens T.

    Returns:
        grad_TD, in the dtype of the gradient.
    """
    grad_TD = grad_SD.new_zeros((total_tokens, grad_SD.shape[1]))
    return copy_rows(grad_TD, kept_rows(offsets_O, kept_offsets_O, grad_SD.shape[0]), grad_SD)

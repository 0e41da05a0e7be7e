"""The mathematics of ``jagged_index_select``, forward and backward, in plain torch.

With i_j the chosen sequences, o the offsets of all and s those of the result, row r of the result,
in its sequence j, is

    out[r] = values[o_{i_j} + (r - s_j)]

A sequence may be chosen many times. Backward adds up the gradients of all its copies.
"""

import torch
from torch import Tensor

from gem_jagged.offsets import sequence_ids


def selected_rows(
    offsets_O: Tensor, indices_I: Tensor, selected_offsets_O: Tensor, selected_tokens: int
) -> Tensor:
    """Return the token that each row of the result is.

    Args:
        offsets_O: int32 or int64.
        indices_I: chosen sequences, int32 or int64.
        selected_offsets_O: offsets of the result, one more than there are indices.
        selected_tokens: rows of the result.

    Returns:
        row_S, int64.
    """
    ids = sequence_ids(selected_offsets_O, selected_tokens)
    begins = offsets_O.to(torch.int64)[indices_I.to(torch.int64)]
    shift = begins - selected_offsets_O[:-1].to(torch.int64)
    return torch.arange(selected_tokens, device=ids.device) + shift[ids]


def jagged_index_select_reference(
    values_TD: Tensor,
    offsets_O: Tensor,
    indices_I: Tensor,
    selected_offsets_O: Tensor,
    selected_tokens: int,
) -> Tensor:
    """Gather whole sequences.

    Args:
        values_TD: tokens, any dtype.
        offsets_O: int32 or int64.
        indices_I: chosen sequences, in [0, B).
        selected_offsets_O: offsets of the result.
        selected_tokens: rows of the result.

    Returns:
        out_SD, in the dtype of the values.
    """
    rows = selected_rows(offsets_O, indices_I, selected_offsets_O, selected_tokens)
    return values_TD.index_select(0, rows)


def jagged_index_select_backward_reference(
    grad_SD: Tensor,
    offsets_O: Tensor,
    indices_I: Tensor,
    selected_offsets_O: Tensor,
    total_tokens: int,
) -> Tensor:
    """Add up the gradients of the copies of each token, in fp32 or wider.

    Args:
        grad_SD: gradient of the result, any strides.
        offsets_O: int32 or int64.
        indices_I: chosen sequences.
        selected_offsets_O: offsets of the result.
        total_tokens: number of tokens T.

    Returns:
        grad_TD, in the dtype of the gradient.
    """
    dtype = torch.float64 if grad_SD.dtype == torch.float64 else torch.float32
    grad_TD = torch.zeros((total_tokens, grad_SD.shape[1]), dtype=dtype, device=grad_SD.device)
    rows = selected_rows(offsets_O, indices_I, selected_offsets_O, grad_SD.shape[0])
    return grad_TD.index_add_(0, rows, grad_SD.to(dtype)).to(grad_SD.dtype)

"""The mathematics of ``jagged_broadcast_add``, forward and backward, in plain torch.

    out[t] = values[t] + dense[b]        for every token t of sequence b

Backward passes the gradient of the output on to the values as it is, and to each row of ``dense``
the sum over its sequence: d out[t] / d dense[b] is 1 for the tokens of b and 0 for all others.
"""

import torch
from torch import Tensor

from gem_jagged.offsets import sequence_ids


def jagged_broadcast_add_reference(
    values_TD: Tensor, offsets_O: Tensor, dense_BD: Tensor
) -> Tensor:
    """Add to each token the row of its sequence.

    Args:
        values_TD: tokens, a floating dtype.
        offsets_O: int32 or int64.
        dense_BD: one row a sequence, same dtype.

    Returns:
        out_TD, in the dtype of the values.
    """
    return values_TD + dense_BD.index_select(0, sequence_ids(offsets_O, values_TD.shape[0]))


def jagged_broadcast_add_backward_reference(grad_TD: Tensor, offsets_O: Tensor) -> Tensor:
    """Sum the gradients of each sequence's tokens, in fp32 or wider.

    Args:
        grad_TD: gradient of the output, any strides.
        offsets_O: int32 or int64.

    Returns:
        grad_dense_BD, in the dtype of the gradient.
    """
    dtype = torch.float64 if grad_TD.dtype == torch.float64 else torch.float32
    sums = torch.zeros(
        (offsets_O.shape[0] - 1, grad_TD.shape[1]), dtype=dtype, device=grad_TD.device
    )
    sums.index_add_(0, sequence_ids(offsets_O, grad_TD.shape[0]), grad_TD.to(dtype))
    return sums.to(grad_TD.dtype)

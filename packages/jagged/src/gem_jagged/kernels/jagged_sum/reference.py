"""The mathematics of ``jagged_sum``, forward and backward, in plain torch.

    sum[b] = sum of values[t] over the tokens t of sequence b

so an empty sequence gives 0. Backward gives each token its sequence's gradient. Half precision is
summed in fp32.
"""

import torch
from torch import Tensor

from gem_jagged.offsets import sequence_ids


def jagged_sum_reference(values_TD: Tensor, offsets_O: Tensor) -> Tensor:
    """Sum the tokens of each sequence.

    Args:
        values_TD: tokens, a floating dtype.
        offsets_O: int32 or int64.

    Returns:
        sum_BD, in the dtype of the values.
    """
    dtype = torch.float64 if values_TD.dtype == torch.float64 else torch.float32
    sums = torch.zeros(
        (offsets_O.shape[0] - 1, values_TD.shape[1]), dtype=dtype, device=values_TD.device
    )
    # On a CPU the rows of a sequence are added in their order, so a sequence alone gives the same
    # bits as in a batch.
    sums.index_add_(0, sequence_ids(offsets_O, values_TD.shape[0]), values_TD.to(dtype))
    return sums.to(values_TD.dtype)


def jagged_sum_backward_reference(grad_BD: Tensor, offsets_O: Tensor, total_tokens: int) -> Tensor:
    """Give each token the gradient of its sequence's sum.

    Args:
        grad_BD: gradient of the sums, any strides.
        offsets_O: int32 or int64.
        total_tokens: number of tokens T.

    Returns:
        grad_TD, in the dtype of the gradient.
    """
    return grad_BD.index_select(0, sequence_ids(offsets_O, total_tokens))

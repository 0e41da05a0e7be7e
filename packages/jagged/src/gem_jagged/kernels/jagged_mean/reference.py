"""The mathematics of ``jagged_mean``, forward and backward, in plain torch.

    mean[b] = (sum of values[t] over the tokens t of sequence b) / max(L_b, 1)

so an empty sequence gives 0. Backward gives each token its sequence's gradient divided by the
length. Half precision is summed in fp32.
"""

import torch
from torch import Tensor

from gem_jagged.offsets import offsets_to_lengths, sequence_ids


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def jagged_mean_reference(values_TD: Tensor, offsets_O: Tensor) -> Tensor:
    """Average the tokens of each sequence.

    Args:
        values_TD: tokens, a floating dtype.
        offsets_O: int32 or int64.

    Returns:
        mean_BD, in the dtype of the values.
    """
    dtype = _sum_dtype(values_TD.dtype)
    ids = sequence_ids(offsets_O, values_TD.shape[0])
    sums = torch.zeros(
        (offsets_O.shape[0] - 1, values_TD.shape[1]), dtype=dtype, device=values_TD.device
    )
    # On a CPU the rows of a sequence are added in their order, so a sequence alone gives the same
    # bits as in a batch.
    sums.index_add_(0, ids, values_TD.to(dtype))
    counts = offsets_to_lengths(offsets_O).clamp(min=1).to(dtype)
    return (sums / counts[:, None]).to(values_TD.dtype)


def jagged_mean_backward_reference(grad_BD: Tensor, offsets_O: Tensor, total_tokens: int) -> Tensor:
    """Spread the gradient of each mean over the tokens of its sequence.

    Args:
        grad_BD: gradient of the means, any strides.
        offsets_O: int32 or int64.
        total_tokens: number of tokens T.

    Returns:
        grad_TD, in the dtype of the gradient.
    """
    dtype = _sum_dtype(grad_BD.dtype)
    counts = offsets_to_lengths(offsets_O).clamp(min=1).to(dtype)
    shares = (grad_BD.to(dtype) / counts[:, None]).to(grad_BD.dtype)
    return shares.index_select(0, sequence_ids(offsets_O, total_tokens))

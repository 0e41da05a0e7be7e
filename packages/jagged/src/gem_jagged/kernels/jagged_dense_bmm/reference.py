"""The mathematics of ``jagged_dense_bmm``, forward and backward, in plain torch.

Every sequence has a matrix of its own:

    out[t] = values[t] · dense[b] + bias[b]          for every token t of sequence b

With g the gradient of out, the product rule gives

    d values[t] = g[t] · dense[b]^T
    d dense[b]  = sum over the tokens t of b of  values[t]^T · g[t]
    d bias[b]   = sum over the tokens t of b of  g[t]

It is computed as one batched product over padded sequences; the zeros of the padding add nothing.
Half precision is multiplied and summed in fp32.
"""

import torch
from torch import Tensor

from gem_jagged.kernels.jagged_to_padded.reference import jagged_to_padded_reference
from gem_jagged.kernels.padded_to_jagged.reference import padded_to_jagged_reference


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def _padded(values_TD: Tensor, offsets_O: Tensor, max_length: int) -> Tensor:
    return jagged_to_padded_reference(
        _wide(values_TD), offsets_O, max_length, max_length, 0.0, "left"
    )


def jagged_dense_bmm_reference(
    values_TD: Tensor,
    offsets_O: Tensor,
    dense_BDF: Tensor,
    bias_BF: Tensor | None,
    max_length: int,
) -> Tensor:
    """Multiply the tokens of each sequence by its matrix.

    Args:
        values_TD: tokens, a floating dtype.
        offsets_O: int32 or int64.
        dense_BDF: one matrix a sequence.
        bias_BF: one row a sequence, or None.
        max_length: the longest length.

    Returns:
        out_TF, in the dtype of the values.
    """
    out_BNF = torch.bmm(_padded(values_TD, offsets_O, max_length), _wide(dense_BDF))
    if bias_BF is not None:
        out_BNF = out_BNF + _wide(bias_BF)[:, None, :]
    out_TF = padded_to_jagged_reference(out_BNF, offsets_O, values_TD.shape[0], "left")
    return out_TF.to(values_TD.dtype)


def jagged_dense_bmm_backward_reference(
    grad_TF: Tensor,
    values_TD: Tensor,
    offsets_O: Tensor,
    dense_BDF: Tensor,
    max_length: int,
    has_bias: bool,  # noqa: FBT001 - an op's schema has no keywords
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of tokens, matrices and bias.

    Args:
        grad_TF: gradient of the output, any strides.
        values_TD: as in the forward.
        offsets_O: int32 or int64.
        dense_BDF: as in the forward.
        max_length: the longest length.
        has_bias: whether there was a bias.

    Returns:
        grad_values_TD, grad_dense_BDF and grad_bias_BF, in the dtype of the values; the last has
        no rows where there was no bias.
    """
    dtype = values_TD.dtype
    grad_BNF = _padded(grad_TF, offsets_O, max_length)
    grad_BND = torch.bmm(grad_BNF, _wide(dense_BDF).transpose(1, 2))
    grad_TD = padded_to_jagged_reference(grad_BND, offsets_O, values_TD.shape[0], "left")
    padded_BND = _padded(values_TD, offsets_O, max_length)
    grad_BDF = torch.bmm(padded_BND.transpose(1, 2), grad_BNF)
    bias = grad_BNF.sum(1) if has_bias else grad_BNF.new_empty((0, grad_TF.shape[1]))
    return grad_TD.to(dtype), grad_BDF.to(dtype), bias.to(dtype)

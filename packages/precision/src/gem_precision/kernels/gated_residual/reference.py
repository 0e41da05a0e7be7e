"""The mathematics of ``gated_residual`` in plain torch.

    y[t] = x[t] + gate[b(t)] * out[t]

with b(t) the sequence of token t. With g the gradient of y

    dx = g      dout[t] = gate[b(t)] * g[t]      dgate[b] = Σ g[t] * out[t] over the tokens of b

Source: InterFormer (arXiv:2411.09852), whose gate of the events this is.
"""

import torch
from torch import Tensor


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic: fp64 where any tensor is, else fp32."""
    wide = any(t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def gated_residual_reference(
    x_TD: Tensor, out_TD: Tensor, gate_BD: Tensor, offsets_O: Tensor
) -> Tensor:
    """Add what is gated by sequence.

    Args:
        x_TD: tokens.
        out_TD: what is added to them.
        gate_BD: a factor for each column of each sequence.
        offsets_O: where sequences begin; the last is T.

    Returns:
        y_TD in the dtype of x.
    """
    wide = wide_dtype(x_TD, out_TD, gate_BD)
    gate_TD = _by_token(gate_BD, offsets_O, len(x_TD))
    return (x_TD.to(wide) + gate_TD.to(wide) * out_TD.to(wide)).to(x_TD.dtype)


def gated_residual_backward_reference(
    grad_TD: Tensor, out_TD: Tensor, gate_BD: Tensor, offsets_O: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``out`` and of the gate; that of x is the one that comes in.

    Args:
        grad_TD: of y.
        out_TD: as in the forward.
        gate_BD: as in the forward.
        offsets_O: as in the forward.

    Returns:
        grad_out_TD and grad_gate_BD, in the dtypes of what they belong to.
    """
    wide = wide_dtype(grad_TD, out_TD, gate_BD)
    grad_TD = grad_TD.to(wide)
    gate_TD = _by_token(gate_BD, offsets_O, len(out_TD))
    sums = torch.zeros(gate_BD.shape, dtype=wide, device=gate_BD.device)
    sums.index_add_(0, _sequences(offsets_O, len(out_TD)), grad_TD * out_TD.to(wide))
    return (gate_TD.to(wide) * grad_TD).to(out_TD.dtype), sums.to(gate_BD.dtype)


def _sequences(offsets_O: Tensor, tokens: int) -> Tensor:
    places = torch.arange(tokens, device=offsets_O.device)
    return torch.searchsorted(offsets_O[1:].to(torch.int64), places, right=True)


def _by_token(rows_BD: Tensor, offsets_O: Tensor, tokens: int) -> Tensor:
    return rows_BD.index_select(0, _sequences(offsets_O, tokens))

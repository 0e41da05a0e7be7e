"""The mathematics of ``normed_linear`` in plain torch.

For tokens x of width D, weights W (F, D), and G = W · gain, a gain a column:

    n = (x − m) r      m = mean(x), or 0      r = (mean((x − m)²) + ε)^(-1/2)
    y = n Gᵀ

Neither m nor r depends on the column, so the norm need not be known before the product:

    y = r (x Gᵀ − m c)      c[f] = Σ_d G[f, d]

The kernel gathers both sums over the tiles of x that the product reads, and applies them to the
result. For the backward, with u = dy G the gradient of n and N = dyᵀ n:

    dx = r (u − mean(u) − n mean(u n))      dW = N · gain      dgain[d] = Σ_f N[f, d] W[f, d]

where mean(u) is left out with m.

Computes in fp32, or fp64 for fp64, and rounds once.

Source: Meta's article on norm fusion (lazy pre-norm).
"""

import torch
from torch import Tensor


def normed_linear_reference(
    x_TD: Tensor, weight_FD: Tensor, gain_D: Tensor | None, *, centred: bool, eps: float
) -> Tensor:
    """Return y_TF in the dtype of x; arguments as in the operator."""
    _, n, gained = _normalised(x_TD, weight_FD, gain_D, centred=centred, eps=eps)
    return (n @ gained.T).to(x_TD.dtype)


def normed_linear_backward_reference(
    grad_TF: Tensor,
    x_TD: Tensor,
    weight_FD: Tensor,
    gain_D: Tensor | None,
    *,
    centred: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the weights and of the gain, the last empty without one."""
    r, n, gained = _normalised(x_TD, weight_FD, gain_D, centred=centred, eps=eps)
    grad = grad_TF.to(n.dtype)
    u = grad @ gained
    grad_x = u - n * (u * n).mean(-1, keepdim=True)
    if centred:
        grad_x = grad_x - u.mean(-1, keepdim=True)
    grad_gained = grad.T @ n
    grad_weight, grad_gain = split_by_gain(grad_gained, weight_FD, gain_D)
    return (grad_x * r).to(x_TD.dtype), grad_weight, grad_gain


def split_by_gain(
    grad_FD: Tensor, weight_FD: Tensor, gain_D: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weights and gain from that of their product.

    Args:
        grad_FD: gradient of weight · gain.
        weight_FD: weights.
        gain_D: a gain for each column, or None.

    Returns:
        both in the dtype of what they are the gradients of; the second is empty without a gain.
    """
    if gain_D is None:
        return grad_FD.to(weight_FD.dtype), weight_FD.new_empty(0)
    grad_gain = (grad_FD * weight_FD.to(grad_FD.dtype)).sum(0)
    return (grad_FD * gain_D.to(grad_FD.dtype)).to(weight_FD.dtype), grad_gain.to(gain_D.dtype)


def _normalised(
    x_TD: Tensor, weight_FD: Tensor, gain_D: Tensor | None, *, centred: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return r, n and the weights with their gain, wide."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    x, gained = x_TD.to(wide), weight_FD.to(wide)
    if gain_D is not None:
        gained = gained * gain_D.to(wide)
    if centred:
        x = x - x.mean(-1, keepdim=True)
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return r, x * r, gained

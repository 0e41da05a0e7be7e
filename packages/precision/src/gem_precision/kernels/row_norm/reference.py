"""The mathematics of ``row_norm`` in plain torch.

With a = x + before, over a row of D elements,

    n = (a − m) r      m = mean(a), or 0      r = (mean((a − m)²) + ε)^(-1/2)
    g = n · gain
    y = g + after, or a σ(g) + after

For the backward let u be the gradient of g: dy, or dy a σ(g) (1 − σ(g)). Then

    dgain = Σ_rows u n          w = u · gain
    da    = r (w − mean(w) − n mean(w n))   [+ dy σ(g)]

where mean(w) is left out with m. da is the gradient of x and of ``before``, dy that of ``after``.
The statistics are computed again from a rather than kept: a is read anyway.

Source: Zhang and Sennrich 2019 (arXiv:1910.07467) and Ba et al. 2016 (arXiv:1607.06450).
"""

from functools import reduce

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what sums are formed in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def dtype_of(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype that holds all of some tensors."""
    given = [tensor.dtype for tensor in tensors if tensor is not None]
    return reduce(torch.promote_types, given)


def _normalised(
    x: Tensor, before: Tensor | None, *, centred: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a, n and r, wide."""
    a = x.to(wide_dtype(x.dtype))
    if before is not None:
        a = a + before
    around = a - a.mean(dim=-1, keepdim=True) if centred else a
    # Of no elements there is no mean, and nothing to divide.
    r = torch.rsqrt(around.square().sum(dim=-1, keepdim=True) / max(1, x.shape[-1]) + eps)
    return a, around * r, r


def row_norm_reference(
    x: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    gain_D: Tensor | None,
    *,
    centred: bool,
    swish: bool,
    eps: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return y; arguments as in the operator."""
    a, n, _ = _normalised(x, before, centred=centred, eps=eps)
    g = n if gain_D is None else n * gain_D
    y = a * torch.sigmoid(g) if swish else g
    return (y if after is None else y + after).to(out_dtype)


def row_norm_backward_reference(
    grad: Tensor,
    x: Tensor,
    before: Tensor | None,
    gain_D: Tensor | None,
    *,
    centred: bool,
    swish: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x + before, in the dtype of their sum, and that of the gain.

    The second is empty where there is no gain.
    """
    a, n, r = _normalised(x, before, centred=centred, eps=eps)
    u, direct = grad.to(a.dtype), None
    if swish:
        gate = torch.sigmoid(n if gain_D is None else n * gain_D)
        u, direct = u * a * gate * (1 - gate), u * gate
    grad_gain = n.new_empty(0)
    w = u
    if gain_D is not None:
        grad_gain = (u * n).flatten(0, -2).sum(dim=0).to(gain_D.dtype)
        w = u * gain_D
    width = max(1, x.shape[-1])
    grad_a = w - n * ((w * n).sum(dim=-1, keepdim=True) / width)
    if centred:
        grad_a = grad_a - w.sum(dim=-1, keepdim=True) / width
    grad_a = grad_a * r
    return (grad_a if direct is None else grad_a + direct).to(dtype_of(x, before)), grad_gain

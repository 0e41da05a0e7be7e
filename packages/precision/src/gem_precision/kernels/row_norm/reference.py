"""The mathematics of ``row_norm`` in plain torch.

With a = x + before, over a row of D elements,

    n = (a − m) r      m = mean(a), or 0      r = (mean((a − m)²) + ε)^(-1/2)
    g = n · gain
    y = δ g + after, or δ a σ(g) + after

where δ is 1, or with dropout 0 for a share p of the elements and 1/(1 − p) for the others. For the
backward let v = δ dy, and u the gradient of g: v, or v a σ(g) (1 − σ(g)). Then

    dgain = Σ_rows u n          w = u · gain
    da    = r (w − mean(w) − n mean(w n))   [+ v σ(g)]

where mean(w) is left out with m. da is the gradient of x and of ``before``, dy that of ``after``.
The statistics are computed again from a rather than kept: a is read anyway.

Source: Zhang and Sennrich 2019 (arXiv:1910.07467) and Ba et al. 2016 (arXiv:1607.06450).
"""

from functools import reduce

import torch
from torch import Tensor

from gem_opkit.stochastic import philox_words


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what sums are formed in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def dtype_of(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype that holds all of some tensors."""
    given = [tensor.dtype for tensor in tensors if tensor is not None]
    return reduce(torch.promote_types, given)


def dropped_words(dropout: float) -> int:
    """Return how many of the 2³² random words set an element to 0.

    Args:
        dropout: share of the elements, in [0, 1).
    """
    return min(round(dropout * 2**32), 2**32 - 1)


def _kept(like: Tensor, dropout: float, seed: int) -> Tensor | None:
    """Return 1/(1 − p) where an element is kept and 0 where it is not; None without dropout.

    The word of an element is one of four that Philox makes of its row, counted over all dims but
    the last, and of its column divided by four.
    """
    if dropped_words(dropout) == 0:
        return None
    width = like.shape[-1]
    row = torch.arange(like.numel() // max(1, width), device=like.device)[:, None]
    column = torch.arange(-(-width // 4), device=like.device)
    words = philox_words(seed, row, row >> 32, column, torch.zeros_like(row))
    word = torch.stack(words, dim=-1).flatten(-2)[:, :width]
    kept = (word >= dropped_words(dropout)).to(like.dtype) / (1.0 - dropout)
    return kept.view(like.shape)


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


def row_norm_reference(  # noqa: PLR0913 - the arguments of the operator
    x: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    gain_D: Tensor | None,
    *,
    centred: bool,
    swish: bool,
    eps: float,
    out_dtype: torch.dtype,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Return y; arguments as in the operator."""
    a, n, _ = _normalised(x, before, centred=centred, eps=eps)
    g = n if gain_D is None else n * gain_D
    y = a * torch.sigmoid(g) if swish else g
    kept = _kept(y, dropout, seed)
    y = y if kept is None else y * kept
    return (y if after is None else y + after).to(out_dtype)


def row_norm_backward_reference(  # noqa: PLR0913 - the arguments of the operator
    grad: Tensor,
    x: Tensor,
    before: Tensor | None,
    gain_D: Tensor | None,
    added: Tensor | None = None,
    *,
    centred: bool,
    swish: bool,
    eps: float,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x + before, in the dtype of their sum, and that of the gain.

    ``added`` is another gradient of x + before, added before rounding. The second is empty where
    there is no gain.
    """
    a, n, r = _normalised(x, before, centred=centred, eps=eps)
    u, direct = grad.to(a.dtype), None
    kept = _kept(u, dropout, seed)
    u = u if kept is None else u * kept
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
    for more in (direct, added):
        grad_a = grad_a if more is None else grad_a + more
    return grad_a.to(dtype_of(x, before)), grad_gain

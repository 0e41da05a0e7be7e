"""The mathematics of ``rotary_heads`` in plain torch.

Heads of one projection lie side by side: queries, keys, values. Of a query or key x of K elements

    n = x r                                    r = (mean(x²) + ε)^(-1/2), or 1
    (y[2f], y[2f+1]) = (n[2f] c − n[2f+1] s,  n[2f] s + n[2f+1] c)

with c and s cosine and sine of the angle

    position · rates[0, f] + ln(1 + gap / time_scale) · rates[1, f]

A rotation is orthogonal, so its backward turns by the opposite angle: with g that of dy,

    dx = r (g − n mean(g n))

Source: Su et al. 2021 (arXiv:2104.09864); Zhang and Sennrich 2019 (arXiv:1910.07467).
"""

import torch
from torch import Tensor


def _turn_of(
    position_T: Tensor | None, gap_T: Tensor | None, rates: Tensor, time_scale_s: float
) -> tuple[Tensor, Tensor] | None:
    """Return cosine and sine of each token's angles, (T, 1, K/2) each."""
    if position_T is None:
        return None
    angle = position_T.to(rates.dtype)[:, None] * rates[0]
    if gap_T is not None:
        log_gap = torch.log1p(gap_T.to(rates.dtype) / time_scale_s)
        angle = angle + log_gap[:, None] * rates[1]
    return angle.cos()[:, None], angle.sin()[:, None]


def _turned(x: Tensor, turn: tuple[Tensor, Tensor] | None, *, back: bool = False) -> Tensor:
    if turn is None:
        return x
    cos, sin = turn
    sin = -sin if back else sin
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def _normalised(x: Tensor, eps: float, *, normed: bool) -> tuple[Tensor, Tensor | None]:
    if not normed:
        return x, None
    r = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return x * r, r


def rotary_heads_reference(  # noqa: PLR0913 - the arguments of the operator
    qkv: Tensor,
    position_T: Tensor | None,
    gap_T: Tensor | None,
    rates: Tensor,
    heads: int,
    key_heads: int,
    *,
    normed: bool,
    copies_values: bool,
    time_scale_s: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values; arguments as in the operator.

    Values that are not copied are those of no token.
    """
    both = heads + key_heads
    turn = _turn_of(position_T, gap_T, rates, time_scale_s)
    n, _ = _normalised(qkv[:, :both].to(rates.dtype), eps, normed=normed)
    y = _turned(n, turn).to(qkv.dtype)
    # Copies, for an operator's results share no memory with each other or with its inputs.
    values = qkv if copies_values else qkv[:0]
    parts = (y[:, :heads], y[:, heads:], values[:, both:])
    q, k, v = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return q, k, v


def rotary_heads_backward_reference(  # noqa: PLR0913 - the arguments of the operator
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    position_T: Tensor | None,
    gap_T: Tensor | None,
    rates: Tensor,
    *,
    normed: bool,
    time_scale_s: float,
    eps: float,
) -> Tensor:
    """Return the gradient of all heads of the projection."""
    turn = _turn_of(position_T, gap_T, rates, time_scale_s)
    g = torch.cat([grad_q, grad_k], dim=1).to(rates.dtype)
    g = _turned(g, turn, back=True)
    n, r = _normalised(qkv[:, : g.shape[1]].to(rates.dtype), eps, normed=normed)
    if r is not None:
        g = (g - n * (g * n).mean(dim=-1, keepdim=True)) * r
    return torch.cat([g.to(qkv.dtype), grad_v], dim=1)

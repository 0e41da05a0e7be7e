"""The mathematics of ``adam_update`` in plain torch, tensor by tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor


def adam_update_reference(  # noqa: PLR0913 - the operator's own arguments
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor],
    factor: Tensor | None,
    rates: Sequence[float],
    decays: Sequence[float],
    *,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Move the weights in place.

        g = factor · gradient
        w ← w · (1 − rate · decay)
        m ← β₁ m + (1 − β₁) g       s ← β₂ s + (1 − β₂) g²
        w ← w − rate / (1 − β₁ᵗ) · m / (sqrt(s) / sqrt(1 − β₂ᵗ) + ε)

    Args:
        weights: fp32 or fp64, any shapes.
        gradients: one for each, of its shape, in any floating dtype.
        means: m.
        squares: s.
        steps: t, one scalar for each weight, counted from 1.
        copies: one for each weight, set to it rounded; or none at all.
        factor: scalar, or None for 1.
        rates: one for each weight.
        decays: one for each weight.
        beta1: β₁.
        beta2: β₂.
        eps: ε.

    Source: Kingma and Ba 2015 (arXiv:1412.6980); Loshchilov and Hutter 2019 (arXiv:1711.05101)
        for the decay.
    """
    for i, weight in enumerate(weights):
        gradient = gradients[i].to(weight.dtype)
        gradient = gradient if factor is None else gradient * factor
        step = steps[i].double()
        step_size = rates[i] / (1.0 - beta1**step)
        root = torch.sqrt(1.0 - beta2**step)
        weight.mul_(1.0 - rates[i] * decays[i])
        means[i].mul_(beta1).add_(gradient, alpha=1.0 - beta1)
        squares[i].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        below = squares[i].sqrt().div_(root.to(weight.dtype)).add_(eps)
        weight.sub_(means[i] / below * step_size.to(weight.dtype))
        if copies:
            copies[i].copy_(weight)

"""A projection of a tensor that is also passed on, whose gradients add up inside of a product.

What several operators read has a gradient from each, and autograd adds them in a pass of their own.
A product can add to what it finds: the one that writes the gradient of the projection's input
adds itself to the gradient that came back from everywhere else. For bf16 on a GPU; other tensors
keep the plain operators, and so the bits that they have had.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gem_precision.layers import Projection


class _ProjectionBesideInput(torch.autograd.Function):
    """x Wᵀ, and x; the gradient of x is that of the second plus grad W, in one product."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_TD, weight)
        ctx.set_materialize_grads(False)
        return F.linear(x_TD, weight), x_TD

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's own type
        ctx: Any, grad_y: Tensor | None, others: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight = ctx.saved_tensors
        if grad_y is None:
            return others, None
        own, given = ctx.needs_input_grad
        grad_weight = grad_y.t() @ x_TD if given else None
        if not own:
            return None, grad_weight
        if others is None:
            return grad_y @ weight, grad_weight
        # Written over: whoever made it has given it away.
        return torch.addmm(others, grad_y, weight, out=others), grad_weight


def project_beside(projection: Projection, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Project rows that are also passed on.

    Args:
        projection: the linear map.
        x_TD: rows.

    Returns:
        the projection of x, and x for one other use of it. The gradient that comes back from there
        is written over, so that it must be a tensor of that operator's own: one that hands the
        gradient of its output on to several inputs, as ``+`` does, must not be the only use.

    Raises:
        ShapeError: the rows have another width.

    Numerics: the sum of the gradients of x is rounded once, where autograd rounds that of the
        product first.
    """
    if _adds_inside(projection, x_TD):
        return _ProjectionBesideInput.apply(x_TD, projection.weight)
    return projection(x_TD), x_TD


def _adds_inside(projection: Projection, x_TD: Tensor) -> bool:
    plain = all(type(own) in (Tensor, nn.Parameter) for own in (x_TD, projection.weight))
    halves = x_TD.dtype == projection.weight.dtype == torch.bfloat16
    fits = x_TD.ndim == 2 and x_TD.shape[-1] == projection.in_features
    own = projection.formats is None and not torch.compiler.is_compiling()
    return x_TD.is_cuda and plain and halves and fits and own

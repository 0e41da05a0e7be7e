"""What an expert reads, and its pair products, with gradients that are added up where they arise.

A tensor that several products read has a gradient from each, and autograd adds them in passes of
their own. The functions here give such a tensor on (``beside``), so that its other gradients come
back to them and are added by the product or the copy that writes its own. For bf16 on a GPU; other
tensors keep the plain operators, and so the bits that they have had.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem.model.joins import wide_copy


class _PairProducts(torch.autograd.Function):
    """(X Xᵀ) Y of each example, by way of all pairs of its tokens, and X.

    Of N tokens as wide as D the pairs are N² numbers, and Xᵀ Y would be D · rank of them. Every
    product that reads X reads it once and writes something small, or the gradient of X; that is one
    product with dG + dGᵀ, where autograd would add up two, one of them transposed.
    """

    @staticmethod
    def forward(ctx: Any, x_BND: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.bmm(x_BND, x_BND.transpose(1, 2))  # (B, N, N)
        ctx.save_for_backward(x_BND, y, pairs)
        ctx.set_materialize_grads(False)
        return torch.bmm(pairs, y), x_BND

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's own type
        ctx: Any, grad: Tensor | None, others: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        x_BND, y, pairs = ctx.saved_tensors
        if grad is None:
            return others, None
        grad_pairs = torch.bmm(grad, y.transpose(1, 2))
        # The pairs are symmetric.
        both, grad_y = grad_pairs + grad_pairs.transpose(1, 2), torch.bmm(pairs, grad)
        if others is None:
            return torch.bmm(both, x_BND), grad_y
        # Written over: a product of its own made it, and nobody else has it.
        return torch.baddbmm(others, both, x_BND, out=others), grad_y


def pair_products_beside(x_BND: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply pairs of tokens, compressed: X Xᵀ Y of each example, by way of all pairs.

    Args:
        x_BND: tokens X.
        y: Y, (B, N, rank).

    Returns:
        (B, N, rank), and X for one other use of it, by a product: the gradient that comes back
        from there is written over.

    Numerics: the sum of the gradients of X is rounded once.
    """
    return _PairProducts.apply(x_BND, y)


class _Inputs(torch.autograd.Function):
    """What each expert reads: a part of the tokens, and the summaries; and the tokens."""

    @staticmethod
    def forward(
        ctx: Any, x_BND: Tensor, summary_BPD: Tensor, parts: Sequence[slice]
    ) -> tuple[Tensor, ...]:
        ctx.parts = parts
        given = []
        for part in parts:
            tokens = x_BND[:, part]
            count, more = tokens.shape[1], summary_BPD.shape[1]
            own = x_BND.new_empty(x_BND.shape[0], count + more, x_BND.shape[2])
            wide_copy(own[:, :count], tokens)
            wide_copy(own[:, count:], summary_BPD)
            given.append(own)
        return (*given, x_BND)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's own type
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        *own, others = grads
        grad_x, summaries = torch.empty_like(others), []
        for part, grad in zip(ctx.parts, own, strict=True):
            place = grad_x[:, part]
            tokens = place.shape[1]
            torch.add(grad[:, :tokens], others[:, part], out=place)
            summaries.append(grad[:, tokens:])
        return grad_x, reduce(torch.add, summaries), None


def inputs_beside(
    x_BND: Tensor, summary_BPD: Tensor, parts: Sequence[slice]
) -> tuple[list[Tensor], Tensor]:
    """Give each expert its part of the tokens, beside the summaries.

    Args:
        x_BND: the layer's tokens.
        summary_BPD: pooled tokens of all streams.
        parts: of the tokens; each token is in exactly one.

    Returns:
        one tensor for each part, and the tokens for all other uses of them.

    Cost: the gradient of the tokens is written once; autograd would fill a tensor of zeros for
        each part and add them up.
    """
    *given, beside = _Inputs.apply(x_BND, summary_BPD, parts)
    return given, beside

"""Tensors put side by side, with parts and gradients that are copied in wide elements.

torch copies a part of a bf16 tensor, whose rows do not follow one another, two bytes at a time;
that takes more than twice as long as the bytes do. Here such parts are viewed as elements of eight
bytes: for bf16 on a GPU, outside of ``torch.compile``. Other tensors keep torch's own operators.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def in_halves(*tensors: Tensor) -> bool:
    """Tell whether tensors take the operators of this module and of `gem.model.expert_gradients`.

    Args:
        tensors: what would be read.

    Returns:
        whether all are bf16 on a GPU, outside of ``torch.compile``.
    """
    same = all(own.is_cuda and own.dtype == torch.bfloat16 for own in tensors)
    return same and not torch.compiler.is_compiling()


def wide_copy(out: Tensor, given: Tensor) -> None:
    """Copy in elements of eight bytes, where both tensors have such.

    Args:
        out: written; may be a part of a larger tensor.
        given: of the same shape and dtype.
    """
    if _is_wide(out) and _is_wide(given):
        out, given = out.view(torch.int64), given.view(torch.int64)
    out.copy_(given)


def _is_wide(tensor: Tensor) -> bool:
    """Whether rows of the last dim begin and end at multiples of eight bytes."""
    size = tensor.element_size()
    if tensor.ndim == 0 or tensor.stride(-1) != 1:
        return False
    places = (tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1])
    return all(place * size % 8 == 0 for place in places)


class _Join(torch.autograd.Function):
    """torch.cat, with gradients that lie in memory of their own."""

    @staticmethod
    def forward(ctx: Any, dim: int, *parts: Tensor) -> Tensor:
        ctx.dim, ctx.sizes = dim, [part.shape[dim] for part in parts]
        return torch.cat(parts, dim=dim)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's own type
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = []
        pieces = grad.split(ctx.sizes, dim=ctx.dim)
        for needed, piece in zip(ctx.needs_input_grad[1:], pieces, strict=True):
            own = None
            if needed:
                own = torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
                wide_copy(own, piece)
            found.append(own)
        return None, *found


def join(parts: Sequence[Tensor], *, dim: int) -> Tensor:
    """Put tensors side by side, as ``torch.cat`` does.

    Args:
        parts: at least one.
        dim: along which.

    Returns:
        them as one; the only one itself. On a GPU under autocast in the format that a product would
        read it in, so that one part in fp32 does not widen all the others.
    """
    if parts[0].is_cuda and torch.is_autocast_enabled("cuda"):
        parts = [part.to(torch.get_autocast_dtype("cuda")) for part in parts]
    if len(parts) == 1:
        return parts[0]
    return _Join.apply(dim, *parts) if in_halves(*parts) else torch.cat(list(parts), dim=dim)

"""The operator ``padded_to_jagged``: schema, kernels, fake, autograd, FLOP formula, function."""

from typing import Any, Literal

import torch
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.checks import (
    check_align,
    check_device,
    check_is_layout,
    merge_trailing,
    split_trailing,
)
from gem_jagged.kernels.padded_to_jagged.cost import (
    padded_to_jagged_backward_cost,
    padded_to_jagged_cost,
)
from gem_jagged.kernels.padded_to_jagged.reference import (
    padded_to_jagged_backward_reference,
    padded_to_jagged_reference,
)
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ShapeError, refusal
from gem_opkit.impl import Impl, resolve_impl

_NAME = "padded_to_jagged"
_HAS_TRITON = True


@torch.library.custom_op("gem_jagged::padded_to_jagged", mutates_args=())
def _forward(
    padded_BND: Tensor, offsets_O: Tensor, total_tokens: int, align: str, impl: str
) -> Tensor:
    if resolve_impl(impl, padded_BND.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.padded_to_jagged.kernel import launch_forward

        return launch_forward(padded_BND, offsets_O, total_tokens, align)
    return padded_to_jagged_reference(padded_BND, offsets_O, total_tokens, align)


@_forward.register_fake
def _(padded_BND: Tensor, offsets_O: Tensor, total_tokens: int, align: str, impl: str) -> Tensor:
    return padded_BND.new_empty((total_tokens, padded_BND.shape[2]))


@torch.library.custom_op("gem_jagged::padded_to_jagged_backward", mutates_args=())
def _backward(grad_TD: Tensor, offsets_O: Tensor, length: int, align: str, impl: str) -> Tensor:
    if resolve_impl(impl, grad_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.padded_to_jagged.kernel import launch_backward

        return launch_backward(grad_TD, offsets_O, length, align)
    return padded_to_jagged_backward_reference(grad_TD, offsets_O, length, align)


@_backward.register_fake
def _(grad_TD: Tensor, offsets_O: Tensor, length: int, align: str, impl: str) -> Tensor:
    return grad_TD.new_empty((offsets_O.shape[0] - 1, length, grad_TD.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    padded_BND, offsets_O, _, align, impl = inputs
    ctx.save_for_backward(offsets_O)
    ctx.length, ctx.align, ctx.impl = padded_BND.shape[1], align, impl


def _differentiate(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    (offsets_O,) = ctx.saved_tensors
    grad_BND = torch.ops.gem_jagged.padded_to_jagged_backward(
        grad_TD, offsets_O, ctx.length, ctx.align, ctx.impl
    )
    return grad_BND, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _forward_cost(padded_BND: Tensor, offsets_O: Tensor, total_tokens: int, *_: Any) -> Cost:
    return padded_to_jagged_cost(
        total_tokens=total_tokens,
        width=padded_BND.shape[2],
        element_bytes=padded_BND.element_size(),
    )


def _backward_cost(grad_TD: Tensor, offsets_O: Tensor, length: int, *_: Any) -> Cost:
    return padded_to_jagged_backward_cost(
        batch=offsets_O.shape[0] - 1,
        total_tokens=grad_TD.shape[0],
        length=length,
        width=grad_TD.shape[1],
        element_bytes=grad_TD.element_size(),
    )


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def padded_to_jagged(
    padded_BND: Tensor,
    layout: Layout,
    *,
    align: Literal["left", "right"] = "left",
    impl: Impl = "auto",
) -> Tensor:
    """Pack the tokens of a padded batch, dropping the padding.

        values[o_b + i] = padded[b, i]   for every token i of sequence b

    Args:
        padded_BND: padded batch, any dtype; also (B, N) or (B, N, H, K).
        layout: where the sequences begin in the result; none may be longer than N.
        align: the side of the row on which the tokens stand.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        values_TD in the dtype of the padded batch; (T,) or (T, H, K) for the other two forms.

    Raises:
        ShapeError: another batch than the layout has, or a sequence longer than N.
        DeviceError: offsets on another device than the padded batch.
        UnsupportedError: an ``align`` or ``impl`` that does not exist or cannot run here.

    Numerics: moves values without rounding; the gradient of padding is 0.
    Cost: no FLOPs; reads and writes T·D elements.
    Source: the inverse of ``jagged_to_padded``.
    """
    rows_BND = merge_trailing(_NAME, padded_BND, name="padded_BND", leading=2)
    check_is_layout(_NAME, layout, name="layout")
    check_shapes(_NAME, padded_BND=rows_BND, offsets_O=layout.offsets_O)
    check_device(_NAME, rows_BND, layout, name="padded_BND", layout_name="layout")
    check_align(_NAME, align)
    if layout.max_length > rows_BND.shape[1]:
        raise ShapeError(
            refusal(
                _NAME,
                "padded_BND",
                must=f"have N of at least {layout.max_length}, the longest length of layout",
                got=rows_BND.shape[1],
                fix="pass the layout of the tokens that the padded batch holds",
            )
        )
    check_autograd(_NAME, padded_BND=padded_BND)
    chosen = resolve_impl(impl, rows_BND.device, _NAME, has_triton=_HAS_TRITON)
    values_TD = torch.ops.gem_jagged.padded_to_jagged(
        rows_BND, layout.offsets_O, layout.total_tokens, align, chosen
    )
    return split_trailing(values_TD, padded_BND, leading=2)

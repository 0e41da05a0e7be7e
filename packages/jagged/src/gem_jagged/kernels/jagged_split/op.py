"""The operator ``jagged_split``: schema, kernels, fake, autograd, FLOP formula, function."""

from typing import Any

import torch
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.checks import check_device, check_is_layout, merge_trailing, split_trailing
from gem_jagged.kernels.jagged_split.cost import jagged_split_cost
from gem_jagged.kernels.jagged_split.reference import (
    jagged_split_backward_reference,
    jagged_split_reference,
)
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ShapeError
from gem_opkit.impl import Impl, resolve_impl

_NAME = "jagged_split"
_HAS_TRITON = True


@torch.library.custom_op("gem_jagged::jagged_split", mutates_args=())
def _forward(
    values_TD: Tensor, left_offsets_O: Tensor, right_offsets_O: Tensor, left_tokens: int, impl: str
) -> tuple[Tensor, Tensor]:
    if resolve_impl(impl, values_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.jagged_split.kernel import launch_forward

        return launch_forward(values_TD, left_offsets_O, right_offsets_O, left_tokens)
    return jagged_split_reference(values_TD, left_offsets_O, right_offsets_O, left_tokens)


@_forward.register_fake
def _(
    values_TD: Tensor, left_offsets_O: Tensor, right_offsets_O: Tensor, left_tokens: int, impl: str
) -> tuple[Tensor, Tensor]:
    width = values_TD.shape[1]
    return (
        values_TD.new_empty((left_tokens, width)),
        values_TD.new_empty((values_TD.shape[0] - left_tokens, width)),
    )


@torch.library.custom_op("gem_jagged::jagged_split_backward", mutates_args=())
def _backward(
    grad_left_TD: Tensor,
    grad_right_SD: Tensor,
    left_offsets_O: Tensor,
    right_offsets_O: Tensor,
    impl: str,
) -> Tensor:
    if resolve_impl(impl, grad_left_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.jagged_split.kernel import launch_backward

        return launch_backward(grad_left_TD, grad_right_SD, left_offsets_O, right_offsets_O)
    return jagged_split_backward_reference(
        grad_left_TD, grad_right_SD, left_offsets_O, right_offsets_O
    )


@_backward.register_fake
def _(
    grad_left_TD: Tensor,
    grad_right_SD: Tensor,
    left_offsets_O: Tensor,
    right_offsets_O: Tensor,
    impl: str,
) -> Tensor:
    rows = grad_left_TD.shape[0] + grad_right_SD.shape[0]
    return grad_left_TD.new_empty((rows, grad_left_TD.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, left_offsets_O, right_offsets_O, _, impl = inputs
    ctx.save_for_backward(left_offsets_O, right_offsets_O)
    ctx.impl = impl


def _differentiate(
    ctx: Any, grad_left_TD: Tensor, grad_right_SD: Tensor
) -> tuple[Tensor | None, ...]:
    left_offsets_O, right_offsets_O = ctx.saved_tensors
    grad_TD = torch.ops.gem_jagged.jagged_split_backward(
        grad_left_TD, grad_right_SD, left_offsets_O, right_offsets_O, ctx.impl
    )
    return grad_TD, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _forward_cost(values_TD: Tensor, _: Tensor, __: Tensor, left_tokens: int, *___: Any) -> Cost:
    return jagged_split_cost(
        left_tokens=left_tokens,
        right_tokens=values_TD.shape[0] - left_tokens,
        width=values_TD.shape[1],
        element_bytes=values_TD.element_size(),
    )


def _backward_cost(grad_left_TD: Tensor, grad_right_SD: Tensor, *_: Any) -> Cost:
    return jagged_split_cost(
        left_tokens=grad_left_TD.shape[0],
        right_tokens=grad_right_SD.shape[0],
        width=grad_left_TD.shape[1],
        element_bytes=grad_left_TD.element_size(),
    )


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def jagged_split(
    values_TD: Tensor, left_layout: Layout, right_layout: Layout, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Cut each sequence of a packed batch into a left and a right part.

        values_b = left_b, right_b   (tokens of the left first)

    Args:
        values_TD: tokens, any dtype; also (T,) or (T, H, K).
        left_layout: how many tokens of each sequence belong to the left.
        right_layout: how many to the right; together all of them.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        left_TD and right_SD, in the form of the input; their layouts are the arguments.

    Raises:
        ShapeError: layouts of different numbers of sequences, or that do not add up to the tokens.
        DeviceError: tensors on different devices.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: moves values without rounding.
    Cost: no FLOPs; reads and writes all T·D elements.
    Source: own; the inverse of ``jagged_concat``.
    """
    rows_TD = merge_trailing(_NAME, values_TD, name="values_TD", leading=1)
    check_is_layout(_NAME, left_layout, name="left_layout")
    check_is_layout(_NAME, right_layout, name="right_layout")
    check_shapes(
        _NAME,
        values_TD=rows_TD,
        left_offsets_O=left_layout.offsets_O,
        right_offsets_O=right_layout.offsets_O,
    )
    check_device(_NAME, rows_TD, left_layout, name="values_TD", layout_name="left_layout")
    check_device(_NAME, rows_TD, right_layout, name="values_TD", layout_name="right_layout")
    if rows_TD.shape[0] != left_layout.total_tokens + right_layout.total_tokens:
        raise ShapeError(
            f"{_NAME}: values_TD has {rows_TD.shape[0]} tokens but left_layout has "
            f"{left_layout.total_tokens} and right_layout {right_layout.total_tokens}; "
            f"pass the two layouts that make up the sequences"
        )
    check_autograd(_NAME, values_TD=values_TD)
    chosen = resolve_impl(impl, rows_TD.device, _NAME, has_triton=_HAS_TRITON)
    left_TD, right_SD = torch.ops.gem_jagged.jagged_split(
        rows_TD,
        left_layout.offsets_O,
        right_layout.offsets_O,
        left_layout.total_tokens,
        chosen,
    )
    return (
        split_trailing(left_TD, values_TD, leading=1),
        split_trailing(right_SD, values_TD, leading=1),
    )

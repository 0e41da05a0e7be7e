"""The operator ``jagged_broadcast_add``: schema, kernels, fake, autograd, FLOPs, function."""

from typing import Any

import torch
from torch import Tensor

import gem_jagged.kernels.jagged_take_last.op  # noqa: F401 - an operator that the backward calls
from gem_jagged.batch import Layout
from gem_jagged.checks import (
    check_floating,
    check_is_layout,
    check_layout,
    check_same_device,
    check_same_dtype,
    merge_trailing,
    split_trailing,
)
from gem_jagged.kernels.jagged_broadcast_add.cost import (
    jagged_broadcast_add_backward_cost,
    jagged_broadcast_add_cost,
)
from gem_jagged.kernels.jagged_broadcast_add.reference import (
    jagged_broadcast_add_backward_reference,
    jagged_broadcast_add_reference,
)
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ShapeError
from gem_opkit.impl import Impl, resolve_impl

_NAME = "jagged_broadcast_add"
_HAS_TRITON = True


@torch.library.custom_op("gem_jagged::jagged_broadcast_add", mutates_args=())
def _forward(values_TD: Tensor, offsets_O: Tensor, dense_BD: Tensor, impl: str) -> Tensor:
    if resolve_impl(impl, values_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.jagged_broadcast_add.kernel import launch_forward

        return launch_forward(values_TD, offsets_O, dense_BD)
    return jagged_broadcast_add_reference(values_TD, offsets_O, dense_BD)


@_forward.register_fake
def _(values_TD: Tensor, offsets_O: Tensor, dense_BD: Tensor, impl: str) -> Tensor:
    return values_TD.new_empty(values_TD.shape)


@torch.library.custom_op("gem_jagged::jagged_broadcast_add_backward", mutates_args=())
def _backward(grad_TD: Tensor, offsets_O: Tensor, impl: str) -> Tensor:
    if resolve_impl(impl, grad_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.jagged_broadcast_add.kernel import launch_backward

        return launch_backward(grad_TD, offsets_O)
    return jagged_broadcast_add_backward_reference(grad_TD, offsets_O)


@_backward.register_fake
def _(grad_TD: Tensor, offsets_O: Tensor, impl: str) -> Tensor:
    return grad_TD.new_empty((offsets_O.shape[0] - 1, grad_TD.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, offsets_O, _, impl = inputs
    ctx.save_for_backward(offsets_O)
    ctx.impl = impl


def _differentiate(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    (offsets_O,) = ctx.saved_tensors
    grad_values_TD, grad_dense_BD = grad_TD, None
    if ctx.needs_input_grad[0] and ctx.impl == "triton":
        # Behind the last offset the result is 0 whatever the values are. The reference refuses such
        # rows, so that its gradient needs no copy. Every token is among the last of its sequence.
        grad_values_TD = torch.ops.gem_jagged.jagged_take_last(
            grad_TD, offsets_O, offsets_O, grad_TD.shape[0], ctx.impl
        )
    if ctx.needs_input_grad[2]:
        grad_dense_BD = torch.ops.gem_jagged.jagged_broadcast_add_backward(
            grad_TD, offsets_O, ctx.impl
        )
    return grad_values_TD, None, grad_dense_BD, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _forward_cost(values_TD: Tensor, offsets_O: Tensor, *_: Any) -> Cost:
    return jagged_broadcast_add_cost(
        batch=offsets_O.shape[0] - 1,
        total_tokens=values_TD.shape[0],
        width=values_TD.shape[1],
        element_bytes=values_TD.element_size(),
    )


def _backward_cost(grad_TD: Tensor, offsets_O: Tensor, *_: Any) -> Cost:
    return jagged_broadcast_add_backward_cost(
        batch=offsets_O.shape[0] - 1,
        total_tokens=grad_TD.shape[0],
        width=grad_TD.shape[1],
        element_bytes=grad_TD.element_size(),
    )


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def jagged_broadcast_add(
    values_TD: Tensor, layout: Layout, dense_BD: Tensor, *, impl: Impl = "auto"
) -> Tensor:
    """Add to every token of a packed batch the row of its sequence.

        out[t] = values[t] + dense[b]   for every token t of sequence b

    Args:
        values_TD: tokens, fp32, fp64, bf16 or fp16; also (T,) or (T, H, K).
        layout: where the sequences begin.
        dense_BD: one row a sequence, same dtype; (B,) or (B, H, K) for the other two forms.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        out_TD in the dtype and form of the values.

    Raises:
        ShapeError: another number of tokens or sequences than the layout has, or another width.
        DtypeError: values that are not floating point, or two dtypes.
        DeviceError: tensors on different devices.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: adds in fp32 (fp64 for fp64) and rounds once; the gradient of ``dense`` is summed as
        in ``jagged_sum``.
    Cost: T·D FLOPs; reads (T+B)·D elements and writes T·D. Backward reads T·D and writes B·D; the
        kernel also copies the gradient of the values, to have 0 behind the last offset.
    Source: generative-recommenders' ``jagged_dense_broadcast_add``.
    """
    rows_TD = merge_trailing(_NAME, values_TD, name="values_TD", leading=1)
    added_BD = merge_trailing(_NAME, dense_BD, name="dense_BD", leading=1)
    check_is_layout(_NAME, layout, name="layout")
    check_shapes(_NAME, values_TD=rows_TD, offsets_O=layout.offsets_O, dense_BD=added_BD)
    if values_TD.shape[1:] != dense_BD.shape[1:]:
        raise ShapeError(
            f"{_NAME}: dense_BD has rows of shape {tuple(dense_BD.shape[1:])} but values_TD has "
            f"{tuple(values_TD.shape[1:])}; use one shape for both"
        )
    check_layout(_NAME, rows_TD, layout, name="values_TD", layout_name="layout")
    check_same_device(_NAME, dense_BD, values_TD, name="dense_BD", like_name="values_TD")
    check_floating(_NAME, values_TD, name="values_TD")
    check_same_dtype(_NAME, dense_BD, values_TD, name="dense_BD", like_name="values_TD")
    check_autograd(_NAME, values_TD=values_TD, dense_BD=dense_BD)
    chosen = resolve_impl(impl, rows_TD.device, _NAME, has_triton=_HAS_TRITON)
    out_TD = torch.ops.gem_jagged.jagged_broadcast_add(rows_TD, layout.offsets_O, added_BD, chosen)
    return split_trailing(out_TD, values_TD, leading=1)

"""The operator ``jagged_sum``: schema, kernels, fake, autograd, FLOP formula, function."""

from typing import Any

import torch
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.checks import (
    check_floating,
    check_is_layout,
    check_layout,
    merge_trailing,
    split_trailing,
)
from gem_jagged.kernels.jagged_sum.cost import jagged_sum_backward_cost, jagged_sum_cost
from gem_jagged.kernels.jagged_sum.reference import (
    jagged_sum_backward_reference,
    jagged_sum_reference,
)
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.impl import Impl, resolve_impl

_NAME = "jagged_sum"
_HAS_TRITON = True


@torch.library.custom_op("gem_jagged::jagged_sum", mutates_args=())
def _forward(values_TD: Tensor, offsets_O: Tensor, impl: str) -> Tensor:
    if resolve_impl(impl, values_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.jagged_sum.kernel import launch_forward

        return launch_forward(values_TD, offsets_O)
    return jagged_sum_reference(values_TD, offsets_O)


@_forward.register_fake
def _(values_TD: Tensor, offsets_O: Tensor, impl: str) -> Tensor:
    return values_TD.new_empty((offsets_O.shape[0] - 1, values_TD.shape[1]))


@torch.library.custom_op("gem_jagged::jagged_sum_backward", mutates_args=())
def _backward(grad_BD: Tensor, offsets_O: Tensor, total_tokens: int, impl: str) -> Tensor:
    if resolve_impl(impl, grad_BD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.jagged_sum.kernel import launch_backward

        return launch_backward(grad_BD, offsets_O, total_tokens)
    return jagged_sum_backward_reference(grad_BD, offsets_O, total_tokens)


@_backward.register_fake
def _(grad_BD: Tensor, offsets_O: Tensor, total_tokens: int, impl: str) -> Tensor:
    return grad_BD.new_empty((total_tokens, grad_BD.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values_TD, offsets_O, impl = inputs
    ctx.save_for_backward(offsets_O)
    ctx.total_tokens, ctx.impl = values_TD.shape[0], impl


def _differentiate(ctx: Any, grad_BD: Tensor) -> tuple[Tensor | None, ...]:
    (offsets_O,) = ctx.saved_tensors
    grad_TD = torch.ops.gem_jagged.jagged_sum_backward(
        grad_BD, offsets_O, ctx.total_tokens, ctx.impl
    )
    return grad_TD, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _forward_cost(values_TD: Tensor, offsets_O: Tensor, *_: Any) -> Cost:
    return jagged_sum_cost(
        batch=offsets_O.shape[0] - 1,
        total_tokens=values_TD.shape[0],
        width=values_TD.shape[1],
        element_bytes=values_TD.element_size(),
    )


def _backward_cost(grad_BD: Tensor, _: Tensor, total_tokens: int, *__: Any) -> Cost:
    return jagged_sum_backward_cost(
        batch=grad_BD.shape[0],
        total_tokens=total_tokens,
        width=grad_BD.shape[1],
        element_bytes=grad_BD.element_size(),
    )


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def jagged_sum(values_TD: Tensor, layout: Layout, *, impl: Impl = "auto") -> Tensor:
    """Sum the tokens of each sequence of a packed batch.

        sum[b] = sum of values[t] over the tokens t of b

    Args:
        values_TD: tokens, fp32, fp64, bf16 or fp16; also (T,) or (T, H, K).
        layout: where the sequences begin.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        sum_BD in the dtype of the values; (B,) or (B, H, K) for the other two forms. An empty
        sequence gives 0.

    Raises:
        ShapeError: another number of tokens than the layout has.
        DtypeError: values that are not floating point.
        DeviceError: offsets on another device than the values.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: sums in fp32 (fp64 for fp64) in a fixed order that depends on the place in the
        sequence alone; only the reference on CUDA adds in no fixed order.
    Cost: T·D FLOPs; reads T·D elements and writes B·D.
    Source: sum pooling; ``torch.segment_reduce``.
    """
    rows_TD = merge_trailing(_NAME, values_TD, name="values_TD", leading=1)
    check_is_layout(_NAME, layout, name="layout")
    check_shapes(_NAME, values_TD=rows_TD, offsets_O=layout.offsets_O)
    check_layout(_NAME, rows_TD, layout, name="values_TD", layout_name="layout")
    check_floating(_NAME, values_TD, name="values_TD")
    check_autograd(_NAME, values_TD=values_TD)
    chosen = resolve_impl(impl, rows_TD.device, _NAME, has_triton=_HAS_TRITON)
    sum_BD = torch.ops.gem_jagged.jagged_sum(rows_TD, layout.offsets_O, chosen)
    return split_trailing(sum_BD, values_TD, leading=1)

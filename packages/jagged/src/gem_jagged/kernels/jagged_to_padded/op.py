"""The operator ``jagged_to_padded``: schema, kernels, fake, autograd, FLOP formula, function."""

from typing import Any, Literal

import torch
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.checks import (
    check_align,
    check_is_layout,
    check_layout,
    check_tokens,
    fill_for,
    merge_trailing,
    split_trailing,
)
from gem_jagged.kernels.jagged_to_padded.cost import (
    jagged_to_padded_backward_cost,
    jagged_to_padded_cost,
)
from gem_jagged.kernels.jagged_to_padded.reference import (
    jagged_to_padded_backward_reference,
    jagged_to_padded_reference,
)
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.impl import Impl, resolve_impl

_NAME = "jagged_to_padded"
_HAS_TRITON = True


def _choose(impl: str, values_TD: Tensor) -> str:
    # A fill of 16 bytes is no single word of a kernel; the reference pads complex128.
    has_triton = _HAS_TRITON and values_TD.dtype.itemsize <= 8
    return resolve_impl(impl, values_TD.device, _NAME, has_triton=has_triton)


@torch.library.custom_op("gem_jagged::jagged_to_padded", mutates_args=())
def _forward(
    values_TD: Tensor,
    offsets_O: Tensor,
    length: int,
    max_length: int,
    fill: float,
    align: str,
    impl: str,
) -> Tensor:
    if _choose(impl, values_TD) == "triton":
        from gem_jagged.kernels.jagged_to_padded.kernel import launch_forward

        return launch_forward(values_TD, offsets_O, length, fill, align)
    return jagged_to_padded_reference(values_TD, offsets_O, length, max_length, fill, align)


@_forward.register_fake
def _(
    values_TD: Tensor,
    offsets_O: Tensor,
    length: int,
    max_length: int,
    fill: float,
    align: str,
    impl: str,
) -> Tensor:
    return values_TD.new_empty((offsets_O.shape[0] - 1, length, values_TD.shape[1]))


@torch.library.custom_op("gem_jagged::jagged_to_padded_backward", mutates_args=())
def _backward(
    grad_BND: Tensor,
    offsets_O: Tensor,
    total_tokens: int,
    max_length: int,
    align: str,
    impl: str,
) -> Tensor:
    if _choose(impl, grad_BND) == "triton":
        from gem_jagged.kernels.jagged_to_padded.kernel import launch_backward

        return launch_backward(grad_BND, offsets_O, total_tokens, align)
    return jagged_to_padded_backward_reference(grad_BND, offsets_O, total_tokens, max_length, align)


@_backward.register_fake
def _(
    grad_BND: Tensor,
    offsets_O: Tensor,
    total_tokens: int,
    max_length: int,
    align: str,
    impl: str,
) -> Tensor:
    return grad_BND.new_empty((total_tokens, grad_BND.shape[2]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values_TD, offsets_O, _, max_length, _, align, impl = inputs
    ctx.save_for_backward(offsets_O)
    ctx.total_tokens, ctx.max_length = values_TD.shape[0], max_length
    ctx.align, ctx.impl = align, impl


def _differentiate(ctx: Any, grad_BND: Tensor) -> tuple[Tensor | None, ...]:
    (offsets_O,) = ctx.saved_tensors
    grad_TD = torch.ops.gem_jagged.jagged_to_padded_backward(
        grad_BND, offsets_O, ctx.total_tokens, ctx.max_length, ctx.align, ctx.impl
    )
    return grad_TD, None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _forward_cost(values_TD: Tensor, offsets_O: Tensor, length: int, *_: Any) -> Cost:
    return jagged_to_padded_cost(
        batch=offsets_O.shape[0] - 1,
        total_tokens=values_TD.shape[0],
        length=length,
        width=values_TD.shape[1],
        element_bytes=values_TD.element_size(),
    )


def _backward_cost(grad_BND: Tensor, offsets_O: Tensor, total_tokens: int, *_: Any) -> Cost:
    return jagged_to_padded_backward_cost(
        batch=grad_BND.shape[0],
        total_tokens=total_tokens,
        length=grad_BND.shape[1],
        width=grad_BND.shape[2],
        element_bytes=grad_BND.element_size(),
    )


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def jagged_to_padded(
    values_TD: Tensor,
    layout: Layout,
    *,
    length: int | None = None,
    fill: float = 0.0,
    align: Literal["left", "right"] = "left",
    impl: Impl = "auto",
) -> Tensor:
    """Pad the sequences of a packed batch to one length.

        padded[b, n] = values[o_b + n]   where sequence b has a token n, else fill

    Args:
        values_TD: tokens, any dtype; also (T,) or (T, H, K).
        layout: where the sequences begin.
        length: padded length N; None for the longest sequence. Of a longer sequence the first N
            tokens are kept with ``align="left"``, the last N with ``"right"``.
        fill: value of the slots without a token; a number that the dtype can hold.
        align: the side of the row on which the tokens stand.
        impl: who computes it; see ``gem_opkit.impl``. ``"auto"`` takes the reference for
            complex128.

    Returns:
        padded_BND in the dtype of the values; (B, N) or (B, N, H, K) for the other two forms.

    Raises:
        ShapeError: another number of tokens than the layout has, or a negative length.
        DtypeError: a fill that the dtype cannot hold.
        DeviceError: offsets on another device than the values.
        UnsupportedError: an ``align`` or ``impl`` that does not exist or cannot run here.

    Numerics: moves values without rounding; backward gives 0 to tokens that were cut off.
    Cost: no FLOPs; reads T·D elements and writes B·N·D.
    Source: the rule of padding that ``torch.nested.to_padded_tensor`` follows.
    """
    rows_TD = merge_trailing(_NAME, values_TD, name="values_TD", leading=1)
    check_is_layout(_NAME, layout, name="layout")
    check_shapes(_NAME, values_TD=rows_TD, offsets_O=layout.offsets_O)
    check_layout(_NAME, rows_TD, layout, name="values_TD", layout_name="layout")
    check_align(_NAME, align)
    if length is None:
        length = layout.max_length
    else:
        check_tokens(_NAME, length, name="length")
    check_autograd(_NAME, values_TD=values_TD)
    chosen = _choose(impl, rows_TD)
    padded_BND = torch.ops.gem_jagged.jagged_to_padded(
        rows_TD,
        layout.offsets_O,
        length,
        layout.max_length,
        fill_for(_NAME, fill, rows_TD.dtype),
        align,
        chosen,
    )
    return split_trailing(padded_BND, values_TD, leading=1)

"""The operator ``jagged_concat``: schema, kernels, fake, autograd, FLOP formula, function."""

from typing import Any

import torch
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.checks import (
    check_device,
    check_is_layout,
    check_layout,
    merge_trailing,
    split_trailing,
)
from gem_jagged.kernels.jagged_concat.cost import jagged_concat_cost
from gem_jagged.kernels.jagged_concat.reference import (
    jagged_concat_backward_reference,
    jagged_concat_reference,
)
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import DtypeError, ShapeError, refusal
from gem_opkit.impl import Impl, resolve_impl

_NAME = "jagged_concat"
_HAS_TRITON = True


@torch.library.custom_op("gem_jagged::jagged_concat", mutates_args=())
def _forward(
    left_TD: Tensor, left_offsets_O: Tensor, right_SD: Tensor, right_offsets_O: Tensor, impl: str
) -> Tensor:
    if resolve_impl(impl, left_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.jagged_concat.kernel import launch_forward

        return launch_forward(left_TD, left_offsets_O, right_SD, right_offsets_O)
    return jagged_concat_reference(left_TD, left_offsets_O, right_SD, right_offsets_O)


@_forward.register_fake
def _(
    left_TD: Tensor, left_offsets_O: Tensor, right_SD: Tensor, right_offsets_O: Tensor, impl: str
) -> Tensor:
    return left_TD.new_empty((left_TD.shape[0] + right_SD.shape[0], left_TD.shape[1]))


@torch.library.custom_op("gem_jagged::jagged_concat_backward", mutates_args=())
def _backward(
    grad_TD: Tensor, left_offsets_O: Tensor, right_offsets_O: Tensor, left_tokens: int, impl: str
) -> tuple[Tensor, Tensor]:
    if resolve_impl(impl, grad_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.jagged_concat.kernel import launch_backward

        return launch_backward(grad_TD, left_offsets_O, right_offsets_O, left_tokens)
    return jagged_concat_backward_reference(grad_TD, left_offsets_O, right_offsets_O, left_tokens)


@_backward.register_fake
def _(
    grad_TD: Tensor, left_offsets_O: Tensor, right_offsets_O: Tensor, left_tokens: int, impl: str
) -> tuple[Tensor, Tensor]:
    width = grad_TD.shape[1]
    return (
        grad_TD.new_empty((left_tokens, width)),
        grad_TD.new_empty((grad_TD.shape[0] - left_tokens, width)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    left_TD, left_offsets_O, _, right_offsets_O, impl = inputs
    ctx.save_for_backward(left_offsets_O, right_offsets_O)
    ctx.left_tokens, ctx.impl = left_TD.shape[0], impl


def _differentiate(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    left_offsets_O, right_offsets_O = ctx.saved_tensors
    grad_left_TD, grad_right_SD = torch.ops.gem_jagged.jagged_concat_backward(
        grad_TD, left_offsets_O, right_offsets_O, ctx.left_tokens, ctx.impl
    )
    return grad_left_TD, None, grad_right_SD, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _forward_cost(left_TD: Tensor, _: Tensor, right_SD: Tensor, *__: Any) -> Cost:
    return jagged_concat_cost(
        left_tokens=left_TD.shape[0],
        right_tokens=right_SD.shape[0],
        width=left_TD.shape[1],
        element_bytes=left_TD.element_size(),
    )


def _backward_cost(grad_TD: Tensor, _: Tensor, __: Tensor, left_tokens: int, *___: Any) -> Cost:
    return jagged_concat_cost(
        left_tokens=left_tokens,
        right_tokens=grad_TD.shape[0] - left_tokens,
        width=grad_TD.shape[1],
        element_bytes=grad_TD.element_size(),
    )


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def concat_layouts(left: Layout, right: Layout) -> Layout:
    """Return the layout of sequences of which each is one of ``left`` then one of ``right``.

    Its longest length is computed from host memory, so call it in eager code; a compiled graph
    takes the result as an argument.

    Args:
        left: B sequences.
        right: B sequences, on the same device.

    Returns:
        the layout of ``jagged_concat``; offsets are int64 unless both sides have int32.

    Raises:
        ShapeError: another number of sequences, or a total that int32 cannot hold.
    """
    op = "concat_layouts"
    check_shapes(op, left_offsets_O=left.offsets_O, right_offsets_O=right.offsets_O)
    lengths = left.lengths + right.lengths
    layout = Layout(
        left.offsets_O + right.offsets_O,
        lengths,
        int(lengths.max()) if lengths.shape[0] else 0,
        left.total_tokens + right.total_tokens,
    )
    return layout.checked("shapes")


def _check_result_layout(left: Layout, right: Layout, layout: Layout) -> None:
    """Refuse a layout of the result that joins other sequences than the two sides have."""
    if layout.batch != left.batch:
        raise ShapeError(
            f"{_NAME}: layout has B={layout.batch} but left_layout has B={left.batch}; "
            f"make it with concat_layouts"
        )
    # A graph knows the number of lengths, not the lengths.
    if torch.compiler.is_compiling() or torch.equal(layout.lengths, left.lengths + right.lengths):
        return
    row = int((layout.lengths != left.lengths + right.lengths).nonzero()[0])
    raise ShapeError(
        refusal(
            _NAME,
            f"layout.lengths[{row}]",
            must=f"be {int(left.lengths[row] + right.lengths[row])}, the tokens of both sides",
            got=int(layout.lengths[row]),
            fix="make it with concat_layouts",
        )
    )


def jagged_concat(
    left_TD: Tensor,
    left_layout: Layout,
    right_SD: Tensor,
    right_layout: Layout,
    *,
    layout: Layout | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Layout]:
    """Append to each sequence of one packed batch the sequence of another.

        result_b = left_b, right_b   (tokens of the left first)

    Args:
        left_TD: tokens, any dtype; also (T,) or (T, H, K).
        left_layout: where the sequences of the left begin.
        right_SD: tokens of the same dtype and width.
        right_layout: where those of the right begin; as many sequences.
        layout: layout of the result, from ``concat_layouts``; None computes it, which inside
            ``torch.compile`` breaks the graph.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        the T+S tokens of the result, in the form of the inputs, and their layout.

    Raises:
        ShapeError: sides of different width or number of sequences, or tokens that are not those
            of their layout.
        DtypeError: sides of different dtypes.
        DeviceError: tensors on different devices.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: moves values without rounding.
    Cost: no FLOPs; reads and writes (T+S)·D elements.
    Source: own; ``torch.cat`` per sequence.
    """
    left_rows_TD = merge_trailing(_NAME, left_TD, name="left_TD", leading=1)
    right_rows_SD = merge_trailing(_NAME, right_SD, name="right_SD", leading=1)
    check_is_layout(_NAME, left_layout, name="left_layout")
    check_is_layout(_NAME, right_layout, name="right_layout")
    check_shapes(
        _NAME,
        left_TD=left_rows_TD,
        left_offsets_O=left_layout.offsets_O,
        right_SD=right_rows_SD,
        right_offsets_O=right_layout.offsets_O,
    )
    if left_TD.shape[1:] != right_SD.shape[1:]:
        raise ShapeError(
            f"{_NAME}: right_SD has rows of shape {tuple(right_SD.shape[1:])} but left_TD has "
            f"{tuple(left_TD.shape[1:])}; use one shape for both"
        )
    check_layout(_NAME, left_rows_TD, left_layout, name="left_TD", layout_name="left_layout")
    check_layout(_NAME, right_rows_SD, right_layout, name="right_SD", layout_name="right_layout")
    check_device(_NAME, left_rows_TD, right_layout, name="left_TD", layout_name="right_layout")
    if left_TD.dtype != right_SD.dtype:
        raise DtypeError(
            refusal(
                _NAME,
                "right_SD",
                must=f"be {left_TD.dtype} like left_TD",
                got=right_SD.dtype,
                fix="convert one of them",
            )
        )
    check_autograd(_NAME, left_TD=left_TD, right_SD=right_SD)
    chosen = resolve_impl(impl, left_TD.device, _NAME, has_triton=_HAS_TRITON)
    values_TD = torch.ops.gem_jagged.jagged_concat(
        left_rows_TD, left_layout.offsets_O, right_rows_SD, right_layout.offsets_O, chosen
    )
    if layout is None:
        layout = concat_layouts(left_layout, right_layout)
    else:
        check_layout(_NAME, values_TD, layout, name="the result", layout_name="layout")
        _check_result_layout(left_layout, right_layout, layout)
    return split_trailing(values_TD, left_TD, leading=1), layout

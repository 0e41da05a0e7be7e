"""The operator ``jagged_take_last``: schema, kernels, fake, autograd, FLOP formula, function."""

from typing import Any

import torch
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.checks import (
    check_device,
    check_is_layout,
    check_layout,
    check_tokens,
    merge_trailing,
    split_trailing,
)
from gem_jagged.kernels.jagged_take_last.cost import (
    jagged_take_last_backward_cost,
    jagged_take_last_cost,
)
from gem_jagged.kernels.jagged_take_last.reference import (
    jagged_take_last_backward_reference,
    jagged_take_last_reference,
)
from gem_jagged.offsets import lengths_to_offsets
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ShapeError, refusal
from gem_opkit.impl import Impl, resolve_impl

_NAME = "jagged_take_last"
_HAS_TRITON = True


@torch.library.custom_op("gem_jagged::jagged_take_last", mutates_args=())
def _forward(
    values_TD: Tensor, offsets_O: Tensor, kept_offsets_O: Tensor, kept_tokens: int, impl: str
) -> Tensor:
    if resolve_impl(impl, values_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.jagged_take_last.kernel import launch_forward

        return launch_forward(values_TD, offsets_O, kept_offsets_O, kept_tokens)
    return jagged_take_last_reference(values_TD, offsets_O, kept_offsets_O, kept_tokens)


@_forward.register_fake
def _(
    values_TD: Tensor, offsets_O: Tensor, kept_offsets_O: Tensor, kept_tokens: int, impl: str
) -> Tensor:
    return values_TD.new_empty((kept_tokens, values_TD.shape[1]))


@torch.library.custom_op("gem_jagged::jagged_take_last_backward", mutates_args=())
def _backward(
    grad_SD: Tensor, offsets_O: Tensor, kept_offsets_O: Tensor, total_tokens: int, impl: str
) -> Tensor:
    if resolve_impl(impl, grad_SD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.jagged_take_last.kernel import launch_backward

        return launch_backward(grad_SD, offsets_O, kept_offsets_O, total_tokens)
    return jagged_take_last_backward_reference(grad_SD, offsets_O, kept_offsets_O, total_tokens)


@_backward.register_fake
def _(
    grad_SD: Tensor, offsets_O: Tensor, kept_offsets_O: Tensor, total_tokens: int, impl: str
) -> Tensor:
    return grad_SD.new_empty((total_tokens, grad_SD.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values_TD, offsets_O, kept_offsets_O, _, impl = inputs
    ctx.save_for_backward(offsets_O, kept_offsets_O)
    ctx.total_tokens, ctx.impl = values_TD.shape[0], impl


def _differentiate(ctx: Any, grad_SD: Tensor) -> tuple[Tensor | None, ...]:
    offsets_O, kept_offsets_O = ctx.saved_tensors
    grad_TD = torch.ops.gem_jagged.jagged_take_last_backward(
        grad_SD, offsets_O, kept_offsets_O, ctx.total_tokens, ctx.impl
    )
    return grad_TD, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _forward_cost(values_TD: Tensor, _: Tensor, __: Tensor, kept_tokens: int, *___: Any) -> Cost:
    return jagged_take_last_cost(
        kept_tokens=kept_tokens,
        width=values_TD.shape[1],
        element_bytes=values_TD.element_size(),
    )


def _backward_cost(grad_SD: Tensor, _: Tensor, __: Tensor, total_tokens: int, *___: Any) -> Cost:
    return jagged_take_last_backward_cost(
        kept_tokens=grad_SD.shape[0],
        total_tokens=total_tokens,
        width=grad_SD.shape[1],
        element_bytes=grad_SD.element_size(),
    )


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def last_layout(layout: Layout, count: int) -> Layout:
    """Return the layout of the last ``count`` tokens of each sequence.

    Its sizes are computed from host memory, so call it in eager code; a compiled graph takes the
    result as an argument. The offsets are computed on their device, so a captured graph follows
    new ones.

    Args:
        layout: B sequences.
        count: most tokens that stay of each, at least 0.

    Returns:
        the layout of ``jagged_take_last``, offsets in the dtype of the given ones.

    Raises:
        ShapeError: a negative count.
    """
    op = "last_layout"
    check_shapes(op, offsets_O=layout.offsets_O)
    check_tokens(op, count, name="count")
    lengths = layout.lengths.clamp(max=count)
    kept_B = layout.offsets_O.diff().clamp(max=count)
    return Layout(
        lengths_to_offsets(kept_B).to(layout.offsets_O.dtype),
        lengths,
        min(layout.max_length, count),
        int(lengths.sum()),
    )


def jagged_take_last(
    values_TD: Tensor,
    layout: Layout,
    count: int,
    *,
    kept: Layout | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Layout]:
    """Keep the last ``count`` tokens of each sequence of a packed batch.

        out_b = the last min(L_b, count) tokens of sequence b, in their order

    Args:
        values_TD: tokens, any dtype; also (T,) or (T, H, K).
        layout: where the sequences begin.
        count: most tokens that stay of each sequence; a shorter one stays whole.
        kept: layout of the result, from ``last_layout(layout, count)``; None computes it, which
            inside ``torch.compile`` breaks the graph.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        the tokens of the result, in the form of the input, and their layout.

    Raises:
        ShapeError: another number of tokens than the layout has, a negative count, or a ``kept``
            that is not of this batch and count.
        DeviceError: tensors on different devices.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: moves values without rounding; the gradient of tokens that did not stay is 0.
    Cost: no FLOPs; reads and writes the tokens that stay.
    Source: own; fbgemm's ``jagged_slice`` with the start counted from the end.
    """
    rows_TD = merge_trailing(_NAME, values_TD, name="values_TD", leading=1)
    check_is_layout(_NAME, layout, name="layout")
    check_shapes(_NAME, values_TD=rows_TD, offsets_O=layout.offsets_O)
    check_layout(_NAME, rows_TD, layout, name="values_TD", layout_name="layout")
    check_tokens(_NAME, count, name="count")
    if kept is None:
        kept = last_layout(layout, count)
    check_device(_NAME, rows_TD, kept, name="values_TD", layout_name="kept")
    if kept.batch != layout.batch or (
        not torch.compiler.is_compiling()
        and not torch.equal(kept.lengths, layout.lengths.clamp(max=count))
    ):
        raise ShapeError(
            refusal(
                _NAME,
                "kept",
                must=f"hold the last {count} tokens of the {layout.batch} sequences",
                got=f"{kept.batch} sequences of {kept.total_tokens} tokens",
                fix="make it with last_layout",
            )
        )
    check_autograd(_NAME, values_TD=values_TD)
    chosen = resolve_impl(impl, rows_TD.device, _NAME, has_triton=_HAS_TRITON)
    out_SD = torch.ops.gem_jagged.jagged_take_last(
        rows_TD, layout.offsets_O, kept.offsets_O, kept.total_tokens, chosen
    )
    return split_trailing(out_SD, values_TD, leading=1), kept

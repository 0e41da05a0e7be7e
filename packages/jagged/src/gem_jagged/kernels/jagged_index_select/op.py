"""The operator ``jagged_index_select``: schema, kernels, fake, autograd, FLOPs, function."""

from typing import Any

import torch
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.checks import (
    check_device,
    check_is_layout,
    check_layout,
    check_same_device,
    merge_trailing,
    split_trailing,
)
from gem_jagged.kernels.jagged_index_select.cost import (
    jagged_index_select_backward_cost,
    jagged_index_select_cost,
)
from gem_jagged.kernels.jagged_index_select.reference import (
    jagged_index_select_backward_reference,
    jagged_index_select_reference,
)
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import DeviceError, DtypeError, ShapeError, refusal
from gem_opkit.impl import Impl, resolve_impl

_NAME = "jagged_index_select"
_HAS_TRITON = True


@torch.library.custom_op("gem_jagged::jagged_index_select", mutates_args=())
def _forward(
    values_TD: Tensor,
    offsets_O: Tensor,
    indices_I: Tensor,
    selected_offsets_O: Tensor,
    selected_tokens: int,
    impl: str,
) -> Tensor:
    args = (values_TD, offsets_O, indices_I, selected_offsets_O, selected_tokens)
    if resolve_impl(impl, values_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.jagged_index_select.kernel import launch_forward

        return launch_forward(*args)
    return jagged_index_select_reference(*args)


@_forward.register_fake
def _(
    values_TD: Tensor,
    offsets_O: Tensor,
    indices_I: Tensor,
    selected_offsets_O: Tensor,
    selected_tokens: int,
    impl: str,
) -> Tensor:
    return values_TD.new_empty((selected_tokens, values_TD.shape[1]))


@torch.library.custom_op("gem_jagged::jagged_index_select_backward", mutates_args=())
def _backward(
    grad_SD: Tensor,
    offsets_O: Tensor,
    indices_I: Tensor,
    selected_offsets_O: Tensor,
    total_tokens: int,
    impl: str,
) -> Tensor:
    args = (grad_SD, offsets_O, indices_I, selected_offsets_O, total_tokens)
    if resolve_impl(impl, grad_SD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_jagged.kernels.jagged_index_select.kernel import launch_backward

        return launch_backward(*args)
    return jagged_index_select_backward_reference(*args)


@_backward.register_fake
def _(
    grad_SD: Tensor,
    offsets_O: Tensor,
    indices_I: Tensor,
    selected_offsets_O: Tensor,
    total_tokens: int,
    impl: str,
) -> Tensor:
    return grad_SD.new_empty((total_tokens, grad_SD.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values_TD, offsets_O, indices_I, selected_offsets_O, _, impl = inputs
    ctx.save_for_backward(offsets_O, indices_I, selected_offsets_O)
    ctx.total_tokens, ctx.impl = values_TD.shape[0], impl


def _differentiate(ctx: Any, grad_SD: Tensor) -> tuple[Tensor | None, ...]:
    offsets_O, indices_I, selected_offsets_O = ctx.saved_tensors
    grad_TD = torch.ops.gem_jagged.jagged_index_select_backward(
        grad_SD, offsets_O, indices_I, selected_offsets_O, ctx.total_tokens, ctx.impl
    )
    return grad_TD, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _forward_cost(
    values_TD: Tensor, _: Tensor, __: Tensor, ___: Tensor, selected_tokens: int, *____: Any
) -> Cost:
    return jagged_index_select_cost(
        selected_tokens=selected_tokens,
        width=values_TD.shape[1],
        element_bytes=values_TD.element_size(),
    )


def _backward_cost(
    grad_SD: Tensor, _: Tensor, __: Tensor, ___: Tensor, total_tokens: int, *____: Any
) -> Cost:
    return jagged_index_select_backward_cost(
        selected_tokens=grad_SD.shape[0],
        total_tokens=total_tokens,
        width=grad_SD.shape[1],
        element_bytes=grad_SD.element_size(),
    )


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def _check_indices(op: str, indices_I: Tensor, batch: int) -> None:
    """Refuse indices in host memory that name no sequence."""
    if indices_I.shape[0] and (int(indices_I.min()) < 0 or int(indices_I.max()) >= batch):
        place = int(((indices_I < 0) | (indices_I >= batch)).nonzero()[0])
        raise ShapeError(
            refusal(
                op,
                f"indices_I[{place}]",
                must=f"be in [0, {batch}), the sequences of layout",
                got=int(indices_I[place]),
                fix="pass row numbers of the batch",
            )
        )


def _check_index_form(op: str, indices_I: Tensor) -> None:
    check_shapes(op, indices_I=indices_I)
    if indices_I.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            refusal(op, "indices_I", must="be int32 or int64", got=indices_I.dtype, fix="convert")
        )


def select_layout(layout: Layout, indices_I: Tensor) -> Layout:
    """Return the layout of chosen sequences, one after the other.

    Args:
        layout: B sequences.
        indices_I: the chosen ones, int32 or int64, in [0, B), in host memory; repeats are fine.

    Returns:
        the layout of ``jagged_index_select``, its offsets on the device of ``layout``.

    Raises:
        ShapeError: an index that names no sequence.
        DtypeError: indices of another dtype.
        DeviceError: indices on a GPU, which would have to be read back.
    """
    op = "select_layout"
    _check_index_form(op, indices_I)
    if indices_I.device.type != "cpu":
        raise DeviceError(
            refusal(
                op,
                "indices_I",
                must="be in host memory",
                got=indices_I.device,
                fix="keep a copy of the indices on the host; reading them back would wait",
            )
        )
    _check_indices(op, indices_I, layout.batch)
    lengths = layout.lengths[indices_I.to(torch.int64)]
    offsets_O = layout.offsets_O
    return Layout.from_lengths(lengths, device=offsets_O.device, dtype=offsets_O.dtype)


def jagged_index_select(
    values_TD: Tensor,
    layout: Layout,
    indices_I: Tensor,
    *,
    selected: Layout | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Layout]:
    """Gather whole sequences of a packed batch by their row numbers.

        out_j = sequence indices[j]   for every j

    Args:
        values_TD: tokens, any dtype; also (T,) or (T, H, K).
        layout: where the sequences begin.
        indices_I: the chosen sequences, int32 or int64, in [0, B), repeats allowed. In host
            memory; on the device of the values where ``selected`` is given.
        selected: layout of the result, from ``select_layout``; None computes it, which inside
            ``torch.compile`` breaks the graph.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        the tokens of the chosen sequences, in the form of the input, and their layout.

    Raises:
        ShapeError: another number of tokens than the layout has, an index out of range in host
            memory, or a ``selected`` of another number of sequences.
        DtypeError: indices that are not int32 or int64.
        DeviceError: tensors on different devices.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: moves values without rounding. Backward adds up the copies of a token in fp32 (fp64
        for fp64), in the order in which they were chosen; only the reference on CUDA adds in no
        fixed order. An index on a device is not read: one out of range gives rows of 0.
    Cost: no FLOPs; reads and writes the chosen tokens. Backward adds each once; a sequence chosen
        many times is added up one copy after the other.
    Source: fbgemm's ``jagged_index_select``.
    """
    rows_TD = merge_trailing(_NAME, values_TD, name="values_TD", leading=1)
    check_is_layout(_NAME, layout, name="layout")
    check_shapes(_NAME, values_TD=rows_TD, offsets_O=layout.offsets_O)
    check_layout(_NAME, rows_TD, layout, name="values_TD", layout_name="layout")
    _check_index_form(_NAME, indices_I)
    if selected is None:
        selected = select_layout(layout, indices_I)
        indices_I = indices_I.to(rows_TD.device, non_blocking=True)
    elif indices_I.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_indices(_NAME, indices_I, layout.batch)
    check_device(_NAME, rows_TD, selected, name="values_TD", layout_name="selected")
    check_same_device(_NAME, indices_I, rows_TD, name="indices_I", like_name="values_TD")
    if selected.batch != indices_I.shape[0]:
        raise ShapeError(
            f"{_NAME}: selected has B={selected.batch} but indices_I has I={indices_I.shape[0]}; "
            f"make it with select_layout"
        )
    check_autograd(_NAME, values_TD=values_TD)
    chosen = resolve_impl(impl, rows_TD.device, _NAME, has_triton=_HAS_TRITON)
    out_SD = torch.ops.gem_jagged.jagged_index_select(
        rows_TD, layout.offsets_O, indices_I, selected.offsets_O, selected.total_tokens, chosen
    )
    return split_trailing(out_SD, values_TD, leading=1), selected

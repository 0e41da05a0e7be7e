"""The operator ``jagged_dense_bmm``: schema, kernels, fake, autograd, FLOP formula, function."""

from typing import Any

import torch
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.checks import (
    check_floating,
    check_is_layout,
    check_is_tensor,
    check_layout,
    check_same_device,
    check_same_dtype,
)
from gem_jagged.kernels.jagged_dense_bmm.cost import (
    jagged_dense_bmm_backward_cost,
    jagged_dense_bmm_cost,
)
from gem_jagged.kernels.jagged_dense_bmm.reference import (
    jagged_dense_bmm_backward_reference,
    jagged_dense_bmm_reference,
)
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.impl import Impl, resolve_impl

_NAME = "jagged_dense_bmm"


def _choose(impl: str, tensor: Tensor) -> str:
    # Triton's matrix product takes no fp64 on every GPU; the reference computes it.
    has_triton = tensor.dtype != torch.float64
    return resolve_impl(impl, tensor.device, _NAME, has_triton=has_triton)


@torch.library.custom_op("gem_jagged::jagged_dense_bmm", mutates_args=())
def _forward(
    values_TD: Tensor,
    offsets_O: Tensor,
    dense_BDF: Tensor,
    bias_BF: Tensor | None,
    max_length: int,
    impl: str,
) -> Tensor:
    if _choose(impl, values_TD) == "triton":
        from gem_jagged.kernels.jagged_dense_bmm.kernel import launch_forward

        return launch_forward(values_TD, offsets_O, dense_BDF, bias_BF)
    return jagged_dense_bmm_reference(values_TD, offsets_O, dense_BDF, bias_BF, max_length)


@_forward.register_fake
def _(
    values_TD: Tensor,
    offsets_O: Tensor,
    dense_BDF: Tensor,
    bias_BF: Tensor | None,
    max_length: int,
    impl: str,
) -> Tensor:
    return values_TD.new_empty((values_TD.shape[0], dense_BDF.shape[2]))


@torch.library.custom_op("gem_jagged::jagged_dense_bmm_backward", mutates_args=())
def _backward(
    grad_TF: Tensor,
    values_TD: Tensor,
    offsets_O: Tensor,
    dense_BDF: Tensor,
    max_length: int,
    has_bias: bool,  # noqa: FBT001 - an op's schema has no keywords
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if _choose(impl, grad_TF) == "triton":
        from gem_jagged.kernels.jagged_dense_bmm.kernel import launch_backward

        return launch_backward(grad_TF, values_TD, offsets_O, dense_BDF, has_bias)
    return jagged_dense_bmm_backward_reference(
        grad_TF, values_TD, offsets_O, dense_BDF, max_length, has_bias
    )


@_backward.register_fake
def _(
    grad_TF: Tensor,
    values_TD: Tensor,
    offsets_O: Tensor,
    dense_BDF: Tensor,
    max_length: int,
    has_bias: bool,  # noqa: FBT001 - an op's schema has no keywords
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = dense_BDF.shape[0] if has_bias else 0
    return (
        values_TD.new_empty(values_TD.shape),
        dense_BDF.new_empty(dense_BDF.shape),
        grad_TF.new_empty((rows, grad_TF.shape[1])),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values_TD, offsets_O, dense_BDF, bias_BF, max_length, impl = inputs
    ctx.save_for_backward(values_TD, offsets_O, dense_BDF)
    ctx.max_length, ctx.has_bias, ctx.impl = max_length, bias_BF is not None, impl


def _differentiate(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
    values_TD, offsets_O, dense_BDF = ctx.saved_tensors
    grad_TD, grad_BDF, grad_BF = torch.ops.gem_jagged.jagged_dense_bmm_backward(
        grad_TF, values_TD, offsets_O, dense_BDF, ctx.max_length, ctx.has_bias, ctx.impl
    )
    return grad_TD, None, grad_BDF, grad_BF if ctx.has_bias else None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _forward_cost(
    values_TD: Tensor, _: Tensor, dense_BDF: Tensor, bias_BF: Tensor | None, *__: Any
) -> Cost:
    batch, width, out_width = dense_BDF.shape
    return jagged_dense_bmm_cost(
        batch=batch,
        total_tokens=values_TD.shape[0],
        width=width,
        out_width=out_width,
        element_bytes=values_TD.element_size(),
        has_bias=bias_BF is not None,
    )


def _backward_cost(
    grad_TF: Tensor,
    _: Tensor,
    __: Tensor,
    dense_BDF: Tensor,
    max_length: int,
    has_bias: bool,  # noqa: FBT001 - an op's schema has no keywords
    *___: Any,
) -> Cost:
    batch, width, out_width = dense_BDF.shape
    return jagged_dense_bmm_backward_cost(
        batch=batch,
        total_tokens=grad_TF.shape[0],
        width=width,
        out_width=out_width,
        element_bytes=grad_TF.element_size(),
        has_bias=has_bias,
    )


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def jagged_dense_bmm(
    values_TD: Tensor,
    layout: Layout,
    dense_BDF: Tensor,
    *,
    bias_BF: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Multiply the tokens of each sequence by a matrix of its own.

        out[t] = values[t] · dense[b] + bias[b]   for every token t of sequence b

    Args:
        values_TD: tokens, fp32, fp64, bf16 or fp16.
        layout: where the sequences begin.
        dense_BDF: one matrix a sequence, same dtype.
        bias_BF: one row a sequence, same dtype; None adds nothing.
        impl: who computes it; see ``gem_opkit.impl``. ``"auto"`` takes the reference for fp64.

    Returns:
        out_TF in the dtype of the values.

    Raises:
        ShapeError: dims that do not fit each other or the layout.
        DtypeError: values that are not floating point, or different dtypes.
        DeviceError: tensors on different devices.
        UnsupportedError: an ``impl`` that cannot run here; ``"triton"`` takes no fp64.

    Numerics: multiplies in the dtype of the values without TF32 and sums in fp32 (the reference in
        fp64 for fp64); one rounding at the end. The sums of the backward have a fixed order.
    Cost: 2·T·D·F FLOPs, twice that backward. Backward holds fp32 sums for sequences longer than
        8·max(D, F) tokens (256 to 8192).
    Source: fbgemm's ``jagged_dense_bmm``; with a bias, generative-recommenders'
        ``jagged_dense_bmm_broadcast_add``.
    """
    check_is_tensor(_NAME, values_TD, name="values_TD")
    check_is_layout(_NAME, layout, name="layout")
    check_shapes(
        _NAME,
        values_TD=values_TD,
        offsets_O=layout.offsets_O,
        dense_BDF=dense_BDF,
        bias_BF=bias_BF,
    )
    check_layout(_NAME, values_TD, layout, name="values_TD", layout_name="layout")
    check_floating(_NAME, values_TD, name="values_TD")
    for name, tensor in (("dense_BDF", dense_BDF), ("bias_BF", bias_BF)):
        if tensor is not None:
            check_same_device(_NAME, tensor, values_TD, name=name, like_name="values_TD")
            check_same_dtype(_NAME, tensor, values_TD, name=name, like_name="values_TD")
    check_autograd(_NAME, values_TD=values_TD, dense_BDF=dense_BDF, bias_BF=bias_BF)
    chosen = _choose(impl, values_TD)
    return torch.ops.gem_jagged.jagged_dense_bmm(
        values_TD, layout.offsets_O, dense_BDF, bias_BF, layout.max_length, chosen
    )

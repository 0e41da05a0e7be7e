"""The operator ``gated_residual``: schema, kernels, fakes, autograd, FLOP formulas, function."""

from typing import Any

import torch
from torch import Tensor

from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import DeviceError, DtypeError, refusal
from gem_opkit.impl import Impl, resolve_impl
from gem_precision.kernels.gated_residual.cost import (
    gated_residual_backward_cost,
    gated_residual_cost,
)
from gem_precision.kernels.gated_residual.reference import (
    gated_residual_backward_reference,
    gated_residual_reference,
)

_NAME = "gated_residual"
_HAS_TRITON = True


@torch.library.custom_op("gem_precision::gated_residual", mutates_args=())
def _forward(x_TD: Tensor, out_TD: Tensor, gate_BD: Tensor, offsets_O: Tensor, impl: str) -> Tensor:
    if resolve_impl(impl, x_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.gated_residual.kernel import launch_forward

        return launch_forward(x_TD, out_TD, gate_BD, offsets_O)
    return gated_residual_reference(x_TD, out_TD, gate_BD, offsets_O)


@_forward.register_fake
def _(x_TD: Tensor, *_: Any) -> Tensor:
    return x_TD.new_empty(x_TD.shape)


@torch.library.custom_op("gem_precision::gated_residual_backward", mutates_args=())
def _backward(
    grad_TD: Tensor, out_TD: Tensor, gate_BD: Tensor, offsets_O: Tensor, impl: str
) -> tuple[Tensor, Tensor]:
    if resolve_impl(impl, grad_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.gated_residual.kernel import launch_backward

        return launch_backward(grad_TD, out_TD, gate_BD, offsets_O)
    return gated_residual_backward_reference(grad_TD, out_TD, gate_BD, offsets_O)


@_backward.register_fake
def _(grad_TD: Tensor, out_TD: Tensor, gate_BD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return out_TD.new_empty(out_TD.shape), gate_BD.new_empty(gate_BD.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, out_TD, gate_BD, offsets_O, ctx.impl = inputs
    ctx.save_for_backward(out_TD, gate_BD, offsets_O)


def _differentiate(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    grad_out, grad_gate = None, None
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        grad_out, grad_gate = torch.ops.gem_precision.gated_residual_backward(
            grad_TD, *ctx.saved_tensors, ctx.impl
        )
    return grad_TD, grad_out, grad_gate, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _sizes(tokens_TD: Tensor, gate_BD: Tensor) -> dict[str, int]:
    return {
        "batch": gate_BD.shape[0],
        "total_tokens": tokens_TD.shape[0],
        "width": tokens_TD.shape[1],
        "element_bytes": tokens_TD.element_size(),
    }


def _forward_cost(x_TD: Tensor, out_TD: Tensor, gate_BD: Tensor, *_: Any) -> Cost:
    return gated_residual_cost(**_sizes(x_TD, gate_BD))


def _backward_cost(grad_TD: Tensor, out_TD: Tensor, gate_BD: Tensor, *_: Any) -> Cost:
    return gated_residual_backward_cost(**_sizes(out_TD, gate_BD))


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def gated_residual(
    x_TD: Tensor, out_TD: Tensor, gate_BD: Tensor, offsets_O: Tensor, *, impl: Impl = "auto"
) -> Tensor:
    """Add to packed tokens what a gate of their sequence lets through.

        y[t] = x[t] + gate[b(t)] * out[t]

    Args:
        x_TD: tokens, fp32, fp64, bf16 or fp16.
        out_TD: what is added, any floating dtype.
        gate_BD: a factor for each column of each sequence, any floating dtype.
        offsets_O: where sequences begin, int32 or int64, on the device of the tokens; the last one
            is T. Sequences may be empty.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        y_TD in the dtype of x. Differentiable once, by tokens, what is added, and gates.

    Raises:
        ShapeError: tensors that do not fit each other.
        DtypeError: a tensor that is not floating point, offsets that are not integers.
        DeviceError: tensors on different devices.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: everything in fp32 (fp64 where any input is) and rounded once; the gradient of a gate
        is summed in an order that its sequence alone decides.
    Cost: reads both tensors of tokens and writes one, backward likewise; nothing of their size is
        kept but ``out``.
    Source: InterFormer (arXiv:2411.09852).
    """
    check_shapes(_NAME, x_TD=x_TD, out_TD=out_TD, gate_BD=gate_BD, offsets_O=offsets_O)
    for name, tensor in (("out_TD", out_TD), ("gate_BD", gate_BD), ("offsets_O", offsets_O)):
        if tensor.device != x_TD.device:
            raise DeviceError(
                refusal(_NAME, name, must=f"be on {x_TD.device}", got=tensor.device, fix="move it")
            )
    for name, tensor in (("x_TD", x_TD), ("out_TD", out_TD), ("gate_BD", gate_BD)):
        if not tensor.dtype.is_floating_point:
            raise DtypeError(
                refusal(_NAME, name, must="be floating point", got=tensor.dtype, fix="convert it")
            )
    if offsets_O.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            refusal(
                _NAME, "offsets_O", must="be int32 or int64", got=offsets_O.dtype, fix="convert it"
            )
        )
    check_autograd(_NAME, x_TD=x_TD, out_TD=out_TD, gate_BD=gate_BD)
    return torch.ops.gem_precision.gated_residual(
        x_TD,
        out_TD,
        gate_BD,
        offsets_O,
        resolve_impl(impl, x_TD.device, _NAME, has_triton=_HAS_TRITON),
    )

"""The operator ``grouped_linear``: schema, kernels, fake, autograd, FLOP formula, function."""

from typing import Any

import torch
from torch import Tensor

from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import DeviceError, DtypeError, ShapeError, refusal
from gem_opkit.impl import Impl, resolve_impl
from gem_precision.kernels.grouped_linear.cost import (
    grouped_linear_backward_cost,
    grouped_linear_cost,
)
from gem_precision.kernels.grouped_linear.reference import (
    grouped_linear_backward_reference,
    grouped_linear_reference,
)

_NAME = "grouped_linear"
_HAS_TRITON = True
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("gem_precision::grouped_linear", mutates_args=())
def _forward(x_TD: Tensor, weight_XFD: Tensor, offsets_O: Tensor, impl: str) -> Tensor:
    if offsets_O.device.type == "cpu":
        # Here and not in the function: tensors without values do not come this far.
        _check_edges(offsets_O.tolist(), x_TD.shape[0])
    if resolve_impl(impl, x_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.grouped_linear.kernel import launch_forward

        return launch_forward(x_TD, weight_XFD, offsets_O)
    return grouped_linear_reference(x_TD, weight_XFD, offsets_O)


@_forward.register_fake
def _(x_TD: Tensor, weight_XFD: Tensor, offsets_O: Tensor, impl: str) -> Tensor:
    return x_TD.new_empty(x_TD.shape[0], weight_XFD.shape[1])


@torch.library.custom_op("gem_precision::grouped_linear_backward", mutates_args=())
def _backward(
    grad_TF: Tensor, x_TD: Tensor, weight_XFD: Tensor, offsets_O: Tensor, impl: str
) -> tuple[Tensor, Tensor]:
    if resolve_impl(impl, x_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.grouped_linear.kernel import launch_backward

        return launch_backward(grad_TF, x_TD, weight_XFD, offsets_O)
    return grouped_linear_backward_reference(grad_TF, x_TD, weight_XFD, offsets_O)


@_backward.register_fake
def _(
    grad_TF: Tensor, x_TD: Tensor, weight_XFD: Tensor, offsets_O: Tensor, impl: str
) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(x_TD.shape), weight_XFD.new_empty(weight_XFD.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.impl = inputs[3]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.gem_precision.grouped_linear_backward(grad, *ctx.saved_tensors, ctx.impl)
    return *grads, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _sizes(x_TD: Tensor, weight_XFD: Tensor) -> dict[str, int]:
    rows, width = x_TD.shape
    return {
        "rows": rows,
        "experts": weight_XFD.shape[0],
        "width": width,
        "columns": weight_XFD.shape[1],
        "element_bytes": x_TD.element_size(),
    }


def _forward_cost(x_TD: Tensor, weight_XFD: Tensor, *_: Any) -> Cost:
    return grouped_linear_cost(**_sizes(x_TD, weight_XFD))


def _backward_cost(grad_TF: Tensor, x_TD: Tensor, weight_XFD: Tensor, *_: Any) -> Cost:
    return grouped_linear_backward_cost(**_sizes(x_TD, weight_XFD))


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def grouped_linear(
    x_TD: Tensor, weight_XFD: Tensor, offsets_O: Tensor, *, impl: Impl = "auto"
) -> Tensor:
    """Map the rows of several experts, each by its own weight, in one launch.

        y[t] = W[e] x[t]   for   offsets[e] <= t < offsets[e + 1]

    For several experts that one rank holds. Any number of rows, 0 too, and any widths.

    Args:
        x_TD: rows sorted by expert; fp32, bf16 or fp16, by ``"reference"`` also fp64.
        weight_XFD: a weight an expert, of the dtype of x.
        offsets_O: first row of each expert and the end of the last, int32, non-decreasing, from 0
            to at most T. It stays on the device.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        y_TF, in the dtype of x. Rows from the last offset on are zeros, and so are their
        gradients; what stands in them is not read.

    Raises:
        ShapeError, DtypeError, DeviceError: an argument breaks its suffix, dtype or device; offsets
            in host memory that fall, do not begin at 0 or end behind the rows.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: sums in fp32. The gradient of an expert without rows is exactly zero.
    Cost: 2·T·D·F FLOPs; x and the weights read once, y written once.
    Source: MegaBlocks (arXiv:2211.15841) for the grouped product.
    """
    check_shapes(_NAME, x_TD=x_TD, weight_XFD=weight_XFD, offsets_O=offsets_O)
    experts = weight_XFD.shape[0]
    if offsets_O.shape[0] != experts + 1:
        raise ShapeError(
            refusal(_NAME, "offsets_O", must=f"have {experts + 1} entries, one more than experts",
                    got=offsets_O.shape[0], fix="give the first row of each, and the end")
        )  # fmt: skip
    if offsets_O.dtype != torch.int32:
        raise DtypeError(
            refusal(_NAME, "offsets_O", must="be int32", got=offsets_O.dtype, fix="convert it")
        )
    chosen = resolve_impl(impl, x_TD.device, _NAME, has_triton=_HAS_TRITON)
    known = _KERNEL_DTYPES if chosen == "triton" else (*_KERNEL_DTYPES, torch.float64)
    if x_TD.dtype not in known:
        raise DtypeError(
            refusal(_NAME, "x_TD", must="be fp32, bf16 or fp16", got=x_TD.dtype, fix="convert it")
        )
    if weight_XFD.dtype != x_TD.dtype:
        raise DtypeError(
            refusal(_NAME, "weight_XFD", must=f"be {x_TD.dtype}, as x_TD", got=weight_XFD.dtype,
                    fix="convert one of them")
        )  # fmt: skip
    for name, tensor in (("weight_XFD", weight_XFD), ("offsets_O", offsets_O)):
        if tensor.device != x_TD.device:
            raise DeviceError(
                refusal(_NAME, name, must=f"be on {x_TD.device}", got=tensor.device, fix="move it")
            )
    check_autograd(_NAME, x_TD=x_TD, weight_XFD=weight_XFD)
    return torch.ops.gem_precision.grouped_linear(x_TD, weight_XFD, offsets_O, chosen)


def _check_edges(edges: list[int], rows: int) -> None:
    order = [0, *edges, rows]
    if edges[0] == 0 and order == sorted(order):
        return
    raise ShapeError(
        refusal(
            _NAME,
            "offsets_O",
            must=f"begin at 0, never fall, and end at {rows} rows at most",
            got=edges,
            fix="give the running sum of the rows of each expert",
        )
    )

"""A norm and the 8-bit linear map behind it: the norm is quantised where it is computed.

Where that is one pass, the normalised tokens are never in memory in 16 bits. MXFP8 keeps their
bytes along tokens for the gradient of the weight; where that product is in bf16 the norm is formed
again in the backward, from its input. Left out: dropout, and what is added behind a norm.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_opkit.errors import ConfigError, refusal
from gem_opkit.impl import Impl, resolve_impl
from gem_precision.contract import LinearFormats
from gem_precision.kernels.norm_quantize.op import (
    NormKind,
    norm_block_quantize,
    norm_quantize,
    norm_quantize_both,
)
from gem_precision.kernels.quantized_linear.op import check_formats, check_operands
from gem_precision.kernels.row_norm.op import WIDEST, layer_norm, rms_norm

_OP = "normed_quantized_linear"


class _NormedQuantizedLinear(torch.autograd.Function):
    """y = Q(norm(x + before)) Q(W)ᵀ; the backward takes Q as the identity."""

    @staticmethod
    def forward(  # noqa: PLR0913 - what the function takes
        ctx: Any,
        x_TD: Tensor,
        before_TD: Tensor | None,
        gain_D: Tensor | None,
        weight_FD: Tensor,
        kind: NormKind,
        formats: LinearFormats,
        eps: float,
        impl: Impl,
    ) -> Tensor:
        given: dict[str, Any] = {"kind": kind, "before_TD": before_TD, "gain_D": gain_D}
        given |= {"eps": eps, "impl": impl}
        name, last, kept = formats.forward, formats.weight_gradient, ()
        if name == "fp8_block":
            matrix = norm_block_quantize(x_TD, **given)
        else:
            given["scaling"] = name
            if last == name and ctx.needs_input_grad[3]:
                matrix, by_columns = norm_quantize_both(x_TD, **given)
                kept = (by_columns.elements_TD, by_columns.scales)
            else:
                matrix = norm_quantize(x_TD, **given)
        ctx.save_for_backward(x_TD, before_TD, gain_D, weight_FD, *kept)
        ctx.given = (kind, formats, eps, impl)
        return torch.ops.gem_precision.product_of_bytes(
            matrix.elements_TD, matrix.scales, weight_FD, name, x_TD.dtype, impl
        )

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's own type
        ctx: Any, grad_TF: Tensor
    ) -> tuple[Tensor | None, ...]:
        x_TD, before_TD, gain_D, weight_FD, *kept = ctx.saved_tensors
        kind, formats, eps, impl = ctx.given
        needs_norm, needs_weight = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        backward = torch.ops.gem_precision.quantized_linear_backward
        products = (formats.input_gradient, formats.weight_gradient)
        found: list[Tensor | None] = [None, None, None, None]
        if needs_norm:
            grad_n_TD, _ = backward(
                grad_TF, x_TD, weight_FD, *products, needs_x=True, needs_weight=False, impl=impl
            )
            grad_a_TD, grad_gain_D = torch.ops.gem_precision.row_norm_backward(
                grad_n_TD,
                x_TD,
                before_TD,
                gain_D,
                centred=kind == "layer",
                swish=False,
                eps=eps,
                impl=impl,
            )
            found[0] = grad_a_TD
            found[1] = None if before_TD is None else grad_a_TD
            found[2] = None if gain_D is None else grad_gain_D
        if needs_weight and kept:
            # The transposed product, whose first factor is in bytes.
            grad_weight_DF = torch.ops.gem_precision.product_of_bytes(
                kept[0].T.contiguous(), kept[1].T.contiguous(), grad_TF.T,
                formats.weight_gradient, weight_FD.dtype, impl,
            )  # fmt: skip
            found[3] = grad_weight_DF.T
        elif needs_weight:
            norm = rms_norm if kind == "rms" else layer_norm
            n_TD = norm(x_TD, before=before_TD, gain_D=gain_D, eps=eps, impl=impl)
            _, found[3] = backward(
                grad_TF, n_TD, weight_FD, *products, needs_x=False, needs_weight=True, impl=impl
            )
        asked = zip(found, ctx.needs_input_grad[:4], strict=True)
        return *(g if is_asked else None for g, is_asked in asked), None, None, None, None


def normed_quantized_linear(
    x_TD: Tensor,
    weight_FD: Tensor,
    *,
    formats: LinearFormats,
    kind: NormKind = "rms",
    before_TD: Tensor | None = None,
    gain_D: Tensor | None = None,
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> Tensor:
    """Normalise rows and map them by a weight in 8 bits, the norm quantised in its own pass.

        y = Q(norm(x + before) · gain) Q(W)ᵀ

    Args:
        x_TD: fp32, bf16 or fp16.
        weight_FD: fp32, bf16 or fp16; may differ from x.
        formats: of the three products; that of the output is below bf16.
        kind: ``"rms"`` or ``"layer"``.
        before_TD: added first; dtype and shape of x.
        gain_D: a gain for each column.
        eps: added to the mean square or the variance, above 0.
        impl: who computes it; see ``gem_opkit.impl``. ``auto`` gives rows of more than 16,384
            elements to the reference.

    Returns:
        y_TF in the dtype of x; differentiable once, by all four tensors.

    Raises:
        ShapeError, DtypeError, DeviceError: arguments that do not fit together.
        ConfigError: an output in bf16, which a norm and a linear map give by themselves.
        UnsupportedError: an ``impl`` that cannot run here, or a format that this GPU lacks.

    Numerics: output and gradients of the norm and ``quantized_linear`` one after the other; the
        bytes of the normalised rows are the same, sums of the weight's gradient in MXFP8 may have
        another order.
    Cost: the norm and its quantising are one pass, but where ``norm_quantize`` takes two kernels;
        it writes a byte an element, or two.
    Source: Meta's GEM training article, for quantising activations inside the norm before them.
    """
    if formats.forward == "bf16":
        raise ConfigError(
            refusal(_OP, "formats.forward", must="be below bf16", got="bf16",
                    fix="use rms_norm or layer_norm, and a linear layer")
        )  # fmt: skip
    check_operands(_OP, x_TD, weight_FD)
    # Of wider rows there is no norm in a kernel; asked for by name, its own message refuses them.
    has_triton = impl == "triton" or x_TD.shape[1] <= WIDEST
    chosen = resolve_impl(impl, x_TD.device, _OP, has_triton=has_triton)
    if chosen == "triton":
        check_formats(formats, x_TD.device)
    return _NormedQuantizedLinear.apply(
        x_TD, before_TD, gain_D, weight_FD, kind, formats, eps, chosen
    )

"""The operator ``normed_linear``: schema, kernels, fake, autograd, FLOP formula, function."""

import logging
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    ShapeError,
    UnsupportedError,
    refusal,
)
from gem_opkit.impl import Impl, resolve_impl
from gem_precision.kernels.normed_linear.cost import (
    normed_linear_backward_cost,
    normed_linear_cost,
)
from gem_precision.kernels.normed_linear.reference import (
    normed_linear_backward_reference,
    normed_linear_reference,
    split_by_gain,
)
from gem_precision.kernels.row_norm.op import WIDEST, layer_norm, rms_norm

_NAME = "normed_linear"
_log = logging.getLogger(__name__)
_announced: set[tuple[Any, ...]] = set()
_HALVES = (torch.bfloat16, torch.float16)


def _takes(x_TD: Tensor) -> bool:
    """Say whether the kernel takes tokens, given a device that runs it."""
    dtypes = _HALVES if x_TD.is_cuda else (torch.float32, torch.float16)
    fits = x_TD.dtype in dtypes
    # Not one expression: of a width that a graph leaves open it would make a symbol.
    if not 0 < x_TD.shape[1] <= WIDEST:
        fits = False
    return fits


@torch.library.custom_op("gem_precision::normed_linear", mutates_args=())
def _forward(
    x_TD: Tensor,
    weight_FD: Tensor,
    gain_D: Tensor | None,
    centred: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    eps: float,
    impl: str,
) -> Tensor:
    if resolve_impl(impl, x_TD.device, _NAME, has_triton=_takes(x_TD)) == "triton":
        gained_FD, x_TD = _gained(weight_FD, gain_D), _with_rows(x_TD)
        sums_F = gained_FD.sum(1, dtype=torch.float32) if centred else None
        return _kernels(x_TD, gained_FD).launch_forward(x_TD, gained_FD, sums_F, eps=eps)
    return normed_linear_reference(x_TD, weight_FD, gain_D, centred=centred, eps=eps)


@_forward.register_fake
def _(x_TD: Tensor, weight_FD: Tensor, *_: Any) -> Tensor:
    return x_TD.new_empty((x_TD.shape[0], weight_FD.shape[0]))


@torch.library.custom_op("gem_precision::normed_linear_backward", mutates_args=())
def _backward(
    grad_TF: Tensor,
    x_TD: Tensor,
    weight_FD: Tensor,
    gain_D: Tensor | None,
    centred: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    eps: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if resolve_impl(impl, x_TD.device, _NAME, has_triton=_takes(x_TD)) == "triton":
        # Products by the library. The normalised tokens are formed again, not kept.
        norm = layer_norm if centred else rms_norm
        grad_n_TD = grad_TF @ _gained(weight_FD, gain_D)
        grad_x_TD, _ = torch.ops.gem_precision.row_norm_backward(
            grad_n_TD, x_TD, None, None, centred=centred, swish=False, eps=eps, impl=impl
        )
        grad_gained_FD = grad_TF.T @ norm(x_TD, eps=eps, impl="triton")
        grad_weight_FD, grad_gain_D = split_by_gain(grad_gained_FD, weight_FD, gain_D)
        return grad_x_TD, grad_weight_FD, grad_gain_D
    grad_x_TD, grad_weight_FD, grad_gain_D = normed_linear_backward_reference(
        grad_TF, x_TD, weight_FD, gain_D, centred=centred, eps=eps
    )
    return grad_x_TD.contiguous(), grad_weight_FD, grad_gain_D


@_backward.register_fake
def _(
    grad_TF: Tensor, x_TD: Tensor, weight_FD: Tensor, gain_D: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    gains = x_TD.new_empty(0, dtype=weight_FD.dtype)
    gains = gains if gain_D is None else gain_D.new_empty(gain_D.shape)
    return x_TD.new_empty(x_TD.shape), weight_FD.new_empty(weight_FD.shape), gains


def _kernels(x_TD: Tensor, gained_FD: Tensor) -> ModuleType:
    """Return the module whose launcher runs."""
    from gem_precision.kernels.normed_linear import kernel

    if _is_on_hopper(x_TD, gained_FD):
        from gem_precision.kernels.normed_linear import kernel_sm90

        return kernel_sm90
    return kernel


def _is_on_hopper(x_TD: Tensor, weight_FD: Tensor) -> bool:
    if not x_TD.is_cuda or torch.version.cuda is None:
        return False
    from gem_precision.kernels.normed_linear.kernel_sm90 import supports

    return supports(x_TD, weight_FD)


def _kernel_wins(x_TD: Tensor, weight_FD: Tensor, gain_D: Tensor | None) -> bool:
    """Say whether the kernel is faster than a norm's and the library's product.

    Measured on Hopper in a forward alone. A backward forms the normalised tokens again, which takes
    longer than the forward has won.
    """
    if torch.compiler.is_compiling():
        return False
    given = [t for t in (x_TD, weight_FD, gain_D) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return False
    return _is_on_hopper(x_TD, weight_FD)


def _gained(weight_FD: Tensor, gain_D: Tensor | None) -> Tensor:
    """Return the weights with their gain, rounded once, as the product reads them."""
    return _with_rows(weight_FD if gain_D is None else weight_FD * gain_D)


def _with_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.rest = inputs[3:]


def _differentiate(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
    x_TD, weight_FD, gain_D = ctx.saved_tensors
    grad_x, grad_weight, grad_gain = torch.ops.gem_precision.normed_linear_backward(
        grad_TF, x_TD, weight_FD, gain_D, *ctx.rest
    )
    return grad_x, grad_weight, None if gain_D is None else grad_gain, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _sizes(x_TD: Tensor, weight_FD: Tensor, gain_D: Tensor | None) -> dict[str, Any]:
    return {
        "tokens": x_TD.shape[0],
        "width": x_TD.shape[1],
        "out_width": weight_FD.shape[0],
        "element_bytes": x_TD.element_size(),
        "affine": gain_D is not None,
    }


def _forward_cost(x_TD: Tensor, weight_FD: Tensor, gain_D: Tensor | None, *_: Any) -> Cost:
    return normed_linear_cost(**_sizes(x_TD, weight_FD, gain_D))


def _backward_cost(
    _grad: Tensor, x_TD: Tensor, weight_FD: Tensor, gain_D: Tensor | None, *_: Any
) -> Cost:
    return normed_linear_backward_cost(**_sizes(x_TD, weight_FD, gain_D))


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def normed_linear(
    x_TD: Tensor,
    weight_FD: Tensor,
    *,
    kind: Literal["rms", "layer"] = "rms",
    gain_D: Tensor | None = None,
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> Tensor:
    """Normalise tokens and project them, the norm inside the product (lazy pre-norm).

        y = norm(x) Gᵀ = r (x Gᵀ − m c)      G = weight · gain      c[f] = Σ_d G[f, d]

    r is one over the root mean square of a token, or its standard deviation with ``kind="layer"``,
    m its mean, 0 with ``kind="rms"``. There is no offset: the models carry no biases.

    Args:
        x_TD: tokens, fp32, fp64, bf16 or fp16, any strides.
        weight_FD: weights as ``torch.nn.Linear`` has them, dtype of x.
        kind: by what a token is divided.
        gain_D: a gain for each column, dtype of x; None for none.
        eps: added to the mean square, above 0.
        impl: who computes it; see ``gem_opkit.impl``. The kernels take bf16 and fp16 and tokens of
            at most 16,384 elements; ``auto`` gives other tokens to the reference. Of these it gives
            to a kernel what is faster in it (docs/kernels/normed_linear.md): on Hopper, without
            gradients, tokens of 64, 128, … 512 elements. The rest it gives, and says so in the
            log, to a norm's kernel and the library's product.

    Returns:
        y_TF in the dtype of x; differentiable once, by tokens, weights and gain.

    Raises:
        ShapeError: shapes that do not fit together.
        DtypeError, DeviceError: operands of different or unknown dtypes, or devices.
        ConfigError: an eps that is not above 0, or an unknown kind.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: the kernel multiplies tokens as they are, where a norm before the product rounds the
        normalised ones; sums in fp32. G is rounded to the dtype of x. With ``kind="layer"`` the
        mean is taken off the finished sum, so that a token whose mean is far above its deviation
        loses bits of fp32, not of bf16.
    Cost: 2·T·D·F FLOPs forward and 4·T·D·F backward. Tokens are read once, and nothing but the
        inputs is kept: the backward forms the normalised tokens again.
    Source: Meta's article on norm fusion.
    """
    check_shapes(_NAME, x_TD=x_TD, weight_FD=weight_FD, gain_D=gain_D)
    if not x_TD.dtype.is_floating_point:
        raise DtypeError(
            refusal(_NAME, "x_TD", must="be floating point", got=x_TD.dtype, fix="convert it")
        )
    for name, tensor in (("weight_FD", weight_FD), ("gain_D", gain_D)):
        if tensor is None:
            continue
        if tensor.dtype != x_TD.dtype:
            raise DtypeError(
                refusal(_NAME, name, must=f"be {x_TD.dtype} like x_TD", got=tensor.dtype,
                        fix="convert it")
            )  # fmt: skip
        if tensor.device != x_TD.device:
            raise DeviceError(
                refusal(_NAME, name, must=f"be on {x_TD.device} like x_TD", got=tensor.device,
                        fix="move it")
            )  # fmt: skip
    if x_TD.shape[1] == 0:
        raise ShapeError(
            refusal(_NAME, "x_TD", must="have columns", got=0, fix="there is nothing to normalise")
        )
    if kind not in ("rms", "layer"):
        raise ConfigError(
            refusal(_NAME, "kind", must='be "rms" or "layer"', got=kind, fix='use "rms"')
        )
    if not eps > 0:
        raise ConfigError(
            refusal(_NAME, "eps", must="be above 0", got=eps, fix="it keeps a row of zeros finite")
        )
    check_autograd(_NAME, x_TD=x_TD, weight_FD=weight_FD, gain_D=gain_D)
    has_kernel = _takes(x_TD)
    if impl == "triton" and not has_kernel:
        raise UnsupportedError(
            refusal(
                _NAME,
                'impl="triton"',
                must=f"have bfloat16 or float16 on a GPU, and at most {WIDEST} columns",
                got=f"{x_TD.dtype} of {x_TD.shape[1]} columns",
                fix='use impl="reference", or a norm and torch.nn.functional.linear',
            )
        )
    chosen = resolve_impl(impl, x_TD.device, _NAME, has_triton=has_kernel)
    if impl == "auto" and chosen == "triton" and not _kernel_wins(x_TD, weight_FD, gain_D):
        return _apart(x_TD, weight_FD, gain_D, kind=kind, eps=eps)
    return torch.ops.gem_precision.normed_linear(
        x_TD, weight_FD, gain_D, kind == "layer", eps, chosen
    )


def _apart(
    x_TD: Tensor, weight_FD: Tensor, gain_D: Tensor | None, *, kind: str, eps: float
) -> Tensor:
    """Return the same by the norm's kernel and the library's product, and say so once."""
    key = (x_TD.device.type, x_TD.dtype, x_TD.shape[1], weight_FD.shape[0])
    if key not in _announced:
        _announced.add(key)
        _log.info("%s: auto takes a norm and a product for %s, %s, D=%d, F=%d", _NAME, *key)
    norm = rms_norm if kind == "rms" else layer_norm
    return F.linear(norm(x_TD, gain_D=gain_D, eps=eps), weight_FD)

"""The operator ``row_norm``: schema, kernels, fake, autograd, FLOP formula, functions."""

from typing import Any

import torch
from torch import Tensor

from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    ShapeError,
    UnsupportedError,
    refusal,
)
from gem_opkit.impl import Impl, resolve_impl
from gem_precision.kernels.row_norm.cost import row_norm_backward_cost, row_norm_cost
from gem_precision.kernels.row_norm.reference import (
    dtype_of,
    row_norm_backward_reference,
    row_norm_reference,
)

_NAME = "row_norm"
_HAS_TRITON = True
WIDEST = 16_384  # elements of a row that a kernel holds


@torch.library.custom_op("gem_precision::row_norm", mutates_args=())
def _forward(
    x: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    gain_D: Tensor | None,
    centred: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    swish: bool,  # noqa: FBT001
    eps: float,
    impl: str,
    # Behind impl, so that callers of the operator that drop nothing need not say so.
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    given: dict[str, Any] = {"centred": centred, "swish": swish, "eps": eps}
    given |= {"dropout": dropout, "seed": seed}
    out_dtype = dtype_of(x, before, after)
    if resolve_impl(impl, x.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.row_norm.kernel import launch_forward

        return launch_forward(x, before, after, gain_D, out_dtype=out_dtype, **given)
    y = row_norm_reference(x, before, after, gain_D, out_dtype=out_dtype, **given)
    return y.contiguous()


@_forward.register_fake
def _(x: Tensor, before: Tensor | None, after: Tensor | None, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype_of(x, before, after))


@torch.library.custom_op("gem_precision::row_norm_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    before: Tensor | None,
    gain_D: Tensor | None,
    centred: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    swish: bool,  # noqa: FBT001
    eps: float,
    impl: str,
    # Behind impl, so that callers of the operator that have none of it need not name it.
    added: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    given: dict[str, Any] = {"centred": centred, "swish": swish, "eps": eps}
    given |= {"dropout": dropout, "seed": seed}
    if resolve_impl(impl, x.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.row_norm.kernel import launch_backward

        return launch_backward(grad, x, before, gain_D, added, **given)
    grad_a, grad_gain = row_norm_backward_reference(grad, x, before, gain_D, added, **given)
    return grad_a.contiguous(), grad_gain


@_backward.register_fake
def _(
    grad: Tensor, x: Tensor, before: Tensor | None, gain_D: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    gains = x.new_empty(0) if gain_D is None else torch.empty_like(gain_D)
    return x.new_empty(x.shape, dtype=dtype_of(x, before)), gains


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, before, after, gain_D, *ctx.given = inputs
    ctx.save_for_backward(x, before, gain_D)
    ctx.after_dtype = None if after is None else after.dtype


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, before, gain_D = ctx.saved_tensors
    grads: list[Tensor | None] = [None, None, None, None]
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1] or ctx.needs_input_grad[3]:
        *given, dropout, seed = ctx.given
        grad_a, grad_gain = torch.ops.gem_precision.row_norm_backward(
            grad, x, before, gain_D, *given, None, dropout, seed
        )
        grads[0] = grad_a.to(x.dtype)
        grads[1] = None if before is None else grad_a.to(before.dtype)
        grads[3] = None if gain_D is None else grad_gain
    if ctx.after_dtype is not None:
        grads[2] = grad.to(ctx.after_dtype)
    return *grads, *[None] * len(ctx.given)


_forward.register_autograd(_differentiate, setup_context=_save)


def _sizes(x: Tensor) -> dict[str, int]:
    width = x.shape[-1]
    return {
        "rows": x.numel() // max(1, width),
        "width": width,
        "element_bytes": x.element_size(),
    }


def _forward_cost(
    x: Tensor, before: Tensor | None, after: Tensor | None, gain_D: Tensor | None, *_: Any
) -> Cost:
    fused = {"before": before is not None, "after": after is not None}
    return row_norm_cost(**_sizes(x), affine=gain_D is not None, **fused)


def _backward_cost(
    grad: Tensor, x: Tensor, before: Tensor | None, gain_D: Tensor | None, *rest: Any
) -> Cost:
    # Centred, swish, eps, impl, and what is added.
    added = len(rest) > 4 and rest[4] is not None
    given = {"before": before is not None, "affine": gain_D is not None, "added": added}
    return row_norm_backward_cost(**_sizes(x), **given)


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def rms_norm(
    x: Tensor,
    *,
    before: Tensor | None = None,
    after: Tensor | None = None,
    gain_D: Tensor | None = None,
    swish: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> Tensor:
    """Divide each row by its root mean square, and add what stands around it.

        a = x + before      n = a / sqrt(mean(a²) + ε) · gain
        y = n + after,  or with ``swish``  y = a σ(n) + after;  with dropout before ``after``

    Args:
        x: fp32, fp64, bf16 or fp16, of any shape with at least one dim; the last is normalised.
        before: added first; the shape of x, any floating dtype.
        after: added last; the shape of x, any floating dtype.
        gain_D: a gain for each column, (D,).
        swish: gate the row by its own norm.
        dropout: share of the elements that are set to 0 before ``after`` is added, in [0, 1); the
            others are divided by what is left of 1.
        seed: which elements: the same ones for the same seed, shape and share on every device,
            in [0, 2⁶³). Draw another one for every call.
        eps: added to the mean square, above 0, so that a row of zeros gives zeros.
        impl: who computes it; see ``gem_opkit.impl``. The kernel holds rows of up to 16,384
            elements; ``auto`` gives wider ones to the reference.

    Returns:
        y, contiguous, in the shape of x and the dtype that holds x, ``before`` and ``after``.
        Differentiable once, by all four tensors.

    Raises:
        ShapeError: a scalar, or another shape than that of x.
        DtypeError: a tensor that is not floating point.
        DeviceError: tensors on different devices.
        ConfigError: an eps that is not above 0, a dropout or a seed out of range.
        UnsupportedError: an ``impl`` that cannot run here; rows of more than 16,384 elements with
            ``impl="triton"``.

    Numerics: everything in fp32 (fp64 where any input is) and rounded once; the gradient of the
        gain is summed in a fixed order.
    Cost: reads each tensor once and writes y once, backward reads the gradient, x and ``before``
        and writes one gradient for both; nothing but the inputs is kept, and of dropout the seed.
    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """
    drop = (dropout, seed)
    return _norm(
        "rms_norm", x, before, after, gain_D, drop, centred=False, swish=swish, eps=eps, impl=impl
    )


def layer_norm(
    x: Tensor,
    *,
    before: Tensor | None = None,
    after: Tensor | None = None,
    gain_D: Tensor | None = None,
    swish: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> Tensor:
    """Subtract each row's mean, divide by its standard deviation, and add what stands around it.

        a = x + before      n = (a − mean(a)) / sqrt(var(a) + ε) · gain
        y = n + after,  or with ``swish``  y = a σ(n) + after;  with dropout before ``after``

    There is no offset: the models carry no biases.

    Args:
        x: fp32, fp64, bf16 or fp16, of any shape with at least one dim; the last is normalised.
        before: added first; the shape of x, any floating dtype.
        after: added last; the shape of x, any floating dtype.
        gain_D: a gain for each column, (D,).
        swish: gate the row by its own norm.
        dropout: share of the elements that are set to 0 before ``after`` is added, in [0, 1); the
            others are divided by what is left of 1.
        seed: which elements: the same ones for the same seed, shape and share on every device,
            in [0, 2⁶³). Draw another one for every call.
        eps: added to the variance, above 0.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        as ``rms_norm``.

    Raises:
        ShapeError, DtypeError, DeviceError, ConfigError, UnsupportedError: as ``rms_norm``.

    Numerics: as ``rms_norm``; the variance is that of the differences, not of the squares.
    Cost: as ``rms_norm``.
    Source: Ba et al. 2016 (arXiv:1607.06450).
    """
    drop = (dropout, seed)
    return _norm(
        "layer_norm", x, before, after, gain_D, drop, centred=True, swish=swish, eps=eps, impl=impl
    )


def _norm(
    op: str,
    x: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    gain_D: Tensor | None,
    drop: tuple[float, int],
    *,
    centred: bool,
    swish: bool,
    eps: float,
    impl: Impl,
) -> Tensor:
    if x.ndim == 0:
        raise ShapeError(refusal(op, "x", must="have a last dim", got="a scalar", fix="reshape it"))
    shapes = {
        "before": (before, x.shape),
        "after": (after, x.shape),
        "gain_D": (gain_D, x.shape[-1:]),
    }
    for name, (tensor, shape) in {"x": (x, x.shape), **shapes}.items():
        if tensor is not None:
            _check(op, name, tensor, shape, x)
    if not eps > 0:
        raise ConfigError(
            refusal(op, "eps", must="be above 0", got=eps, fix="it keeps a row of zeros finite")
        )
    dropout, seed = drop
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(
            refusal(op, "dropout", must="be in [0, 1)", got=dropout, fix="0 turns it off")
        )
    if not 0 <= seed < 2**63:
        raise ConfigError(
            refusal(op, "seed", must="be in [0, 2^63)", got=seed, fix="draw it from that range")
        )
    check_autograd(op, x=x, before=before, after=after, gain_D=gain_D)
    # Asked before anything is resolved, because the log says what is resolved.
    fits = True
    if x.shape[-1] > WIDEST:
        fits = False
    if impl == "triton" and not fits:
        raise UnsupportedError(
            refusal(
                op,
                "x",
                must=f"have rows of at most {WIDEST} elements for a Triton kernel",
                got=x.shape[-1],
                fix='use impl="reference"',
            )
        )
    chosen = resolve_impl(impl, x.device, op, has_triton=_HAS_TRITON and fits)
    return torch.ops.gem_precision.row_norm(
        x, before, after, gain_D, centred, swish, eps, chosen, dropout, seed
    )


def _check(op: str, name: str, tensor: Tensor, shape: torch.Size, x: Tensor) -> None:
    if tensor.shape != shape:
        raise ShapeError(
            refusal(
                op, name, must=f"have the shape {tuple(shape)}", got=tuple(tensor.shape),
                fix="it is not broadcast",
            )
        )  # fmt: skip
    if not tensor.dtype.is_floating_point:
        raise DtypeError(
            refusal(op, name, must="be floating point", got=tensor.dtype, fix="convert it")
        )
    if tensor.device != x.device:
        raise DeviceError(
            refusal(op, name, must=f"be on {x.device}", got=tensor.device, fix="move it")
        )

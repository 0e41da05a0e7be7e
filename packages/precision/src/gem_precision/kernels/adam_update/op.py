"""The operator ``adam_update``: schema, kernels, fake, FLOP formula, function."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gem_opkit.cost import Cost, register_flops
from gem_opkit.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    ShapeError,
    UnsupportedError,
    refusal,
)
from gem_opkit.impl import Impl, resolve_impl
from gem_precision.kernels.adam_update.cost import adam_update_cost
from gem_precision.kernels.adam_update.reference import adam_update_reference

_NAME = "adam_update"
_HAS_TRITON = True


@torch.library.custom_op(
    "gem_precision::adam_update", mutates_args=("weights", "means", "squares", "copies")
)
def _update(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor],
    factor: Tensor | None,
    rates: Sequence[float],
    decays: Sequence[float],
    beta1: float,
    beta2: float,
    eps: float,
    impl: str,
) -> None:
    if not weights:
        return
    given = {"beta1": beta1, "beta2": beta2, "eps": eps}
    args = (weights, gradients, means, squares, steps, copies, factor, rates, decays)
    if resolve_impl(impl, weights[0].device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.adam_update.kernel import launch

        launch(*args, **given)
    else:
        adam_update_reference(*args, **given)


@_update.register_fake
def _(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor],
    factor: Tensor | None,
    rates: Sequence[float],
    decays: Sequence[float],
    beta1: float,
    beta2: float,
    eps: float,
    impl: str,
) -> None:
    return None


def _cost(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Any,
    squares: Any,
    steps: Any,
    copies: Sequence[Tensor],
    *_: Any,
) -> Cost:
    total = Cost(flops=0, bytes=0)
    for weight, gradient in zip(weights, gradients, strict=True):
        total = total + adam_update_cost(
            elements=weight.numel(),
            gradient_bytes=gradient.element_size(),
            copied=bool(copies),
            element_bytes=weight.element_size(),
        )
    return total


register_flops(_update, _cost)


def adam_update(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    rates: Sequence[float],
    decays: Sequence[float],
    beta1: float,
    beta2: float,
    eps: float,
    factor: Tensor | None = None,
    copies: Sequence[Tensor] = (),
    impl: Impl = "auto",
) -> None:
    """Move weights by Adam with decoupled decay, in place; gradients are clipped on the way.

        g = factor · gradient
        w ← w · (1 − rate · decay)
        m ← β₁ m + (1 − β₁) g       s ← β₂ s + (1 − β₂) g²
        w ← w − rate / (1 − β₁ᵗ) · m / (sqrt(s) / sqrt(1 − β₂ᵗ) + ε)

    Args:
        weights: fp32 (fp64 with the reference), contiguous, any shapes, on one device.
        gradients: one for each weight, of its shape, fp32 or bf16, contiguous.
        means: m, as the weights.
        squares: s, as the weights.
        steps: t, a scalar fp32 tensor for each weight, this step included.
        rates: the learning rate of each weight.
        decays: the decay of each weight; 0 for none.
        beta1: share of the mean that is kept, in [0, 1).
        beta2: share of the mean square that is kept, in [0, 1).
        eps: added to the root, at least 0.
        factor: scalar fp32 or fp64 tensor on the same device, such as that of clipping by norm;
            None for 1. No host reads it.
        copies: a bf16 tensor for each weight, set to it rounded; none at all leaves that out.
        impl: who computes it; see ``gem_opkit.impl``.

    Raises:
        ShapeError: lists of different lengths, or tensors of other shapes than their weights.
        DtypeError: weights or moments that are not fp32 (fp64), a gradient that is neither fp32
            nor bf16, a copy that is not bf16, a step that is not fp32, a factor that is
            neither fp32 nor fp64.
        DeviceError: tensors on different devices.
        ConfigError: a beta or an eps out of range.
        UnsupportedError: tensors that are not contiguous, or an ``impl`` that cannot run here.

    Numerics: fp32, and fp64 for the powers of the betas; every element by itself, so the same bits
        in every run.
    Cost: reads and writes weights and both moments once, reads the gradients once.
    Source: Kingma and Ba 2015 (arXiv:1412.6980); Loshchilov and Hutter 2019 (arXiv:1711.05101).
    """
    for name, value, good in (
        ("beta1", beta1, 0.0 <= beta1 < 1.0),
        ("beta2", beta2, 0.0 <= beta2 < 1.0),
        ("eps", eps, eps >= 0.0),
    ):
        if not good:
            raise ConfigError(
                refusal(
                    _NAME,
                    name,
                    must="be at least 0, a beta below 1",
                    got=value,
                    fix="0.9, 0.999 and 1e-8 are usual",
                )
            )
    lists = {"gradients": gradients, "means": means, "squares": squares, "copies": copies}
    counts = {name: len(given) for name, given in lists.items() if name != "copies" or copies}
    counts |= {"steps": len(steps), "rates": len(rates), "decays": len(decays)}
    for name, count in counts.items():
        if count != len(weights):
            raise ShapeError(
                refusal(
                    _NAME,
                    name,
                    must=f"have one entry for each of {len(weights)} weights",
                    got=count,
                    fix="pass lists of the same order",
                )
            )
    if not weights:
        return
    scalar = weights[0].new_empty(())
    for i, weight in enumerate(weights):
        _check(f"weights[{i}]", weight, weight, (torch.float32, torch.float64))
        for name, dtypes in (
            ("gradients", (weight.dtype, torch.bfloat16)),
            ("means", (weight.dtype,)),
            ("squares", (weight.dtype,)),
            ("copies", (torch.bfloat16,)),
        ):
            if lists[name]:
                _check(f"{name}[{i}]", lists[name][i], weight, dtypes)
        _check(f"steps[{i}]", steps[i], scalar, (torch.float32,))
    if factor is not None:
        _check("factor", factor, scalar, (torch.float32, torch.float64))
    chosen = resolve_impl(impl, weights[0].device, _NAME, has_triton=_HAS_TRITON)
    if chosen == "triton" and any(w.dtype != torch.float32 for w in weights):
        raise UnsupportedError(
            refusal(
                _NAME,
                "weights",
                must="be float32 for a Triton kernel",
                got=torch.float64,
                fix='use impl="reference"',
            )
        )
    torch.ops.gem_precision.adam_update(
        list(weights), list(gradients), list(means), list(squares), list(steps), list(copies),
        factor, list(rates), list(decays), beta1, beta2, eps, chosen,
    )  # fmt: skip


def _check(name: str, tensor: Tensor, like: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.shape != like.shape:
        raise ShapeError(
            refusal(
                _NAME,
                name,
                must=f"have the shape {tuple(like.shape)}",
                got=tuple(tensor.shape),
                fix="pass lists of the same order",
            )
        )
    if tensor.dtype not in dtypes:
        must = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise DtypeError(
            refusal(_NAME, name, must=f"be {must}", got=tensor.dtype, fix="convert it")
        )
    if tensor.device != like.device:
        raise DeviceError(
            refusal(_NAME, name, must=f"be on {like.device}", got=tensor.device, fix="move it")
        )
    if not tensor.is_contiguous():
        raise UnsupportedError(
            refusal(_NAME, name, must="be contiguous", got=tensor.stride(), fix="copy it")
        )

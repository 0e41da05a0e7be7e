"""The operator ``quantized_linear``: schema, kernels, fake, autograd, FLOP formula, functions."""

from typing import Any

import torch
from torch import Tensor

from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, UnsupportedError, refusal
from gem_opkit.impl import Impl, resolve_impl
from gem_precision.contract import GemmFormat, LinearFormats
from gem_precision.kernels.quantized_linear.cost import (
    quantized_linear_backward_cost,
    quantized_linear_cost,
)
from gem_precision.kernels.quantized_linear.reference import (
    product_of_bytes_reference,
    quantized_linear_backward_reference,
    quantized_linear_reference,
)

_NAME = "quantized_linear"
_HAS_TRITON = True
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8_SINCE = (8, 9)
# Made once: a contract cannot be built inside a compiled graph.
_NAMED: dict[str, LinearFormats] = {
    "bf16": LinearFormats(),
    "fp8_block": LinearFormats(forward="fp8_block", input_gradient="fp8_block"),
    "mxfp8_rceil": LinearFormats(
        forward="mxfp8_rceil", input_gradient="mxfp8_rceil", weight_gradient="mxfp8_rceil"
    ),
    "mxfp8_floor": LinearFormats(
        forward="mxfp8_floor", input_gradient="mxfp8_floor", weight_gradient="mxfp8_floor"
    ),
}


@torch.library.custom_op("gem_precision::quantized_linear", mutates_args=())
def _forward(
    x_TD: Tensor,
    weight_FD: Tensor,
    forward: str,
    input_gradient: str,
    weight_gradient: str,
    impl: str,
    seed: int | None = None,
    hadamard_seed: int | None = None,
) -> Tensor:
    turned = {"hadamard_seed": hadamard_seed}
    if resolve_impl(impl, x_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.quantized_linear.kernel import launch_forward

        return launch_forward(x_TD, weight_FD, forward=forward, **turned)
    return quantized_linear_reference(x_TD, weight_FD, forward, **turned)


@_forward.register_fake
def _(x_TD: Tensor, weight_FD: Tensor, *_: Any) -> Tensor:
    return x_TD.new_empty(x_TD.shape[0], weight_FD.shape[0])


@torch.library.custom_op("gem_precision::quantized_linear_backward", mutates_args=())
def _backward(
    grad_TF: Tensor,
    x_TD: Tensor,
    weight_FD: Tensor,
    input_gradient: str,
    weight_gradient: str,
    needs_x: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    needs_weight: bool,  # noqa: FBT001
    impl: str,
    seed: int | None = None,
    hadamard_seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    given: dict[str, Any] = {
        "formats": (input_gradient, weight_gradient),
        "needs": (needs_x, needs_weight),
        "seed": seed,
        "hadamard_seed": hadamard_seed,
    }
    if resolve_impl(impl, x_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.quantized_linear.kernel import launch_backward

        grad_x_TD, grad_weight_FD = launch_backward(grad_TF, x_TD, weight_FD, **given)
    else:
        grad_x_TD, grad_weight_FD = quantized_linear_backward_reference(
            grad_TF, x_TD, weight_FD, **given
        )
    return (
        x_TD.new_empty((0, 0)) if grad_x_TD is None else grad_x_TD,
        weight_FD.new_empty((0, 0)) if grad_weight_FD is None else grad_weight_FD,
    )


@_backward.register_fake
def _(
    grad_TF: Tensor,
    x_TD: Tensor,
    weight_FD: Tensor,
    input_gradient: str,
    weight_gradient: str,
    needs_x: bool,  # noqa: FBT001
    needs_weight: bool,  # noqa: FBT001
    *_: Any,
) -> tuple[Tensor, Tensor]:
    return (
        x_TD.new_empty(x_TD.shape if needs_x else (0, 0)),
        weight_FD.new_empty(weight_FD.shape if needs_weight else (0, 0)),
    )


# For who has the input in bytes already (``gem_precision.prenorm``); b is rounded here.
@torch.library.custom_op("gem_precision::product_of_bytes", mutates_args=())
def _product_of_bytes(
    elements_TD: Tensor,
    scales: Tensor,
    weight_FD: Tensor,
    number_format: str,
    dtype: torch.dtype,
    impl: str,
) -> Tensor:
    if resolve_impl(impl, elements_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.quantized_linear.kernel import launch_product_of_bytes

        return launch_product_of_bytes(
            elements_TD, scales, weight_FD, number_format=number_format, dtype=dtype
        )
    with torch.autocast(elements_TD.device.type, enabled=False):
        made = product_of_bytes_reference(elements_TD, scales, weight_FD, number_format)
    return made.to(dtype)


@_product_of_bytes.register_fake
def _(
    elements_TD: Tensor,
    scales: Tensor,
    weight_FD: Tensor,
    number_format: str,
    dtype: torch.dtype,
    impl: str,
) -> Tensor:
    return weight_FD.new_empty((elements_TD.shape[0], weight_FD.shape[0]), dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_TD, weight_FD, _, *ctx.backward_formats, ctx.impl, ctx.seed, ctx.hadamard_seed = inputs
    ctx.save_for_backward(x_TD, weight_FD)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x_TD, weight_FD = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    grads = torch.ops.gem_precision.quantized_linear_backward(
        *(grad, x_TD, weight_FD, *ctx.backward_formats, *needs, ctx.impl),
        *(ctx.seed, ctx.hadamard_seed),
    )
    asked = [g if is_asked else None for g, is_asked in zip(grads, needs, strict=True)]
    return *asked, *(None,) * 6


_forward.register_autograd(_differentiate, setup_context=_save)


def _sizes(x_TD: Tensor, weight_FD: Tensor) -> dict[str, int]:
    rows, width = x_TD.shape
    columns = weight_FD.shape[0]
    return {
        "rows": rows,
        "width": width,
        "columns": columns,
        "element_bytes": x_TD.element_size(),
    }


def _forward_cost(x_TD: Tensor, weight_FD: Tensor, *_: Any) -> Cost:
    return quantized_linear_cost(**_sizes(x_TD, weight_FD))


def _backward_cost(grad_TF: Tensor, x_TD: Tensor, weight_FD: Tensor, *given: Any) -> Cost:
    products = int(given[2]) + int(given[3])
    return quantized_linear_backward_cost(**_sizes(x_TD, weight_FD), products=products)


def _product_cost(elements_TD: Tensor, scales: Tensor, weight_FD: Tensor, *given: Any) -> Cost:
    rows, width = elements_TD.shape
    return quantized_linear_cost(
        rows=rows, width=width, columns=weight_FD.shape[0], element_bytes=given[1].itemsize
    )


register_flops(_product_of_bytes, _product_cost)
register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def check_operands(op: str, x_TD: Tensor, weight_FD: Tensor) -> None:
    """Refuse rows and a weight that no product takes, or that do not fit together.

    Args:
        op: who asks, for the message.
        x_TD: rows.
        weight_FD: the weight.

    Raises:
        ShapeError, DtypeError, DeviceError: an argument breaks its suffix, dtype or device.
    """
    check_shapes(op, x_TD=x_TD, weight_FD=weight_FD)
    for name, tensor in (("x_TD", x_TD), ("weight_FD", weight_FD)):
        if tensor.dtype not in _DTYPES:
            raise DtypeError(
                refusal(op, name, must="be fp32, bf16 or fp16", got=tensor.dtype, fix="convert it")
            )
    if weight_FD.device != x_TD.device:
        raise DeviceError(
            refusal(op, "weight_FD", must=f"be on {x_TD.device}", got=weight_FD.device,
                    fix="move it")
        )  # fmt: skip


def quantized_linear(
    x_TD: Tensor,
    weight_FD: Tensor,
    *,
    formats: LinearFormats,
    seed: int | None = None,
    hadamard_seed: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Map rows by a weight, each of the three products in a format of its own.

        y = Q(x) Q(W)ᵀ,   dx = Q(dy) Q(W),   dW = Q(dy)ᵀ Q(x)

    where Q rounds both factors of a product to its format, in blocks along the dim that it sums.

    Args:
        x_TD: fp32, bf16 or fp16.
        weight_FD: fp32, bf16 or fp16; may differ from x.
        formats: of the three products.
        seed: 63 bits from which the gradient of y is rounded up or down by chance where it is
            rounded to MXFP8, so that both gradients are right on average. None: to the nearest.
        hadamard_seed: 63 bits by which both factors of a product in MXFP8 are rotated before they
            are rounded, by a random Hadamard matrix of 32 in the dim that is summed over.
        impl: who computes it; see ``gem_opkit.impl``. ``"triton"`` is our kernels and cuBLAS.

    Returns:
        y_TF, in the dtype of x.

    Raises:
        ShapeError, DtypeError, DeviceError: an argument breaks its suffix, dtype or device.
        ConfigError: a seed out of range, or one where no product is in MXFP8.
        UnsupportedError: an ``impl`` that cannot run here, or a format that this GPU lacks.

    Numerics: docs/numerics.md. Factors are rounded once; sums are in fp32, block FP8 in fp32 over
        sums of 128 products in the tensor core's own width.
    Cost: 2·T·D·F FLOPs a product; each factor is read once more to be rounded, and written in
        8 bits. Rotation is plain torch in fp32: several passes over both factors.
    Source: DeepSeek-V3 (arXiv:2412.19437); Mishra et al. 2025 (arXiv:2506.08027).
    """
    check_operands(_NAME, x_TD, weight_FD)
    _check_seeds(formats, seed=seed, hadamard_seed=hadamard_seed)
    check_autograd(_NAME, x_TD=x_TD, weight_FD=weight_FD)
    chosen = resolve_impl(impl, x_TD.device, _NAME, has_triton=_HAS_TRITON)
    if chosen == "triton":
        check_formats(formats, x_TD.device)
    return torch.ops.gem_precision.quantized_linear(
        x_TD,
        weight_FD,
        formats.forward,
        formats.input_gradient,
        formats.weight_gradient,
        chosen,
        seed,
        hadamard_seed,
    )


def _check_seeds(formats: LinearFormats, **seeds: int | None) -> None:
    backward = (formats.input_gradient, formats.weight_gradient)
    for name, given in seeds.items():
        if given is None:
            continue
        # A compiled graph draws its seed, and knows no bounds of it.
        if not torch.compiler.is_compiling() and not 0 <= given < 2**63:
            raise ConfigError(
                refusal(_NAME, name, must="be an integer of 63 bits", got=given, fix="take 0")
            )
        reached = backward if name == "seed" else (formats.forward, *backward)
        if not any(f.startswith("mxfp8") for f in reached):
            raise ConfigError(
                refusal(
                    *(_NAME, name),
                    must="come with a product in MXFP8 that it changes",
                    got=", ".join(reached),
                    fix="leave it out, or take mxfp8_rceil",
                )
            )


def fp8_block_linear(x_TD: Tensor, weight_FD: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Map rows by a weight in block FP8, with the weight's gradient in bf16.

    Args:
        x_TD: as ``quantized_linear``.
        weight_FD: as ``quantized_linear``.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        y_TF, in the dtype of x.

    Raises:
        ShapeError, DtypeError, DeviceError, UnsupportedError: as ``quantized_linear``.

    Numerics: as ``quantized_linear``.
    Cost: as ``quantized_linear``.
    Source: DeepSeek-V3 (arXiv:2412.19437).
    """
    return quantized_linear(x_TD, weight_FD, formats=formats_named("fp8_block"), impl=impl)


def formats_named(name: GemmFormat) -> LinearFormats:
    """Return the formats of the products that a name stands for.

    Args:
        name: ``"bf16"``, ``"fp8_block"`` (the weight's gradient in bf16), ``"mxfp8_rceil"`` or
            ``"mxfp8_floor"`` (all three products).

    Returns:
        the formats.

    Raises:
        ConfigError: another name.
    """
    if name not in _NAMED:
        known = ", ".join(_NAMED)
        raise ConfigError(
            refusal(_NAME, "formats", must=f"be one of {known}", got=name, fix="take one of these")
        )
    return _NAMED[name]


def check_formats(formats: LinearFormats, device: torch.device) -> None:
    """Refuse formats that a GPU lacks.

    Args:
        formats: of the three products.
        device: where they are to run.

    Raises:
        UnsupportedError: 8 bits on a GPU whose tensor cores have none.
    """
    if device.type != "cuda" or "fp8_block" not in (formats.forward, formats.input_gradient):
        return
    has = torch.cuda.get_device_capability(device)
    if has < _FP8_SINCE:
        raise UnsupportedError(
            refusal(
                _NAME,
                "formats",
                must="be formats of this GPU: fp8_block needs compute capability 8.9",
                got=f"{has[0]}.{has[1]}",
                fix='take "bf16", or "mxfp8_rceil" for its numbers alone',
            )
        )

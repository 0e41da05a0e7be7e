"""The mathematics of ``quantized_linear`` in plain torch.

A linear map has three products, each of two matrices with the dim that it sums over last:

    y  = x Wᵀ      of x and W, over D
    dx = dy W      of dy and Wᵀ, over F
    dW = dyᵀ x     of dyᵀ and xᵀ, over T

Each has a format of its own. Q is the rounding of both factors to it, in blocks along the dim that
is summed over, and the product is that of the rounded numbers, in fp32:

    bf16           Q rounds to bf16
    fp8_block      E4M3; the first factor in blocks of 1x128, the second, which is the weight or its
                   transposed, in squares of 128x128: one rounding serves both products
    mxfp8_rceil    E4M3 in blocks of 1x32, scales rounded up;   mxfp8_floor    rounded down

In the two MXFP8 formats the gradient dy may be rounded by chance, by a seed: dx by the words of the
seed, dW by those of the seed with its last bit flipped, drawn for dyᵀ. And both factors of a
product may be rotated before they are rounded, along the dim that is summed over
(``gem_precision.hadamard``): without rounding nothing would change.

The backward takes Q as if it were the identity (the straight-through rule): dx and dW are the
formulas above and not derivatives of a staircase.

Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3, for ``fp8_block``; Mishra et al. 2025
(arXiv:2506.08027) for MXFP8 in all three products.
"""

import torch
from torch import Tensor

from gem_precision.codes import widened
from gem_precision.elements import WIDE_BLOCK
from gem_precision.hadamard import rotated_factor
from gem_precision.kernels.block_quantize.reference import block_quantize_reference
from gem_precision.kernels.mx_quantize.reference import (
    mx_dequantize_reference,
    mx_quantize_reference,
)


def quantized_linear_reference(
    x_TD: Tensor, weight_FD: Tensor, forward: str, *, hadamard_seed: int | None = None
) -> Tensor:
    """Return y_TF in the dtype of x."""
    return product(x_TD, weight_FD, forward, hadamard_seed=hadamard_seed).to(x_TD.dtype)


def quantized_linear_backward_reference(
    grad_TF: Tensor,
    x_TD: Tensor,
    weight_FD: Tensor,
    *,
    formats: tuple[str, str],
    needs: tuple[bool, bool] = (True, True),
    seed: int | None = None,
    hadamard_seed: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight, each in its own dtype, or None if not needed.

    ``formats`` are those of the two products.
    """
    grad_x_TD = grad_weight_FD = None
    turned = {"hadamard_seed": hadamard_seed}
    if needs[0]:
        grad_x_TD = product(grad_TF, weight_FD.T, formats[0], seed=seed, **turned).to(x_TD.dtype)
    if needs[1]:
        seed = None if seed is None else seed ^ 1
        grad_weight_FD = product(grad_TF.T, x_TD.T, formats[1], seed=seed, **turned)
        grad_weight_FD = grad_weight_FD.to(weight_FD.dtype)
    return grad_x_TD, grad_weight_FD


def product(
    a: Tensor,
    b: Tensor,
    number_format: str,
    *,
    seed: int | None = None,
    hadamard_seed: int | None = None,
) -> Tensor:
    """Return a bᵀ in fp32 with both factors rounded to a format, a by chance with a seed."""
    if number_format.startswith("mxfp8"):
        if hadamard_seed is not None:
            a, b = rotated_factor(a, hadamard_seed), rotated_factor(b, hadamard_seed)
        return _mx_rounded(a, number_format, seed) @ _mx_rounded(b, number_format).T
    return rounded(a, number_format, "1x128") @ rounded(b, number_format, "128x128").T


def product_of_bytes_reference(
    a_elements: Tensor, a_scales: Tensor, b: Tensor, number_format: str
) -> Tensor:
    """Return a bᵀ in fp32, with a in its format already, in blocks along its rows."""
    if number_format == "fp8_block":
        a = widened(a_elements, a_scales.T, 1)
    else:
        a = mx_dequantize_reference(a_elements, a_scales, element="e4m3", along="rows")
    return a @ rounded(b, number_format, "128x128").T


def rounded(x: Tensor, number_format: str, block: str) -> Tensor:
    """Return the numbers, in fp32, that a factor has in a format."""
    if number_format == "bf16":
        return x.to(torch.bfloat16).float()
    if number_format == "fp8_block":
        elements, scales, _ = block_quantize_reference(x, block=block, turned="no")
        tall = WIDE_BLOCK if block == "128x128" else 1
        return widened(elements, scales if tall > 1 else scales.T, tall)
    return _mx_rounded(x, number_format)


def _mx_rounded(x: Tensor, number_format: str, seed: int | None = None) -> Tensor:
    elements, scales, _, _ = mx_quantize_reference(
        x, scaling=number_format, element="e4m3", along="rows", seed=seed
    )
    return mx_dequantize_reference(elements, scales, element="e4m3", along="rows")

"""Root-mean-square normalisation with its backward written out.

Autograd through the plain formula makes seven passes over the tokens and keeps three copies of
them; written out it makes two and keeps the output alone. Inside ``torch.compile`` the plain
formula is traced, because the compiler fuses it and its derivative with their neighbours. Left
out: an affine gain, which the layers apply themselves, and a fused GPU kernel.
"""

from typing import Any

import torch
from torch import Tensor


class _RmsNormalize(torch.autograd.Function):
    """y = x r with r = (mean(x²) + ε)^(-1/2), so dx = r (dy − y mean(dy y))."""

    @staticmethod
    def forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = _wide(x)
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square()
        rstd = torch.rsqrt(square / max(x.shape[-1], 1) + eps)
        return (wide * rstd).to(x.dtype), rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        y, rstd = output
        ctx.mark_non_differentiable(rstd)
        ctx.save_for_backward(y, rstd)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        grad_y = grads[0]
        y, rstd = ctx.saved_tensors
        mean = (grad_y * y).to(rstd.dtype).mean(dim=-1, keepdim=True)
        return (torch.addcmul(grad_y, y, mean.to(y.dtype), value=-1) * rstd).to(y.dtype), None


def _wide(x: Tensor) -> Tensor:
    # The sum of squares of a bf16 row has too few bits for its own mean.
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def rms_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide each row by its root mean square.

        y = x / sqrt(mean(x², last dim) + ε)

    Args:
        x: any shape with at least one dim, float32, float64, bfloat16 or float16; the last dim
            is normalised.
        eps: added to the mean square, above 0, so that a row of zeros gives zeros.

    Returns:
        y of the same shape and dtype.

    Numerics: bfloat16 and float16 are widened to float32 inside; the backward is written out and
        reads y, not x.
    Cost: no matrix product; counted as 0 FLOPs.
    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """
    if torch.compiler.is_compiling():
        wide = _wide(x)
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)
    return _RmsNormalize.apply(x, eps)[0]

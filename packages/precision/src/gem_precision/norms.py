"""Root-mean-square normalisation with its backward written out.

Autograd through the plain formula makes seven passes over the tokens and keeps three copies of
them; written out it makes two and keeps one copy: the output, or in half precision the input,
because the output has been rounded. Inside ``torch.compile`` the plain
formula is traced, because the compiler fuses it and its derivative with their neighbours. On a GPU
``gem_precision.ops`` takes over, one kernel a pass. Left out: an affine gain, which the layers
apply.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from gem_opkit.errors import DtypeError, ShapeError, refusal
from gem_precision.kernels.row_norm.op import WIDEST, rms_norm


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
        x, (y, rstd) = inputs[0], output
        ctx.mark_non_differentiable(rstd)
        # Where dy points along y the two terms cancel, and all that is left is rounding: a y
        # that was rounded to half precision would be most of it.
        ctx.from_input = x.dtype != rstd.dtype
        ctx.save_for_backward(x if ctx.from_input else y, rstd)

    # The derivative of rstd is inside the formula, so that a second derivative would miss it.
    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's own type
        ctx: Any, *grads: Any
    ) -> tuple[Tensor, None]:
        saved, rstd = ctx.saved_tensors
        grad_y = grads[0].to(rstd.dtype)
        y = saved * rstd if ctx.from_input else saved
        mean = (grad_y * y).mean(dim=-1, keepdim=True)
        return (torch.addcmul(grad_y, y, mean, value=-1) * rstd).to(saved.dtype), None


class _NormBesideInput(torch.autograd.Function):
    """The norm of x, and x; their gradients add up in the pass of the norm's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, centred: bool, eps: float) -> tuple[Tensor, Tensor]:  # noqa: FBT001
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.given = (centred, False, eps, "triton")
        return torch.ops.gem_precision.row_norm(x, None, None, None, *ctx.given), x

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's own type
        ctx: Any, grad_y: Tensor | None, grad_x: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        if grad_y is not None:
            grad_x, _ = torch.ops.gem_precision.row_norm_backward(
                grad_y, x, None, None, *ctx.given, added=grad_x
            )
        return grad_x, None, None


def norm_beside_input(x: Tensor, *, centred: bool, eps: float) -> tuple[Tensor, Tensor]:
    """Normalise rows that are also passed on, such as those of a residual stream.

    Args:
        x: of which ``has_kernel`` is true; not an input of ``torch.compile``.
        centred: take the mean off, as LayerNorm does.
        eps: added to the mean square or the variance, above 0.

    Returns:
        the norm of x, and x for all other uses of it: the gradients of both are added in the one
        pass of the norm's backward, where autograd would add them in a pass of their own.

    Numerics: as ``gem_precision.ops.rms_norm``; the sum of both gradients is rounded once.
    """
    return _NormBesideInput.apply(x, centred, eps)


def _wide(x: Tensor) -> Tensor:
    # The sum of squares of a bf16 row has too few bits for its own mean.
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def has_kernel(x: Tensor) -> bool:
    """Tell whether a fused kernel normalises x.

    Args:
        x: what is to be normalised.

    Returns:
        whether it is a plain tensor on a GPU, with rows that a kernel takes, outside of
        ``torch.compile``; one without memory there counts as plain, so that a run in name takes
        the operators that a real one does. What is spread over devices (a DTensor) runs in plain
        torch.
    """
    return (
        x.is_cuda
        and type(x) in (Tensor, nn.Parameter, FakeTensor)
        and 0 < x.shape[-1] <= WIDEST
        and not torch.compiler.is_compiling()
    )


def rms_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide each row by its root mean square.

        y = x / sqrt(mean(x², last dim) + ε)

    Args:
        x: any shape with at least one dim, float32, float64, bfloat16 or float16; the last dim
            is normalised.
        eps: added to the mean square, above 0, so that a row of zeros gives zeros.

    Returns:
        y of the same shape and dtype; differentiable once outside a compiled graph.

    Raises:
        DtypeError, ShapeError: x that is not floating point, or a scalar.

    Numerics: bfloat16 and float16 are widened to float32 inside, forward and backward, and
        rounded once.
    Cost: no matrix product; counted as 0 FLOPs.
    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """
    if not x.dtype.is_floating_point:
        raise DtypeError(
            refusal("rms_normalize", "x", must="be floating point", got=x.dtype, fix="convert it")
        )
    if x.ndim == 0:
        raise ShapeError(
            refusal("rms_normalize", "x", must="have a last dim", got="a scalar", fix="reshape it")
        )
    if has_kernel(x):
        return rms_norm(x, eps=eps)
    if torch.compiler.is_compiling():
        wide = _wide(x)
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)
    return _RmsNormalize.apply(x, eps)[0]

"""The activations of generalized attention and their derivatives, on scores.

| name | f(x) | f'(x) |
| --- | --- | --- |
| gelu | x Φ(x) | Φ(x) + x φ(x) |
| fast_gelu | x (1 + t)/2, t = tanh(√(2/π) (x + 0.044715 x³)) | (1 + t)/2 + x t'/2 |
| taylor_gelu | x/2 + c₂x² + c₄x⁴ + c₆x⁶ | 1/2 + 2c₂x + 4c₄x³ + 6c₆x⁵ |
| relu | max(x, 0) | [x > 0] |
| relu_squared | max(x, 0)² | 2 max(x, 0) |
| leaky_relu | x if x > 0 else x/100 | 1 if x > 0 else 1/100 |
| silu | x σ(x) | σ(x) (1 + x (1 − σ(x))) |
| hard_swish | x · min(max(x + 3, 0), 6)/6 | 0 below −3, 1 above 3, between them (2x + 3)/6 |
| identity | x | 1 |

Every f has f(0) = 0, so a padded key of zero value needs no mask. ``taylor_gelu`` is the even
polynomial of degree six with which GPU kernels avoid the special-function unit; it is valid only
for |x| ≤ 1.25 (error against gelu 5·10⁻⁶ at 0.5, 10⁻³ at 1, 6·10⁻³ at 1.25, then 0.2 at 2): its
caller keeps scores that small, by QK-norm and scale.

Source: Meta's GEM kernels article for the list and the polynomial.
"""

from collections.abc import Callable
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_attention.contract import GdpaActivation

ACTIVATION_NAMES: tuple[str, ...] = get_args(GdpaActivation)

_SLOPE = 0.01
_C2, _C4, _C6 = 0.3989422804, -0.0664903801, 0.0099735570
_aten = torch.ops.aten


def _taylor_gelu(x: Tensor) -> Tensor:
    square = x * x
    return torch.addcmul(0.5 * x, square, (square * _C6).add_(_C4).mul_(square).add_(_C2))


def _taylor_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    square = x * x
    odd = (square * (6 * _C6)).add_(4 * _C4).mul_(square).add_(2 * _C2).mul_(x)
    return odd.add_(0.5).mul_(grad)


def _relu_squared(x: Tensor) -> Tensor:
    positive = x.relu()
    return positive.mul_(positive)


# torch's own derivative kernels are the closed forms of the table in one pass; written as separate
# operations they take up to nine.
_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "fast_gelu": lambda x: F.gelu(x, approximate="tanh"),
    "taylor_gelu": _taylor_gelu,
    "relu": torch.relu,
    "relu_squared": _relu_squared,
    "leaky_relu": lambda x: F.leaky_relu(x, _SLOPE),
    "silu": F.silu,
    "hard_swish": F.hardswish,
    "identity": lambda x: x,
}
_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": _aten.gelu_backward,
    "fast_gelu": lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"),
    "taylor_gelu": _taylor_gelu_backward,
    "relu": lambda grad, x: _aten.threshold_backward(grad, x, 0),
    "relu_squared": lambda grad, x: x.relu().mul_(2).mul_(grad),
    "leaky_relu": lambda grad, x: _aten.leaky_relu_backward(grad, x, _SLOPE, False),  # noqa: FBT003
    "silu": _aten.silu_backward,
    "hard_swish": _aten.hardswish_backward,
    "identity": lambda grad, x: grad,
}


def activate(name: str, score: Tensor) -> Tensor:
    """Return f(score).

    Args:
        name: one of ``ACTIVATION_NAMES``.
        score: float32 or float64, any shape.

    Returns:
        a new tensor, or ``score`` itself for the identity.
    """
    return _FORWARD[name](score)


def activate_backward(name: str, grad: Tensor, score: Tensor) -> Tensor:
    """Return grad · f'(score).

    Args:
        name: one of ``ACTIVATION_NAMES``.
        grad: gradient of f(score), same shape.
        score: what the activation was applied to.

    Returns:
        a new tensor, or ``grad`` itself for the identity.
    """
    return _BACKWARD[name](grad, score)

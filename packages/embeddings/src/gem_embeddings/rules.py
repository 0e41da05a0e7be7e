"""The rules by which rows of tables learn, once, for every engine and optimizer on plain torch.

With g the gradient of a row, and a state of one value a row or one an element:

    sgd:             w ← w − lr · g
    adagrad:         s ← s + g²            w ← w − lr · g / (sqrt(s) + eps)
    rowwise_adagrad: s ← s + mean(g²)      w ← w − lr · g / (sqrt(s / c) + eps)
    adam:            m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
                     w ← w − lr · (m / (1 − β₁ᵗ)) / (sqrt(v / (1 − β₂ᵗ)) + eps)

c is the moment scale of row-wise AdaGrad: 1, or the number of replica groups that each see a part
of the batch, whose gradients then are that much noisier. t counts the steps of the table.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gem_embeddings.contract import OptimizerSpec, TableOptimizer

# Names of the states, as torch's optimizers name them; the first is one value a row.
STATE_NAMES: dict[TableOptimizer, tuple[str, ...]] = {
    "rowwise_adagrad": ("sum",),
    "adagrad": ("sum",),
    "sgd": (),
    "adam": ("exp_avg", "exp_avg_sq"),
}


def is_row_wise(kind: TableOptimizer) -> bool:
    """Tell whether a kind keeps one value a row instead of one an element."""
    return kind == "rowwise_adagrad"


@lru_cache(maxsize=64)
def spec_of(
    kind: TableOptimizer, *, eps: float, beta1: float, beta2: float, moment_scale: float
) -> OptimizerSpec:
    """Return the spec with these numbers, checked once; its ``lr`` means nothing.

    Args:
        kind: of the rule.
        eps: as in the spec.
        beta1: as in the spec.
        beta2: as in the spec.
        moment_scale: as in the spec.

    Returns:
        the spec, the same object for the same numbers.
    """
    return OptimizerSpec(kind=kind, eps=eps, beta1=beta1, beta2=beta2, moment_scale=moment_scale)


def row_steps(
    spec: OptimizerSpec, grad_IE: Tensor, states: Sequence[Tensor], *, lr: float, step: int
) -> Tensor:
    """Move the states of rows, and return what is to be added to the rows.

    Args:
        spec: kind and hyperparameters; its ``lr`` is not read.
        grad_IE: gradient of each row, fp32 or fp64.
        states: state of each row in the order of ``STATE_NAMES``: (I,) for row-wise AdaGrad, else
            (I, E). Changed in place.
        lr: learning rate.
        step: steps of the table, this one included; read by adam.

    Returns:
        change_IE, in the dtype of the gradient.

    Numerics: on a CPU the same bits for the same rows, whatever other rows there are.
    Source: AdaGrad (Duchi et al. 2011) and its row-wise form as fbgemm has it; the moment scale of
        "Two-dimensional sparse parallelism" (Meta, 2025); Adam (Kingma and Ba 2015), lazily.
    """
    if spec.kind == "sgd":
        return grad_IE * -lr
    if spec.kind == "rowwise_adagrad":
        (sum_I,) = states
        sum_I.add_(grad_IE.square().mean(dim=1))
        # Not divided by 1: nothing would change but the time.
        scaled_I = sum_I / spec.moment_scale if spec.moment_scale != 1.0 else sum_I
        scale_I = scaled_I.sqrt().add_(spec.eps).reciprocal_().mul_(-lr)
        return grad_IE * scale_I[:, None]
    if spec.kind == "adagrad":
        (sum_IE,) = states
        sum_IE.addcmul_(grad_IE, grad_IE)
        return grad_IE / sum_IE.sqrt().add_(spec.eps) * -lr
    mean_IE, square_IE = states
    mean_IE.lerp_(grad_IE, 1 - spec.beta1)
    square_IE.mul_(spec.beta2).addcmul_(grad_IE, grad_IE, value=1 - spec.beta2)
    root_IE = (square_IE / (1 - spec.beta2**step)).sqrt_().add_(spec.eps)
    return torch.div(mean_IE, root_IE).mul_(-lr / (1 - spec.beta1**step))

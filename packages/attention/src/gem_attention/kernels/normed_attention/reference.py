"""The mathematics of ``normed_attention``, forward and backward, in plain torch.

For the tokens x of a sequence (rows of width D, cut into heads of width K), its keys and values,
and the activation f of each head::

    q = (x − mean(x)) · r      r = (var(x) + ε)^(-1/2)      over the whole row
    S = scale · q Kᵀ           P = f(S)                      by heads
    a = P V + q                s = (mean(a²) + ε')^(-1/2)   over the whole row
    y = a · s                  out = y + x

    da = s · (dO − y · mean(dO ∘ y))
    dV = Pᵀ da      dS = (da Vᵀ) ∘ f'(S)      dK = scale · dSᵀ q      dq = scale · dS K + da
    dx = r · (dq − mean(dq) − q · mean(dq ∘ q)) + dO

Nothing but the inputs is kept: the row statistics follow from x, and those of a from a, which the
backward makes again. Tokens without keys, and those behind the last sequence, have P V = 0.

Computes in fp32, or fp64 for fp64, and rounds once.

Source: Meta's article on norm fusion (FlashNormAttention).
"""

import torch
from torch import Tensor

from gem_attention.chunked.activation import activation_backward, activation_forward
from gem_attention.chunked.plan import Chunk, plan_window


def normed_attention_reference(
    x_TD: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    lengths: tuple[Tensor, Tensor],
    activations: tuple[str, ...],
    scale: float,
    eps: tuple[float, float],
) -> Tensor:
    """Normalise, attend, add, normalise, add.

    Args:
        x_TD: tokens, D a multiple of K.
        k_SGK: keys.
        v_SGV: values, as wide as keys.
        lengths: tokens and keys of each sequence, int64 on the CPU.
        activations: one name for all query heads, or one for each.
        scale: factor of the scores.
        eps: added to the variance of x, and to the mean square of a.

    Returns:
        out_TD in the dtype of x.
    """
    x, k, v = _wide(x_TD, k_SGK, v_SGV)
    q, _ = _normalised(x, eps[0])
    a = _attended(q, k, v, _chunks(lengths, x_TD), activations, scale) + q
    return (a * _rstd(a, eps[1]) + x).to(x_TD.dtype)


def normed_attention_backward_reference(
    grad_out_TD: Tensor,
    x_TD: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    lengths: tuple[Tensor, Tensor],
    activations: tuple[str, ...],
    scale: float,
    eps: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate ``normed_attention_reference``.

    Args:
        grad_out_TD: gradient of out.
        x_TD: as in the forward.
        k_SGK: as in the forward.
        v_SGV: as in the forward.
        lengths: as in the forward.
        activations: as in the forward.
        scale: as in the forward.
        eps: as in the forward.

    Returns:
        gradients of x, k and v in their dtypes.
    """
    x, k, v = _wide(x_TD, k_SGK, v_SGV)
    grad = grad_out_TD.to(x.dtype)
    chunks = _chunks(lengths, x_TD)
    q, rstd = _normalised(x, eps[0])
    a = _attended(q, k, v, chunks, activations, scale) + q
    rstd_a = _rstd(a, eps[1])
    y = a * rstd_a
    grad_a = rstd_a * (grad - y * (grad * y).mean(-1, keepdim=True))
    by_head = (x.shape[0], x.shape[1] // k.shape[2], k.shape[2])
    grad_q, grad_k, grad_v = activation_backward(
        grad_a.view(by_head), q.view(by_head), k, v, chunks, activations, scale=scale
    )
    grad_q = grad_q.flatten(1) + grad_a
    mean, along = grad_q.mean(-1, keepdim=True), (grad_q * q).mean(-1, keepdim=True)
    grad_x = rstd * (grad_q - mean - q * along) + grad
    return grad_x.to(x_TD.dtype), grad_k.to(k_SGK.dtype), grad_v.to(v_SGV.dtype)


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    wide = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    return tuple(x.to(wide) for x in tensors)


def _chunks(lengths: tuple[Tensor, Tensor], x_TD: Tensor) -> tuple[Chunk, ...]:
    return tuple(plan_window(*lengths, None, None, x_TD.device))


def _rstd(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    centred = x - x.mean(-1, keepdim=True)
    rstd = _rstd(centred, eps)
    return centred * rstd, rstd


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: tuple[Chunk, ...],
    activations: tuple[str, ...],
    scale: float,
) -> Tensor:
    q_THK = q.view(q.shape[0], q.shape[1] // k.shape[2], k.shape[2])
    out_THV = activation_forward(q_THK, k, v, chunks, activations, scale=scale, out_rows=q.shape[0])
    return out_THV.flatten(1)

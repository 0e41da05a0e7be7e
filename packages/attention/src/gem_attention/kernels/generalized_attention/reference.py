"""The mathematics of ``generalized_attention``, forward and backward, in plain torch.

For each sequence and head, with queries Q (Lq, K), keys K (Lk, K), values V (Lk, V) and the
activation f of the head, applied to each score by itself::

    S = scale · Q Kᵀ     P = f(S) at the pairs that the window shows, 0 elsewhere
    out = P V

    dV = Pᵀ dO           dS = (dO Vᵀ) ∘ f'(S), 0 where hidden
    dQ = scale · dS K    dK = scale · dSᵀ Q

The window is that of ``gem_attention.patterns``, the activations and their derivatives stand in
``gem_attention.activations``. A query that sees no key has out = 0 and no part in any gradient;
likewise rows behind the last sequence.

Sequences are cut into padded chunks (``chunked.plan``). Computes in fp32, or fp64 for
fp64. On a CPU the result has the same bits in every run with the same number of threads.

Source: Meta's GEM kernels article (GDPA).
"""

from torch import Tensor

from gem_attention.chunked.activation import activation_backward, activation_forward
from gem_attention.chunked.plan import plan_window
from gem_attention.chunked.softmax import Window


def generalized_attention_reference(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_lengths_B: Tensor,
    k_lengths_B: Tensor,
    activations: tuple[str, ...],
    window: Window,
    scale: float,
) -> Tensor:
    """Attend within each sequence without softmax.

    Args:
        q_THK: queries.
        k_SGK: keys.
        v_SGV: values.
        q_lengths_B: queries of each sequence, int64 on the CPU.
        k_lengths_B: keys of each sequence, int64 on the CPU.
        activations: one name for all query heads, or one for each.
        window: keys visible left and right of a query's place; None for all.
        scale: factor of the scores.

    Returns:
        out_THV in the dtype of q.
    """
    chunks = plan_window(q_lengths_B, k_lengths_B, *window, q_THK.device)
    out_THV = activation_forward(
        q_THK,
        k_SGK,
        v_SGV,
        chunks,
        activations,
        scale=scale,
        out_rows=q_THK.shape[0],
        window=window,
    )
    return out_THV.to(q_THK.dtype)


def generalized_attention_backward_reference(  # noqa: PLR0913 - what the mathematics takes
    grad_out_THV: Tensor,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_lengths_B: Tensor,
    k_lengths_B: Tensor,
    activations: tuple[str, ...],
    window: Window,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate ``generalized_attention_reference``.

    Args:
        grad_out_THV: gradient of out.
        q_THK: as in the forward.
        k_SGK: as in the forward.
        v_SGV: as in the forward.
        q_lengths_B: as in the forward.
        k_lengths_B: as in the forward.
        activations: as in the forward.
        window: as in the forward.
        scale: as in the forward.

    Returns:
        gradients of q, k and v in their dtypes.
    """
    chunks = plan_window(q_lengths_B, k_lengths_B, *window, q_THK.device)
    gradients = activation_backward(
        grad_out_THV,
        q_THK,
        k_SGK,
        v_SGV,
        chunks,
        activations,
        scale=scale,
        window=window,
    )
    grad_q_THK, grad_k_SGK, grad_v_SGV = (gradient.to(q_THK.dtype) for gradient in gradients)
    return grad_q_THK, grad_k_SGK, grad_v_SGV

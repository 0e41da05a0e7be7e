"""The mathematics of ``jagged_flash_attention``, forward and backward, in plain torch.

For each sequence and head, with queries Q (Lq, K), keys K (Lk, K), values V (Lk, V)::

    S = scale · Q Kᵀ     at the pairs that the window shows, −∞ elsewhere
    P = softmax(S)       out = P V     lse = ln Σ exp S

    dV = Pᵀ dO           dP = dO Vᵀ    dS = P ∘ (dP − rowsum(dO ∘ out) + dlse)
    dQ = scale · dS K    dK = scale · dSᵀ Q

The window is that of ``gem_attention.patterns``: query i sees key j where
i + Lk − Lq − left ≤ j ≤ i + Lk − Lq + right. A query that sees no key has out = 0, lse = −∞ and
no part in any gradient; likewise rows behind the last sequence.

Sequences are cut into padded chunks (``chunked.plan``): memory is that of one chunk, and
the cost of a window is linear in length. Computes in fp32, or fp64 for fp64. On a CPU the result
has the same bits in every run with the same number of threads.
"""

from torch import Tensor

from gem_attention.chunked.plan import plan_window
from gem_attention.chunked.softmax import Window, softmax_backward, softmax_forward


def jagged_flash_attention_reference(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_lengths_B: Tensor,
    k_lengths_B: Tensor,
    window: Window,
    scale: float,
    *,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend within each sequence.

    Args:
        q_THK: queries.
        k_SGK: keys.
        v_SGV: values.
        q_lengths_B: queries of each sequence, int64 on the CPU.
        k_lengths_B: keys of each sequence, int64 on the CPU.
        window: keys visible left and right of a query's place; None for all.
        scale: factor of the scores.
        with_lse: compute the logsumexp.

    Returns:
        out_THV in the dtype of q, and lse_TH in fp32 (fp64 for fp64), of 0 rows without
        ``with_lse``.
    """
    chunks = plan_window(q_lengths_B, k_lengths_B, *window, q_THK.device)
    out_THV, lse_TH = softmax_forward(
        q_THK,
        k_SGK,
        v_SGV,
        chunks,
        scale=scale,
        out_rows=q_THK.shape[0],
        window=window,
        with_lse=with_lse,
    )
    if lse_TH is None:
        lse_TH = out_THV.new_empty(0, q_THK.shape[1])
    return out_THV.to(q_THK.dtype), lse_TH


def jagged_flash_attention_backward_reference(  # noqa: PLR0913 - what the mathematics takes
    grad_out_THV: Tensor,
    grad_lse_TH: Tensor | None,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    q_lengths_B: Tensor,
    k_lengths_B: Tensor,
    window: Window,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate ``jagged_flash_attention_reference``.

    Args:
        grad_out_THV: gradient of out.
        grad_lse_TH: gradient of the logsumexp; None for 0.
        q_THK: as in the forward.
        k_SGK: as in the forward.
        v_SGV: as in the forward.
        out_THV: result of the forward.
        q_lengths_B: as in the forward.
        k_lengths_B: as in the forward.
        window: as in the forward.
        scale: as in the forward.

    Returns:
        gradients of q, k and v in their dtypes.
    """
    chunks = plan_window(q_lengths_B, k_lengths_B, *window, q_THK.device)
    gradients = softmax_backward(
        grad_out_THV,
        grad_lse_TH,
        q_THK,
        k_SGK,
        v_SGV,
        out_THV,
        chunks,
        scale=scale,
        window=window,
    )
    grad_q_THK, grad_k_SGK, grad_v_SGV = (gradient.to(q_THK.dtype) for gradient in gradients)
    return grad_q_THK, grad_k_SGK, grad_v_SGV

"""The mathematics of ``pooled_attention``, forward and backward, in plain torch.

The same P queries, the seeds Q (P, K), look at the keys and values of every sequence b::

    S_b = scale · Q K_bᵀ     P_b = softmax(S_b), or f(S_b)     out_b = P_b V_b

    dV_b = P_bᵀ dO_b         dP_b = dO_b V_bᵀ
    dS_b = P_b ∘ (dP_b − rowsum(dO_b ∘ out_b)), or dP_b ∘ f'(S_b)
    dK_b = scale · dS_bᵀ Q   dQ = scale · Σ_b dS_b K_b

so the gradient of the seeds is summed over the batch. An empty sequence has out = 0 and no part
in any gradient. Computes in fp32, or fp64 for fp64. On a CPU the result has the same bits in
every run with the same number of threads.

Source: Lee et al. 2019 (arXiv:1810.00825) for pooling by seeds; Meta's GEM training article for
seeds shared by the batch.
"""

from torch import Tensor

from gem_attention.chunked.activation import activation_backward, activation_forward
from gem_attention.chunked.plan import plan_shared
from gem_attention.chunked.softmax import softmax_backward, softmax_forward


def pooled_attention_reference(
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    k_lengths_B: Tensor,
    activations: tuple[str, ...] | None,
    scale: float,
) -> Tensor:
    """Pool each sequence with the seeds.

    Args:
        seeds_PHK: queries of every sequence.
        k_SGK: keys.
        v_SGV: values.
        k_lengths_B: keys of each sequence, int64 on the CPU.
        activations: one name for all query heads or one for each; None for softmax.
        scale: factor of the scores.

    Returns:
        out_BPHV in the dtype of the seeds.
    """
    (seeds, heads, _), batch = seeds_PHK.shape, k_lengths_B.shape[0]
    chunks = plan_shared(seeds, k_lengths_B, seeds_PHK.device)
    if activations is None:
        out, _ = softmax_forward(
            seeds_PHK, k_SGK, v_SGV, chunks, scale=scale, out_rows=batch * seeds
        )
    else:
        out = activation_forward(
            seeds_PHK, k_SGK, v_SGV, chunks, activations, scale=scale, out_rows=batch * seeds
        )
    return out.to(seeds_PHK.dtype).view(batch, seeds, heads, v_SGV.shape[2])


def pooled_attention_backward_reference(
    grad_out_BPHV: Tensor,
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_BPHV: Tensor,
    k_lengths_B: Tensor,
    activations: tuple[str, ...] | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate ``pooled_attention_reference``.

    Args:
        grad_out_BPHV: gradient of out.
        seeds_PHK: as in the forward.
        k_SGK: as in the forward.
        v_SGV: as in the forward.
        out_BPHV: result of the forward.
        k_lengths_B: as in the forward.
        activations: as in the forward.
        scale: as in the forward.

    Returns:
        gradients of the seeds, k and v in their dtypes.
    """
    chunks = plan_shared(seeds_PHK.shape[0], k_lengths_B, seeds_PHK.device)
    rows = (grad_out_BPHV.shape[0] * grad_out_BPHV.shape[1], *grad_out_BPHV.shape[2:])
    grad_out = grad_out_BPHV.reshape(rows)
    if activations is None:
        gradients = softmax_backward(
            grad_out, None, seeds_PHK, k_SGK, v_SGV, out_BPHV.reshape(rows), chunks, scale=scale
        )
    else:
        gradients = activation_backward(
            grad_out, seeds_PHK, k_SGK, v_SGV, chunks, activations, scale=scale
        )
    grad_seeds_PHK, grad_k_SGK, grad_v_SGV = (g.to(seeds_PHK.dtype) for g in gradients)
    return grad_seeds_PHK, grad_k_SGK, grad_v_SGV

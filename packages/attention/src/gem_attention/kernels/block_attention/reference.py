"""The mathematics of ``block_attention``, forward and backward, in plain torch.

Each sequence is cut into blocks of ``block_tokens`` tokens, the last of which may be shorter. For
each block and head::

    S = scale · Q Kᵀ     P = softmax(S)     out = P V

    dV = Pᵀ dO           dP = dO Vᵀ         dS = P ∘ (dP − rowsum(dO ∘ out))
    dQ = scale · dS K    dK = scale · dSᵀ Q

Blocks do not see each other, so a block is a task of its own (``chunked.plan``) and the
cost is linear in length. Rows behind the last sequence have out = 0 and no part in any gradient.
Computes in fp32, or fp64 for fp64. On a CPU the result has the same bits in every run with the
same number of threads.

Source: Meta's GEM kernels article (block attention).
"""

from torch import Tensor

from gem_attention.chunked.plan import plan_blocks
from gem_attention.chunked.softmax import softmax_backward, softmax_forward


def block_attention_reference(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    lengths_B: Tensor,
    block_tokens: int,
    scale: float,
) -> Tensor:
    """Attend within each block.

    Args:
        q_THK: queries.
        k_TGK: keys.
        v_TGV: values.
        lengths_B: tokens of each sequence, int64 on the CPU.
        block_tokens: length of a block, above 0.
        scale: factor of the scores.

    Returns:
        out_THV in the dtype of q.
    """
    chunks = plan_blocks(lengths_B, block_tokens, q_THK.device)
    out_THV, _ = softmax_forward(q_THK, k_TGK, v_TGV, chunks, scale=scale, out_rows=q_THK.shape[0])
    return out_THV.to(q_THK.dtype)


def block_attention_backward_reference(
    grad_out_THV: Tensor,
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    out_THV: Tensor,
    lengths_B: Tensor,
    block_tokens: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate ``block_attention_reference``.

    Args:
        grad_out_THV: gradient of out.
        q_THK: as in the forward.
        k_TGK: as in the forward.
        v_TGV: as in the forward.
        out_THV: result of the forward.
        lengths_B: as in the forward.
        block_tokens: as in the forward.
        scale: as in the forward.

    Returns:
        gradients of q, k and v in their dtypes.
    """
    chunks = plan_blocks(lengths_B, block_tokens, q_THK.device)
    gradients = softmax_backward(
        grad_out_THV, None, q_THK, k_TGK, v_TGV, out_THV, chunks, scale=scale
    )
    grad_q_THK, grad_k_TGK, grad_v_TGV = (gradient.to(q_THK.dtype) for gradient in gradients)
    return grad_q_THK, grad_k_TGK, grad_v_TGV

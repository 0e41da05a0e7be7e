"""The mathematics of ``block_attention``, forward and backward, in plain torch.

Each sequence is cut into blocks of ``block_tokens`` tokens, the last of which may be shorter. For
each block and head::

    S = scale · Q Kᵀ     P = softmax(S)     out = P V

    dV = Pᵀ dO           dP = dO Vᵀ         dS = P ∘ (dP − rowsum(dO ∘ out))
    dQ = scale · dS K    dK = scale · dSᵀ Q

With a rotation queries and keys are turned before the scores and the gradients turned back after::

    angle[t, f] = (place of t in its block) · rates[0, f] + log_gap[t] · rates[1, f]
    q'[t] = R(angle[t]) q[t]     k'[t] = R(angle[t]) k[t]     dq[t] = R(−angle[t]) dq'[t]

Scores depend on differences of angles alone and the first token of a block has the same share in
all of them, so these are the scores of rotating by the place in the sequence, without the rounding
that angles of thousands bring. Nothing is rounded between rotation and product.

Blocks do not see each other, so a block is a task of its own (``chunked.plan``) and the
cost is linear in length. Rows behind the last sequence have out = 0 and no part in any gradient.
Computes in fp32, or fp64 for fp64. On a CPU the result has the same bits in every run with the
same number of threads.

Source: Meta's GEM kernels article (block attention).
"""

import torch
from torch import Tensor

from gem_attention.chunked.plan import plan_blocks
from gem_attention.chunked.softmax import softmax_backward, softmax_forward
from gem_attention.rotary import apply_rotary
from gem_jagged.offsets import positions


def block_attention_reference(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    lengths_B: Tensor,
    block_tokens: int,
    scale: float,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend within each block.

    Args:
        q_THK: queries.
        k_TGK: keys.
        v_TGV: values.
        lengths_B: tokens of each sequence, int64 on the CPU.
        block_tokens: length of a block, above 0.
        scale: factor of the scores.
        angles: cosine and sine by which queries and keys are turned, as ``block_angles`` makes
            them; None for no rotation.

    Returns:
        out_THV in the dtype of q.
    """
    dtype = q_THK.dtype
    q_THK, k_TGK = _turned(q_THK, angles), _turned(k_TGK, angles)
    chunks = plan_blocks(lengths_B, block_tokens, q_THK.device)
    out_THV, _ = softmax_forward(q_THK, k_TGK, v_TGV, chunks, scale=scale, out_rows=q_THK.shape[0])
    return out_THV.to(dtype)


def block_attention_backward_reference(  # noqa: PLR0913 - what the mathematics takes
    grad_out_THV: Tensor,
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    out_THV: Tensor,
    lengths_B: Tensor,
    block_tokens: int,
    scale: float,
    angles: tuple[Tensor, Tensor] | None = None,
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
        angles: as in the forward.

    Returns:
        gradients of q, k and v in their dtypes.
    """
    dtype = q_THK.dtype
    q_THK, k_TGK = _turned(q_THK, angles), _turned(k_TGK, angles)
    chunks = plan_blocks(lengths_B, block_tokens, q_THK.device)
    gradients = softmax_backward(
        grad_out_THV, None, q_THK, k_TGK, v_TGV, out_THV, chunks, scale=scale
    )
    grad_q_THK, grad_k_TGK, grad_v_TGV = gradients
    if angles is not None:
        back = (angles[0], -angles[1])
        grad_q_THK, grad_k_TGK = _turned(grad_q_THK, back), _turned(grad_k_TGK, back)
    return grad_q_THK.to(dtype), grad_k_TGK.to(dtype), grad_v_TGV.to(dtype)


def block_angles(
    rates: Tensor, log_gap_T: Tensor | None, offsets_O: Tensor, tokens: int, block_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each token's angles.

    Args:
        rates: turn of each pair by place and by log gap (2, K/2), float32 or float64.
        log_gap_T: ln(1 + gap/time_scale) of each token; None turns by place alone.
        offsets_O: first token of each sequence.
        tokens: rows, those behind the last sequence included.
        block_tokens: length of a block.

    Returns:
        cos and sin (T, K/2) in the dtype of the rates.
    """
    place_T = positions(offsets_O, tokens) % block_tokens
    angle = place_T.to(rates.dtype)[:, None] * rates[0]
    if log_gap_T is not None:
        angle = angle + log_gap_T.to(rates.dtype)[:, None] * rates[1]
    return angle.cos(), angle.sin()


def _turned(x_THK: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    if angles is None:
        return x_THK
    # In fp32 or wider, so that nothing is rounded before the product or after the gradient.
    return apply_rotary(x_THK.to(torch.promote_types(x_THK.dtype, torch.float32)), *angles)

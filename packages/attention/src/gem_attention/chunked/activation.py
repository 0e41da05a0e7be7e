"""Attention without softmax over the chunks of a plan, forward and backward, in plain torch.

For the rows of one task, with S the scaled scores and f the activation of the head::

    P = f(S), 0 where the window hides a pair      out = P V

    dV = Pᵀ dO      dS = (dO Vᵀ) ∘ f'(S), 0 where hidden
    dQ = scale · dS K      dK = scale · dSᵀ Q

Rows have no statistics, so a padded key needs no mask: its value is read as 0, which gives it no
part in the output and no gradient. Backward computes S again rather than keep it.

Private to the reference implementations of the operators with activations.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_attention.activations import activate, activate_backward
from gem_attention.chunked.memory import (
    add,
    first_of_group,
    product,
    read,
    result_rows,
    score_buffer,
    token_rows,
    write,
)
from gem_attention.chunked.plan import Chunk
from gem_attention.chunked.softmax import Window


def activation_forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    chunks: Sequence[Chunk],
    activations: Sequence[str],
    *,
    scale: float,
    out_rows: int,
    window: Window = (None, None),
) -> Tensor:
    """Compute attention with an elementwise activation.

    Args:
        q_THK: queries.
        k_SGK: keys; query head h reads key head h // (H / G).
        v_SGV: values.
        chunks: the plan.
        activations: one name for all query heads, or one for each.
        scale: factor of the scores.
        out_rows: rows of the result.
        window: the window of the plan (left, right).

    Returns:
        out (out_rows, H, V), wide; rows that no task computes are 0.
    """
    heads, groups, width = q_THK.shape[1], k_SGK.shape[1], v_SGV.shape[2]
    names = _per_head(activations, heads)
    device = q_THK.device
    q, k, v = token_rows(q_THK), token_rows(k_SGK), token_rows(v_SGV)
    out = result_rows(out_rows, heads * width, q)
    buffer = score_buffer(chunks, q)
    for chunk in chunks:
        q_rows, k_rows = chunk.q_rows(0, device), chunk.k_rows(0, device)
        q_c, k_c = read(q, q_rows, heads), read(k, k_rows, groups)
        v_c = read(v, k_rows, groups, zero_padding=True)
        visible = _visible(chunk, window, q)
        out_c = q.new_empty(heads, chunk.tasks, chunk.queries, width)
        for h in range(heads):
            g = h * groups // heads
            score = product(buffer, q_c[:, :, h], k_c[:, :, g], scale=scale)
            p = activate(names[h], score)
            if visible is not None:
                p.mul_(visible)
            torch.bmm(p, v_c[:, :, g], out=out_c[h])
        write(out, chunk.out_rows(out_rows, device), out_c)
    return out[:out_rows].view(out_rows, heads, width)


def activation_backward(
    grad_out: Tensor,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    chunks: Sequence[Chunk],
    activations: Sequence[str],
    *,
    scale: float,
    window: Window = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of ``activation_forward``.

    Args:
        grad_out: gradient of the result (rows, H, V).
        q_THK: queries of the forward.
        k_SGK: keys of the forward.
        v_SGV: values of the forward.
        chunks: the plan of the forward.
        activations: one name for all query heads, or one for each.
        scale: factor of the scores.
        window: the window of the plan (left, right).

    Returns:
        gradients of q, k and v, wide. Rows of ``grad_out`` that no task computed are not read.
    """
    (q_tokens, heads, head_width), (k_tokens, groups, width) = q_THK.shape, v_SGV.shape
    names = _per_head(activations, heads)
    device = q_THK.device
    q, k, v = token_rows(q_THK), token_rows(k_SGK), token_rows(v_SGV)
    grad = token_rows(grad_out)
    grad_q = result_rows(q_tokens, heads * head_width, q)
    grad_k = result_rows(k_tokens, groups * head_width, q)
    grad_v = result_rows(k_tokens, groups * width, q)
    buffer, other_buffer = score_buffer(chunks, q), score_buffer(chunks, q)
    for chunk in chunks:
        q_rows, k_rows = chunk.q_rows(q_tokens, device), chunk.k_rows(k_tokens, device)
        q_c, k_c = read(q, q_rows, heads), read(k, k_rows, groups)
        v_c = read(v, k_rows, groups, zero_padding=True)
        # A padded row repeats a real one: with a gradient it would count twice in dK and dV.
        grad_c = read(grad, chunk.out_rows(0, device), heads, zero_padding=True)
        visible = _visible(chunk, window, q)
        grad_q_c = q.new_empty(heads, chunk.tasks, chunk.queries, head_width)
        grad_k_c = q.new_empty(groups, chunk.tasks, chunk.keys, head_width)
        grad_v_c = q.new_empty(groups, chunk.tasks, chunk.keys, width)
        for h in range(heads):
            g = h * groups // heads
            # The first head of a group overwrites the gradient of its keys, the others add.
            beta = 0.0 if first_of_group(h, heads, groups) else 1.0
            q_h, k_g, grad_h = q_c[:, :, h], k_c[:, :, g], grad_c[:, :, h]
            score = product(buffer, q_h, k_g, scale=scale)
            grad_p = product(other_buffer, grad_h, v_c[:, :, g])
            if visible is not None:
                grad_p.mul_(visible)
            grad_s = activate_backward(names[h], grad_p, score)
            # Last, because it may be the scores themselves, and then the mask overwrites them.
            p = activate(names[h], score)
            if visible is not None:
                p.mul_(visible)
            grad_v_c[g].baddbmm_(p.transpose(1, 2), grad_h, beta=beta)
            grad_q_c[h].baddbmm_(grad_s, k_g, beta=0.0, alpha=scale)
            grad_k_c[g].baddbmm_(grad_s.transpose(1, 2), q_h, beta=beta, alpha=scale)
        add(grad_q, q_rows, grad_q_c)
        add(grad_k, k_rows, grad_k_c)
        add(grad_v, k_rows, grad_v_c)
    return (
        grad_q[:q_tokens].view(q_THK.shape),
        grad_k[:k_tokens].view(k_SGK.shape),
        grad_v[:k_tokens].view(v_SGV.shape),
    )


def _per_head(activations: Sequence[str], heads: int) -> Sequence[str]:
    return list(activations) * heads if len(activations) == 1 else activations


def _visible(chunk: Chunk, window: Window, like: Tensor) -> Tensor | None:
    """Return 1 where the window shows a pair and 0 where it hides it; None if it hides none."""
    hidden = chunk.hidden_by_window(*window, like.device)
    return None if hidden is None else (~hidden).to(like.dtype)

"""Softmax attention over the chunks of a plan, forward and backward, in plain torch.

For the rows of one task, with S the scaled scores and hidden ones at -inf::

    P = softmax(S)      out = P V      lse = ln Σ exp S

    dV = Pᵀ dO          dP = dO Vᵀ     dS = P ∘ (dP − rowsum(dO ∘ out) + dlse)
    dQ = scale · dS K   dK = scale · dSᵀ Q

The row sum of dO ∘ out equals that of P ∘ dP and costs one pass over the outputs instead of the
scores; ∂lse/∂S is P, so a gradient of the logsumexp joins it. Backward computes P again rather
than keep it.

Private to the reference implementations of the softmax operators.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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

Window = tuple[int | None, int | None]


def softmax_forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    chunks: Sequence[Chunk],
    *,
    scale: float,
    out_rows: int,
    window: Window = (None, None),
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute softmax attention.

    Args:
        q_THK: queries.
        k_SGK: keys; query head h reads key head h // (H / G).
        v_SGV: values.
        chunks: the plan.
        scale: factor of the scores.
        out_rows: rows of the result.
        window: the window of the plan (left, right).
        with_lse: return the logsumexp too; costs two more passes over the scores.

    Returns:
        out (out_rows, H, V), and lse (out_rows, H) or None, both wide; rows that no task computes
        are 0 and -inf.
    """
    heads, groups, width = q_THK.shape[1], k_SGK.shape[1], v_SGV.shape[2]
    device = q_THK.device
    q, k, v = token_rows(q_THK), token_rows(k_SGK), token_rows(v_SGV)
    out = result_rows(out_rows, heads * width, q)
    lse = result_rows(out_rows, heads, q).fill_(-torch.inf) if with_lse else None
    buffer = score_buffer(chunks, q)
    for chunk in chunks:
        q_rows, k_rows = chunk.q_rows(0, device), chunk.k_rows(0, device)
        q_c, k_c, v_c = read(q, q_rows, heads), read(k, k_rows, groups), read(v, k_rows, groups)
        bias, tail = _biases(chunk, window, q)
        out_c = q.new_empty(heads, chunk.tasks, chunk.queries, width)
        largest = q.new_empty(heads, chunk.tasks, chunk.queries)
        share = torch.empty_like(largest)
        for h in range(heads):
            g = h * groups // heads
            p = _scores(buffer, q_c[:, :, h], k_c[:, :, g], scale, bias, tail)
            if with_lse:
                torch.amax(p, -1, out=largest[h])
            torch.softmax(p, -1, out=p)
            if with_lse:
                torch.amax(p, -1, out=share[h])
            torch.bmm(p, v_c[:, :, g], out=out_c[h])
        target = chunk.out_rows(out_rows, device)
        write(out, target, out_c)
        if lse is not None:
            # The largest probability is exp(largest score - lse).
            write(lse, target, largest.sub_(share.log_())[..., None])
    out_RHV = out[:out_rows].view(out_rows, heads, width)
    return out_RHV, None if lse is None else lse[:out_rows]


def softmax_backward(  # noqa: PLR0913 - what the mathematics takes
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out: Tensor,
    chunks: Sequence[Chunk],
    *,
    scale: float,
    window: Window = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of ``softmax_forward``.

    Args:
        grad_out: gradient of the result (rows, H, V).
        grad_lse: gradient of the logsumexp (rows, H), or None.
        q_THK: queries of the forward.
        k_SGK: keys of the forward.
        v_SGV: values of the forward.
        out: result of the forward.
        chunks: the plan of the forward.
        scale: factor of the scores.
        window: the window of the plan (left, right).

    Returns:
        gradients of q, k and v, wide. Rows of ``grad_out`` that no task computed are not read.
    """
    (q_tokens, heads, head_width), (k_tokens, groups, width) = q_THK.shape, v_SGV.shape
    device = q_THK.device
    q, k, v = token_rows(q_THK), token_rows(k_SGK), token_rows(v_SGV)
    o, grad = token_rows(out), token_rows(grad_out)
    grad_l = None if grad_lse is None else grad_lse.to(q.dtype)
    grad_q = result_rows(q_tokens, heads * head_width, q)
    grad_k = result_rows(k_tokens, groups * head_width, q)
    grad_v = result_rows(k_tokens, groups * width, q)
    buffer, other_buffer = score_buffer(chunks, q), score_buffer(chunks, q)
    for chunk in chunks:
        q_rows, k_rows = chunk.q_rows(q_tokens, device), chunk.k_rows(k_tokens, device)
        source = chunk.out_rows(0, device)
        q_c, k_c, v_c = read(q, q_rows, heads), read(k, k_rows, groups), read(v, k_rows, groups)
        grad_c = read(grad, source, heads)
        # What is taken from dP in every column of a row, with the sign that adding needs.
        shift_c = read(o, source, heads).mul_(grad_c).sum(-1, keepdim=True).neg_()
        if grad_l is not None:
            shift_c += read(grad_l, source, heads)
        bias, tail = _biases(chunk, window, q)
        grad_q_c = q.new_empty(heads, chunk.tasks, chunk.queries, head_width)
        grad_k_c = q.new_empty(groups, chunk.tasks, chunk.keys, head_width)
        grad_v_c = q.new_empty(groups, chunk.tasks, chunk.keys, width)
        for h in range(heads):
            g = h * groups // heads
            # The first head of a group overwrites the gradient of its keys, the others add.
            beta = 0.0 if first_of_group(h, heads, groups) else 1.0
            q_h, k_g, grad_h = q_c[:, :, h], k_c[:, :, g], grad_c[:, :, h]
            p = _scores(buffer, q_h, k_g, scale, bias, tail)
            torch.softmax(p, -1, out=p)
            if q_rows.padding is not None:
                # A padded row repeats a real one and would count twice in dK and dV. Or it sees no
                # key and has NaN.
                p.flatten(0, 1).index_fill_(0, q_rows.padding, 0.0)
            grad_v_c[g].baddbmm_(p.transpose(1, 2), grad_h, beta=beta)
            grad_s = p.mul_(product(other_buffer, grad_h, v_c[:, :, g], shift=shift_c[:, :, h]))
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


def _biases(chunk: Chunk, window: Window, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return what to add to the scores of a chunk: for the window, and for its ragged end.

    Added rather than filled in: ten times faster on a CPU. Infinite, because against a finite
    number a visible score that is lower still would lose to a hidden one. A padded query may see
    no key at all and then has NaN, which forward leaves in a row that nobody reads.
    """
    hidden, tail = chunk.hidden_by_window(*window, like.device), chunk.hidden_tail(like.device)
    return (
        None if hidden is None else _minus_infinity(hidden, like),
        None if tail is None else _minus_infinity(tail, like),
    )


def _minus_infinity(where: Tensor, like: Tensor) -> Tensor:
    """Return -inf where ``where`` is True and 0 elsewhere."""
    return like.new_zeros(where.shape).masked_fill_(where, -torch.inf)


def _scores(
    buffer: Tensor, q: Tensor, k: Tensor, scale: float, bias: Tensor | None, tail: Tensor | None
) -> Tensor:
    score = product(buffer, q, k, scale=scale, shift=bias)
    if tail is not None:
        score[:, :, -tail.shape[2] :] += tail
    return score

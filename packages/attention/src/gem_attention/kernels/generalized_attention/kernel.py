"""Attention without softmax over jagged batches in plain Triton, on any GPU and in the interpreter.

The kernels are those of softmax attention with the weights f(scale · score) in place of a softmax
(``gem_attention.portable``): the same tiles, in the same order, without row statistics. The
backward needs neither the output nor a pass before it. It is split, one kernel for the gradient of
q and one for those of k and v, sums in a fixed order and so gives the same bits in every run; where
sequences have at most 64 queries and see every key, one pass over the keys gives all three.
"""

from functools import partial

import torch
from torch import Tensor

from gem_attention.portable.launching.kernel import Call, run_backward, run_forward
from gem_attention.tiles import Window

_NAME = "generalized_attention"


def launch_forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    *,
    window: Window,
    scale: float,
    activations: str,
) -> Tensor:
    """Attend; return out_THV in the dtype of q, every row written."""
    tokens, heads, _ = q_THK.shape
    out_THV = q_THK.new_empty((tokens, heads, v_SGV.shape[2]))
    if tokens == 0:
        return out_THV
    given = (q_THK, k_SGK, v_SGV)
    call = Call(_NAME, *given, q_offsets_O, k_offsets_O, window, scale, activations=activations)
    # Where softmax writes the logsumexp nothing is written here.
    run = partial(run_forward, call, given, out_THV, out_THV)
    with torch.cuda.device_of(q_THK):
        run(call.config("forward", q_THK, run))
    return out_THV


def launch_backward(
    grad_out_THV: Tensor,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    *,
    window: Window,
    scale: float,
    activations: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; always deterministic, every row written."""
    del deterministic
    operands = (q_THK, k_SGK, v_SGV)
    gradients = (
        q_THK.new_empty(q_THK.shape),
        k_SGK.new_empty(k_SGK.shape),
        v_SGV.new_empty(v_SGV.shape),
    )
    call = Call(_NAME, *operands, q_offsets_O, k_offsets_O, window, scale, activations=activations)
    # Where softmax reads the logsumexp and delta nothing is read here.
    given = (*operands, grad_out_THV, grad_out_THV, grad_out_THV)
    with torch.cuda.device_of(q_THK):
        run_backward(call, given, gradients)
    return gradients

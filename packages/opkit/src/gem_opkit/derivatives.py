"""Derivatives that a custom operator has not: tangents and the transforms of ``torch.func``.

Left out: second derivatives, which each package refuses, or leaves to torch's own error.
"""

import torch
from torch import Tensor
from torch._C._functorch import is_gradtrackingtensor

from gem_opkit.errors import UnsupportedError, refusal


def check_autograd(op: str, **tensors: Tensor | None) -> None:
    """Refuse tangents and transforms of ``torch.func``, which a custom operator drops or breaks.

    Forward-mode differentiation would otherwise return a tangent of zeros without a word. Reads no
    device tensor, and does nothing while ``torch.compile`` traces.

    Args:
        op: the operator that was called, for the message.
        tensors: what it can be differentiated by, under the caller's names; None is passed over.

    Raises:
        UnsupportedError: a tensor that carries a tangent, or is differentiated by ``torch.func``.
    """
    if torch.compiler.is_compiling():
        return
    forward_mode = torch.autograd.forward_ad
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if is_gradtrackingtensor(tensor) or (
            forward_mode._current_level >= 0
            and forward_mode.unpack_dual(tensor).tangent is not None
        ):
            raise UnsupportedError(
                refusal(
                    op,
                    name,
                    must="carry no tangent and be outside torch.func.grad, vjp, jvp and jacrev",
                    got="a transformed tensor",
                    fix="differentiate with backward() or torch.autograd.grad",
                )
            )

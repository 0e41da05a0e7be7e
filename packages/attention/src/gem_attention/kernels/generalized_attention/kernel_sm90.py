"""Launching ``generalized_attention`` on Hopper: TMA, asynchronous wgmma, specialised warps.

Forward and backward are the kernels of softmax attention with f(scale · score) for weights
(``gem_attention.hopper``). What they do not take, ``kernel.py`` computes.
"""

from torch import Tensor

from gem_attention.hopper.backward import kernel_sm90 as hopper_backward
from gem_attention.hopper.forward import kernel_sm90 as hopper_forward
from gem_attention.hopper.launching import takes
from gem_attention.tiles import Window

__all__ = ["launch_backward", "launch_forward", "supports"]


def supports(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    *,
    window: Window,
    deterministic: bool,
    activations: str,
    batch: int = 0,
    backward: bool = False,
) -> bool:
    """Say whether the kernels of this file take a call.

    Args:
        q_THK: queries.
        k_SGK: keys.
        v_SGV: values.
        window: keys visible left and right; any window is taken.
        deterministic: whether the backward must give the same bits in every run; it does not.
        activations: one name for all heads, or one a query head joined by commas.
        batch: number of sequences; 0 where it is not known.
        backward: whether the gradients are asked for; only of one activation for all heads.

    Returns:
        True for what ``gem_attention.hopper.launching.takes`` names.
    """
    del window
    if backward and len(set(activations.split(","))) > 1:
        return False
    return not deterministic and takes(q_THK, k_SGK, v_SGV, batch=batch)


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
    out_THV, _ = hopper_forward.launch_forward(
        q_THK,
        k_SGK,
        v_SGV,
        q_offsets_O,
        k_offsets_O,
        window=window,
        scale=scale,
        activations=activations,
    )
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
    """Return the gradients of q, k and v; that of q differs between runs in its last bit."""
    del deterministic  # ``supports`` refuses it
    return hopper_backward.launch_backward(
        grad_out_THV,
        None,
        q_THK,
        k_SGK,
        v_SGV,
        None,
        None,
        q_offsets_O,
        k_offsets_O,
        window=window,
        scale=scale,
        activations=activations,
    )

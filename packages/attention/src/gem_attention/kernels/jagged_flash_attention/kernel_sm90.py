"""Launching ``jagged_flash_attention`` on Hopper: TMA, asynchronous wgmma, specialised warps.

Takes what the fast path takes and nothing else; ``supports`` says what that is, and ``kernel.py``
computes the rest. Nothing here reads a device tensor on the host: tile lists and counts stay on
the device, and descriptors hold addresses and strides alone, so that a captured CUDA graph may be
replayed with other lengths.

The device code is in ``gem_attention.hopper``: forward and backward in Gluon, which has no
interpreter, and what stands around the backward in Triton.
"""

from torch import Tensor

from gem_attention.hopper.backward import kernel_sm90 as hopper_backward
from gem_attention.hopper.forward.kernel_sm90 import launch_forward
from gem_attention.hopper.launching import takes
from gem_attention.hopper.windowed.kernel_sm90 import is_narrow, launch_narrow_backward
from gem_attention.tiles import Window

__all__ = ["WRITES_INTO", "launch_backward", "launch_forward", "supports"]

# The backward can write the gradient of v into a part of another tensor.
WRITES_INTO = True


def supports(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    *,
    window: Window,
    deterministic: bool,
    batch: int = 0,
) -> bool:
    """Say whether the kernels of this file take a call.

    Args:
        q_THK: queries.
        k_SGK: keys.
        v_SGV: values.
        window: keys visible left and right; any window is taken.
        deterministic: whether the backward must give the same bits in every run; it does under a
            narrow window alone.
        batch: number of sequences; 0 where it is not known.

    Returns:
        True for bf16 and fp16 on compute capability 9.0 with one head width of 64 or 128, heads
        that lie side by side, rows that begin at multiples of 16 bytes, and sequences of at least
        32 queries in the mean: shorter ones would mostly fill their tiles with padding.
    """
    if deterministic and not is_narrow(window):
        return False
    return takes(q_THK, k_SGK, v_SGV, batch=batch)


def launch_backward(
    grad_out_THV: Tensor,
    grad_lse_TH: Tensor | None,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    *,
    window: Window,
    scale: float,
    deterministic: bool,
    grad_v_SGV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate ``launch_forward``.

    Args:
        grad_out_THV: gradient of out.
        grad_lse_TH: gradient of the logsumexp; None for 0.
        q_THK: as in the forward.
        k_SGK: as in the forward.
        v_SGV: as in the forward.
        out_THV: result of the forward.
        lse_TH: result of the forward.
        q_offsets_O: as in the forward.
        k_offsets_O: as in the forward.
        window: as in the forward.
        scale: as in the forward.
        deterministic: as ``supports`` takes it.
        grad_v_SGV: where to write the gradient of v, heads side by side; None for memory of its
            own.

    Returns:
        gradients of q, k and v. That of q differs between runs in its last bit, unless the window
        is narrow.
    """
    del deterministic
    launch = launch_narrow_backward if is_narrow(window) else hopper_backward.launch_backward
    return launch(
        grad_out_THV,
        grad_lse_TH,
        q_THK,
        k_SGK,
        v_SGV,
        out_THV,
        lse_TH,
        q_offsets_O,
        k_offsets_O,
        window=window,
        scale=scale,
        grad_v_SGV=grad_v_SGV,
    )

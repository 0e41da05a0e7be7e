"""Which kernels run a call of ``jagged_flash_attention``, and how its operands reach them."""

import logging
from types import ModuleType
from typing import Any

from torch import Tensor

from gem_attention.choosing import bounded_sides, readable_rows
from gem_attention.tiles import Window
from gem_attention.tiling.sizes import short_rows

_NAME = "jagged_flash_attention"
_log = logging.getLogger(__name__)
_announced: set[tuple[Any, ...]] = set()


def _kernels(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    *,
    batch: int,
    window: Window,
    deterministic: bool,
) -> ModuleType:
    """Return the module whose launchers run, and say once which it is."""
    from gem_attention.kernels.jagged_flash_attention import kernel

    chosen = kernel
    # Few queries over many keys are bound by memory, where the plain kernels lack nothing. At 64
    # queries they already fell behind the Hopper ones.
    width = max(q_THK.shape[2], v_SGV.shape[2])
    few = q_THK.shape[1] == k_SGK.shape[1] and short_rows(q_THK.shape[0], batch, width=width) == 32
    if q_THK.is_cuda and not (few and window == (None, None)):
        from gem_attention.kernels.jagged_flash_attention import kernel_sm90

        if kernel_sm90.supports(
            q_THK, k_SGK, v_SGV, window=window, deterministic=deterministic, batch=batch
        ):
            chosen = kernel_sm90
    key = (chosen.__name__, q_THK.device.type, q_THK.dtype, q_THK.shape[2], v_SGV.shape[2])
    if key not in _announced:
        _announced.add(key)
        name = chosen.__name__.rpartition(".")[2]
        _log.info("%s: %s runs on %s for %s, K=%d, V=%d", _NAME, name, *key[1:])
    return chosen


def launch_forward(
    operands: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[Tensor, Tensor],
    window: Window,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend with the kernels that take these operands.

    Args:
        operands: q_THK, k_SGK and v_SGV, any strides, of a dtype and widths that Triton takes.
        offsets: first query and first key of each sequence, int32 or int64, on the device.
        window: keys visible left and right; None for all.
        scale: factor of the scores, of either sign.

    Returns:
        out_THV, and lse_TH in fp32.
    """
    readable = _readable(operands, scale)
    window = bounded_sides(window)
    batch = offsets[0].shape[0] - 1
    kernels = _kernels(*readable, batch=batch, window=window, deterministic=False)
    return kernels.launch_forward(
        *readable, *(side.contiguous() for side in offsets), window=window, scale=abs(scale)
    )


def launch_backward(
    upstream: tuple[Tensor, Tensor | None],
    operands: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    offsets: tuple[Tensor, Tensor],
    window: Window,
    scale: float,
    *,
    deterministic: bool,
    grad_v_SGV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate ``launch_forward``.

    Args:
        upstream: gradients of out and of the logsumexp; the latter None for 0.
        operands: as there.
        results: out_THV and lse_TH of the forward.
        offsets: as there.
        window: as there.
        scale: as there.
        deterministic: whether the bits must be the same in every run.
        grad_v_SGV: where the gradient of v may be written, heads side by side; the Hopper kernels
            do.

    Returns:
        gradients of q, k and v.
    """
    readable = _readable(operands, scale)
    window = bounded_sides(window)
    batch = offsets[0].shape[0] - 1
    kernels = _kernels(*readable, batch=batch, window=window, deterministic=deterministic)
    grad_out_THV, grad_lse_TH = upstream
    given: dict[str, Any] = {"deterministic": deterministic}
    if grad_v_SGV is not None and hasattr(kernels, "WRITES_INTO"):
        from gem_attention.portable.ragged.descriptor import packs

        if packs(grad_v_SGV):
            given["grad_v_SGV"] = grad_v_SGV
    grad_q_THK, grad_k_SGK, made_SGV = kernels.launch_backward(
        readable_rows(grad_out_THV),
        grad_lse_TH,
        *readable,
        *(x.contiguous() for x in results),
        *(side.contiguous() for side in offsets),
        window=window,
        scale=abs(scale),
        **given,
    )
    return -grad_q_THK if scale < 0 else grad_q_THK, grad_k_SGK, made_SGV


def writes_into(
    operands: tuple[Tensor, Tensor, Tensor], batch: int, window: Window, *, deterministic: bool
) -> bool:
    """Say whether the backward writes the gradient of v into a part of another tensor.

    Args:
        operands: q_THK, k_SGK and v_SGV.
        batch: number of sequences.
        window: keys visible left and right; None for all.
        deterministic: whether the bits must be the same in every run.

    Returns:
        False where it would be copied there.
    """
    kernels = _kernels(
        *operands, batch=batch, window=bounded_sides(window), deterministic=deterministic
    )
    return hasattr(kernels, "WRITES_INTO")


def _readable(
    operands: tuple[Tensor, Tensor, Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # The kernels take the maximum before they scale, so the sign moves into the queries.
    q_THK, k_SGK, v_SGV = operands
    return readable_rows(-q_THK if scale < 0 else q_THK), readable_rows(k_SGK), readable_rows(v_SGV)

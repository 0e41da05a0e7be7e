"""Who computes a call of an attention operator, and what the kernels need of its operands.

Shared by the operators; each passes its own name for the messages. Nothing here reads a device
tensor.
"""

import torch
from torch import Tensor

from gem_attention.tiles import OPEN_TOKENS, Window
from gem_opkit.errors import UnsupportedError, refusal
from gem_opkit.impl import resolve_impl

_WIDEST = 256  # head width of the kernels
# Rows that lie further apart overflow the int32 in which kernels count elements within a tile.
_FARTHEST = 2**31 // 512


def choose_implementation(op: str, impl: str, q_THK: Tensor, v_SGV: Tensor) -> str:
    """Resolve ``impl``; what the kernels do not take is refused, or goes to the reference.

    Args:
        op: name of the operator.
        impl: the caller's word.
        q_THK: queries.
        v_SGV: values.

    Returns:
        ``"triton"`` or ``"reference"``.

    Raises:
        UnsupportedError: ``triton`` for float64, for widths above 256, on a device without it, or
            for bfloat16 in Triton's interpreter.
    """
    # Not one expression: of widths that a graph leaves open it would make a symbol.
    fits = True
    if q_THK.dtype == torch.float64 or q_THK.shape[2] > _WIDEST or v_SGV.shape[2] > _WIDEST:
        fits = False
    if impl == "triton" and not fits:
        raise UnsupportedError(
            refusal(
                op,
                'impl="triton"',
                must=f"have float32, bfloat16 or float16 and widths of at most {_WIDEST}",
                got=f"{q_THK.dtype}, K={q_THK.shape[2]}, V={v_SGV.shape[2]}",
                fix='use impl="reference"',
            )
        )
    chosen = resolve_impl(impl, q_THK.device, op, has_triton=fits)
    if chosen == "triton" and q_THK.dtype == torch.bfloat16 and q_THK.device.type == "cpu":
        # Measured: results near 1e9 where 1e-3 was due, and no exception.
        raise UnsupportedError(
            refusal(
                op,
                'impl="triton"',
                must="have float32 or float16 on a CPU",
                got="torch.bfloat16, whose products Triton's interpreter gets wrong",
                fix='use impl="reference"',
            )
        )
    return chosen


def demand_lengths(op: str, *lengths: Tensor | None) -> tuple[Tensor, ...]:
    """Return the lengths, which the reference needs; refuse where only offsets are known."""
    found = tuple(side for side in lengths if side is not None)
    if len(found) < len(lengths):
        raise UnsupportedError(
            refusal(
                op,
                "lengths",
                must='be in host memory for impl="reference"',
                got=None,
                fix="pass layouts, or operands that the Triton kernels take",
            )
        )
    return found


def readable_rows(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where rows are not contiguous or lie too far apart."""
    if tensor.stride(2) == 1 and 0 <= tensor.stride(0) < _FARTHEST:
        return tensor
    return tensor.contiguous()


def bounded_sides(window: Window) -> Window:
    """Return the window with sides that no sequence can fill as open ones."""
    left, right = (None if side is None or side >= OPEN_TOKENS else side for side in window)
    return left, right

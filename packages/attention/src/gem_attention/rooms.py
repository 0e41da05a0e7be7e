"""Where the gradient of values may be written, so that nothing copies it afterwards.

Queries, keys and values come from one projection, and so its gradient is one tensor, of which that
of the values is a part. Attention's backward writes it before the rest is known. ``rotary_heads``
gives its values a room; whoever differentiates attention opens it, writes the gradient of the
values into a part of a tensor as large as the projection, and ``rotary_heads`` finds it there and
adds its own parts. Everything is checked when it is found, and a gradient that came by another way
is copied. Private to the package.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_ROOM = "_gem_room"


@dataclass
class Room:
    """Place for the gradient of a projection.

    Attributes:
        shape: (tokens, heads, width) of the projection.
        first: head with which the values begin; they are the last.
        buffer: what was opened in this backward pass; nobody else has the part before the values.
    """

    shape: tuple[int, int, int]
    first: int
    buffer: Tensor | None = None

    def give(self, values_TGK: Tensor) -> None:
        """Let those who differentiate an operator of these values open the room."""
        setattr(values_TGK, _ROOM, self)

    def found(self, grad_TGK: Tensor) -> Tensor | None:
        """Return the gradient of the projection whose last part ``grad_TGK`` is, and forget it.

        Args:
            grad_TGK: gradient of the values, by whatever way it came.

        Returns:
            the tensor that was opened, its part before the values not written; None where the
            gradient lies elsewhere, as a sum of several does.
        """
        buffer, self.buffer = self.buffer, None
        if buffer is None:
            return None
        part = buffer[:, self.first :]
        same = (
            grad_TGK.dtype == part.dtype
            and grad_TGK.shape == part.shape
            and grad_TGK.stride() == part.stride()
            and grad_TGK.data_ptr() == part.data_ptr()
            and grad_TGK.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        )
        return buffer if same else None


def open_room(values_TGK: Tensor) -> Tensor | None:
    """Return where the gradient of these values is to be written.

    Args:
        values_TGK: as the operator that is differentiated has kept them.

    Returns:
        part of a new tensor, not written; None where the values have no room, and where the
        gradient is itself to be differentiated.
    """
    if not has_room(values_TGK):
        return None
    room = getattr(values_TGK, _ROOM)
    buffer = room.buffer = values_TGK.new_empty(room.shape)
    return buffer[:, room.first :]


def has_room(values_TGK: Tensor) -> bool:
    """Say whether `open_room` would open one; to be asked before what costs more to find out.

    Args:
        values_TGK: as the operator that is differentiated has kept them.

    Returns:
        False in a graph that is traced, too: its tensors are in name, their sizes unknown.
    """
    if not isinstance(getattr(values_TGK, _ROOM, None), Room):
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return type(values_TGK) is Tensor and values_TGK.numel() > 0

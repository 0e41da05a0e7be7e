"""Keep activations in fewer bits: whole storages, each once, however many views of it are kept.

A packing is given from outside, as this package knows no number formats: see `Packing`. What is
packed is what the backward pass would keep anyway; the forward pass goes on with what it has.
"""

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

# Rows of this many elements share a scale, so that narrower ones, such as the sums of a softmax,
# are left as they are: one wrong sum would spoil a whole row of gradients.
NARROWEST = 32
# Below, packing takes longer than the memory is worth.
PACK_ABOVE_BYTES = 2**20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Copies in another dtype, views, views of views.
_LONGEST_CHAIN = 6


class Packing(Protocol):
    """Shortens the numbers of a matrix, with some loss."""

    def bytes_of(self, elements: int) -> int:
        """Memory that so many numbers, a multiple of 32, take when they are packed."""
        ...

    def pack(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """Shorten a contiguous matrix whose rows are a multiple of 32 long."""
        ...

    def unpack(self, packed: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Give it back: of the same shape, contiguous, in memory of its own."""
        ...


def can_be_packed(tensor: Tensor, above_bytes: int) -> bool:
    """Tell whether a kept tensor is one that a packing may shorten.

    Args:
        tensor: that autograd keeps.
        above_bytes: size of its storage below which it is not worth it.

    Returns:
        whether it holds floating-point rows of at least 32 elements. Never for a weight, or for
        what is made of one weight alone, such as its copy in another dtype.
    """
    if tensor.dtype not in _DTYPES or tensor.ndim < 2:
        return False
    # The dim that lies together in memory, which is not the last of a transposed view.
    row = max(
        (n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step == 1), default=0
    )
    storage_bytes = tensor.untyped_storage().nbytes()
    return (
        row >= NARROWEST
        and storage_bytes >= max(above_bytes, 1)
        and not storage_bytes % (NARROWEST * tensor.element_size())
        and not _is_of_a_weight(tensor)
    )


def _is_of_a_weight(tensor: Tensor) -> bool:
    """Whether a tensor comes from one leaf of the graph alone."""
    node = tensor.grad_fn
    if node is None:
        return tensor.requires_grad
    for _ in range(_LONGEST_CHAIN):
        before = [each for each, _ in node.next_functions if each is not None]
        if len(before) != 1:
            return False
        (node,) = before
        if type(node).__name__ == "AccumulateGrad":
            return True
    return False


def rows_of(elements: int) -> tuple[int, int]:
    """As which matrix a storage is packed; its blocks of 32 are the same for every view of it.

    Args:
        elements: of the storage, a multiple of 32.

    Returns:
        rows and width.
    """
    width = next(w for w in (512, 256, 128, 64, NARROWEST) if elements % w == 0)
    return elements // width, width


class _Packed:
    """A storage in fewer bits."""

    def __init__(self, packing: Packing, tensor: Tensor) -> None:
        rows, width = rows_of(tensor.untyped_storage().nbytes() // tensor.element_size())
        with torch.no_grad():
            whole = tensor.detach().as_strided((rows, width), (width, 1), 0)
            self.parts = packing.pack(whole)
        self.dtype, self._packing = tensor.dtype, packing
        self._back: weakref.ref[torch.UntypedStorage] | None = None

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    def back(self) -> torch.UntypedStorage:
        """The whole storage; one copy for all who hold a view of it."""
        found = self._back() if self._back is not None else None
        if found is None:
            with torch.no_grad():
                found = self._packing.unpack(self.parts, self.dtype).untyped_storage()
            self._back = weakref.ref(found)
        return found


class PackedView:
    """A tensor whose storage is packed."""

    def __init__(self, packed: _Packed, tensor: Tensor) -> None:
        self.packed, self._device = packed, tensor.device
        self._place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()

    def back(self) -> Tensor:
        """Give the tensor, with what packing has left of its numbers."""
        found = torch.empty(0, dtype=self.packed.dtype, device=self._device)
        return found.set_(self.packed.back(), *self._place)  # pyright: ignore[reportCallIssue, reportArgumentType]


class Packs:
    """Packs what is kept, each storage once a step.

    Args:
        packing: shortens matrices.
        above_bytes: size of a storage from which it is packed.
    """

    def __init__(self, packing: Packing, above_bytes: int) -> None:
        self._packing, self._above_bytes = packing, above_bytes
        # Address of a storage -> something that dies with it, and what it has been packed into.
        self._known: dict[int, tuple[Any, weakref.ref[_Packed], int]] = {}

    def pack(self, tensor: Tensor) -> Tensor | PackedView:
        """Shorten a tensor that is kept, or leave it.

        Args:
            tensor: any.

        Returns:
            a view into what it has been packed into, or the tensor, detached: an operator's own
            result would hold the operator, and the operator the result.
        """
        if not can_be_packed(tensor, self._above_bytes):
            return tensor.detach()
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._known.get(key)
        if found is not None and found[0]() is storage and found[2] == tensor._version:
            packed = found[1]()
            if packed is not None and packed.dtype == tensor.dtype:
                return PackedView(packed, tensor)
        packed = _Packed(self._packing, tensor)
        gone = weakref.ref(storage, lambda _, key=key: self._known.pop(key, None))
        self._known[key] = gone, weakref.ref(packed), tensor._version
        return PackedView(packed, tensor)


def unpack(kept: Tensor | PackedView) -> Tensor:
    """Give back what `Packs.pack` has kept.

    Args:
        kept: what it returned.
    """
    return kept.back() if isinstance(kept, PackedView) else kept

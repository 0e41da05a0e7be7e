"""What a step keeps in memory between its forward and its backward pass, counted tensor by tensor.

Autograd tells each tensor that it saves. Several that share memory count once; weights and inputs
do not count, as they are there anyway. Left out: what an autograd function holds otherwise than as
a saved tensor, which for those of this project are layouts of a few bytes an example.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gem.train.local_tensors import local_part


@dataclass(slots=True)
class Kept:
    """Memory that autograd holds on to.

    Attributes:
        sizes: address -> bytes.
    """

    sizes: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self.sizes.values())


@contextmanager
def kept_for_backward(given: Iterable[Tensor]) -> Iterator[Kept]:
    """Count what the forward passes within a block keep.

    Args:
        given: tensors that are in memory anyway: weights, the batch.

    Yields:
        the count; right as soon as a forward pass is done, and after its backward pass too.
    """
    there = {_address(tensor) for tensor in given if not tensor.is_sparse}
    kept = Kept()

    def pack(tensor: Tensor) -> Tensor:
        if not tensor.is_sparse:
            address = _address(tensor)
            if address and address not in there:
                size = local_part(tensor).untyped_storage().nbytes()
                kept.sizes[address] = max(size, kept.sizes.get(address, 0))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def _address(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()

"""Moves rows of any dtype, also of those that torch's index kernels lack. Private to references."""

import torch
from torch import Tensor

# As many bits in a dtype that every index kernel has; moving rows does not look at the bits.
_SAME_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def copy_rows(target: Tensor, row_I: Tensor, source: Tensor) -> Tensor:
    """Write ``source`` to the rows ``row_I`` of ``target``, in place.

    Args:
        target: contiguous (R, D).
        row_I: int64, one row for each of ``source``.
        source: (I, D), same dtype, any strides.

    Returns:
        ``target``.
    """
    dtype = target.dtype
    # torch copies rows of neither the unsigned words nor the 8-bit floats.
    if dtype in _UNSIGNED or (dtype.is_floating_point and dtype.itemsize == 1):
        bits = _SAME_BITS[dtype.itemsize]
        target.view(bits).index_copy_(0, row_I, source.view(bits))
        return target
    return target.index_copy_(0, row_I, source)

"""Making the descriptors that ``gem_attention.portable.ragged.device`` reads."""

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_DTYPES = (torch.bfloat16, torch.float16)
_WIDTHS = (64, 128)
# Bound of the middle coordinate, which is an int32.
MOST_ROWS = 2**30


def describes(*tensors: Tensor) -> bool:
    """Say whether TMA can read these tensors by ragged descriptors.

    Args:
        tensors: packed, (tokens, heads, width).

    Returns:
        True on compute capability 9.0 and above for bf16 and fp16, widths of 64 and 128, heads that
        lie side by side and rows that begin at multiples of 16 bytes.
    """
    return all(
        x.is_cuda
        and x.dtype in _DTYPES
        and x.shape[2] in _WIDTHS
        and x.shape[0] < MOST_ROWS
        and packs(x)
        for x in tensors
    ) and torch.cuda.get_device_capability(tensors[0].device) >= (9, 0)


def packs(x: Tensor) -> bool:
    """Say whether heads lie side by side in rows that TMA can read: a view of a fused QKV does.

    Args:
        x: (tokens, heads, width), any dtype.

    Returns:
        True for heads that lie side by side and rows that begin at multiples of 16 bytes.
    """
    return (
        x.stride(2) == 1
        and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
        and x.stride(0) >= x.shape[1] * x.shape[2]
        and x.stride(0) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def ragged_view(x: Tensor, rows: int) -> tuple[list[int], list[int], list[int]]:
    """Return shape, strides and block of a ragged descriptor.

    Args:
        x: (tokens, heads, width), as ``packs`` takes it.
        rows: of a tile.

    Returns:
        four numbers each; ``gem_attention.portable.ragged.device`` says what the coordinates are.
    """
    heads, width = x.shape[1:]
    stride = x.stride(0)
    return (
        [0x7FFF0000, 0x7FFF0000, MOST_ROWS, heads * width],
        [2**34 - stride, stride, stride, 1],
        [1, 1, rows, width],
    )


def ragged(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe a packed tensor for tiles of one head within one sequence.

    Args:
        x: (tokens, heads, width), as ``describes`` takes it.
        rows: of a tile.

    Returns:
        the descriptor; it holds the address and strides alone.
    """
    return TensorDescriptor(x, *ragged_view(x, rows))

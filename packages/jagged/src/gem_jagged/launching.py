"""How kernels are launched: words instead of elements, blocks, and the device. Private.

Kernels that only move rows see words of up to 8 bytes, whatever the dtype. So one compiled kernel
serves them all, 8-bit floats and booleans too, and rows of an odd number of elements still move in
wide words.
"""

import contextlib

import torch
from torch import Tensor

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Words of a tile: with those of the other programs, 8 KiB of wide words keep the memory busy.
_TILE_WORDS = 1024
_WIDE_ROW = 128
_WIDEST_TILE = 512


def as_words(*tensors: Tensor) -> tuple[Tensor, ...]:
    """View tensors of one dtype as the widest words that all their rows are made of.

    Args:
        *tensors: same dtype, same last dim; any strides.

    Returns:
        the same memory as integers. Elements wider than 8 bytes are copied where their rows are
        not contiguous.
    """
    plain = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
    element = plain[0].element_size()
    if element > 8:
        return tuple(tensor.contiguous().view(torch.int64) for tensor in plain)
    word = element
    while word < 8 and all(_has_words(tensor, 2 * word) for tensor in plain):
        word *= 2
    return tuple(tensor.view(_WORDS[word]) for tensor in plain)


def _has_words(tensor: Tensor, word: int) -> bool:
    """Tell whether every row is whole, aligned words of so many bytes."""
    per_word = word // tensor.element_size()
    if tensor.stride(-1) != 1 or tensor.shape[-1] % per_word or tensor.data_ptr() % word:
        return False
    return tensor.storage_offset() % per_word == 0 and all(
        stride % per_word == 0 for stride in tensor.stride()[:-1]
    )


def fill_word(fill: float, dtype: torch.dtype, word: torch.dtype) -> int:
    """Return the word that holds ``fill`` in every element.

    Args:
        fill: a number that the dtype holds.
        dtype: of the elements.
        word: an integer dtype, as ``as_words`` chose it.

    Returns:
        its bits as a signed integer.
    """
    if fill == 0 and str(fill)[0] != "-":
        return 0
    # int() keeps whole numbers of 64 bits whole; the schema of the operator carries a float.
    value = fill if dtype.is_floating_point or dtype.is_complex else int(fill)
    per_word = max(1, word.itemsize // dtype.itemsize)
    return int(torch.full((per_word,), value, dtype=dtype).view(word)[0])


def move_blocks(width: int) -> tuple[int, int, int]:
    """Choose the tiles of a program that moves rows.

    Args:
        width: words of a row, at least 1.

    Returns:
        rows and words of a tile, both powers of two, and the number of tiles of a program. Many
        narrow rows are taken in small tiles, of which one goes on where the other's search ended;
        wide rows are so few that there is nothing to go on with.
    """
    block_w = min(1 << (width - 1).bit_length(), _WIDEST_TILE)
    if block_w >= _WIDE_ROW:
        return max(1, 2 * _TILE_WORDS // block_w), block_w, 1
    return _TILE_WORDS // block_w, block_w, 4


def in_a_row(*indices: Tensor) -> tuple[Tensor, ...]:
    """Give offsets and indices the stride 1 with which every kernel reads them.

    Args:
        *indices: one dim, of any stride; a contiguous one is returned as it is.

    Returns:
        the same numbers, contiguous.
    """
    return tuple(index.contiguous() for index in indices)


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's device the current one: Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()

"""Arithmetic on lengths and offsets in plain torch: no operator, no host read of a device tensor.

Every result is int64, because row numbers times widths pass 2^31 long before the tokens do.
"""

import torch
from torch import Tensor

from gem_opkit.dims import check_shapes


def lengths_to_offsets(lengths_B: Tensor) -> Tensor:
    """Return the running sum of lengths, with 0 in front.

    Args:
        lengths_B: tokens of each sequence, any integer dtype, on any device.

    Returns:
        offsets_O, int64.

    Raises:
        ShapeError: not one dim.
    """
    check_shapes("lengths_to_offsets", lengths_B=lengths_B)
    running = torch.cumsum(lengths_B, 0, dtype=torch.int64)
    return torch.cat([running.new_zeros(1), running])


def offsets_to_lengths(offsets_O: Tensor) -> Tensor:
    """Return the number of tokens of each sequence.

    Args:
        offsets_O: int32 or int64, non-decreasing.

    Returns:
        lengths_B, int64, on the same device.

    Raises:
        ShapeError: not one dim, or no element.
    """
    check_shapes("offsets_to_lengths", offsets_O=offsets_O)
    return offsets_O.to(torch.int64).diff()


def sequence_ids(offsets_O: Tensor, total_tokens: int) -> Tensor:
    """Return the sequence that each token belongs to.

    ``offsets [0, 2, 2, 5], total 5`` gives ``[0, 0, 2, 2, 2]``: sequence 1 is empty.

    Args:
        offsets_O: int32 or int64, non-decreasing, last at most ``total_tokens``.
        total_tokens: number of tokens, a host int.

    Returns:
        ids_T, int64, in [0, B); tokens past the last offset get B.

    Raises:
        ShapeError: not one dim, or no element.
    """
    check_shapes("sequence_ids", offsets_O=offsets_O)
    ends = offsets_O[1:].to(torch.int64)
    # Counting how many sequences have ended before each token takes one pass over the tokens; a
    # binary search for each of them was ten times slower on a CPU.
    ended = torch.zeros(total_tokens + 1, dtype=torch.int64, device=ends.device)
    ended.scatter_add_(0, ends, torch.ones_like(ends))
    return torch.cumsum(ended[:total_tokens], 0)


def positions(offsets_O: Tensor, total_tokens: int) -> Tensor:
    """Return the position of each token in its sequence, from 0.

    ``offsets [0, 2, 2, 5], total 5`` gives ``[0, 1, 0, 1, 2]``.

    Args:
        offsets_O: int32 or int64, non-decreasing, last at most ``total_tokens``.
        total_tokens: number of tokens, a host int.

    Returns:
        positions_T, int64.

    Raises:
        ShapeError: not one dim, or no element.
    """
    begins = offsets_O.to(torch.int64)[sequence_ids(offsets_O, total_tokens)]
    return torch.arange(total_tokens, device=begins.device) - begins

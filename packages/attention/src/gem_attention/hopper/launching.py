"""What every launch of a Hopper kernel needs on the host: which calls are taken, descriptors, grid.

Nothing here reads a device tensor: descriptors hold addresses and strides alone, so that a captured
CUDA graph may be replayed with other lengths.
"""

from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_attention.portable.ragged.descriptor import MOST_ROWS, packs, ragged_view

ROWS = 64  # of a warpgroup: wgmma's own height
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# Stands for 0, which would turn the -inf of hidden scores into NaN.
LEAST_SCALE = 2.0**-126
# Registers of a thread at launch; the warps then trade them: 240 a consumer, 24 the producer.
REGISTERS = 168
_WIDTHS = (64, 128)
# Tiles a multiprocessor from which a few long ones among them no longer leave others idle.
_TURNS_THAT_FILL = 8
# Bound of int32 coordinates.
_MOST_HEAD_ROWS = 2**28


def takes(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    *,
    batch: int,
) -> bool:
    """Say whether the Hopper kernels of jagged attention take these operands.

    Args:
        q_THK: queries.
        k_SGK: keys.
        v_SGV: values.
        batch: number of sequences; 0 where it is not known.

    Returns:
        True for bf16 and fp16 on compute capability 9.0 with one head width of 64 or 128, heads
        that lie side by side, rows that begin at multiples of 16 bytes, and sequences of at least
        32 queries in the mean (shorter ones would mostly fill their tiles with padding).
    """
    tensors = (q_THK, k_SGK, v_SGV)
    padded = q_THK.shape[0] + ROWS * (batch + 1)
    return (
        all(x.is_cuda and x.dtype == q_THK.dtype for x in tensors)
        and q_THK.dtype in DTYPES
        and torch.cuda.get_device_capability(q_THK.device) == (9, 0)
        and q_THK.shape[2] in _WIDTHS
        and v_SGV.shape[2] == q_THK.shape[2]
        and max(q_THK.shape[0], k_SGK.shape[0]) < MOST_ROWS
        and padded * q_THK.shape[1] < _MOST_HEAD_ROWS
        and ROWS * batch <= 2 * q_THK.shape[0]
        and all(packs(x) for x in tensors)
    )


def takes_repeated(seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *, batch: int) -> bool:
    """Say whether queries that are the same for every sequence may be repeated for these kernels.

    Args:
        seeds_PHK: queries of every sequence.
        k_SGK: keys.
        v_SGV: values.
        batch: number of sequences.

    Returns:
        what ``takes`` would say of the repeated queries, and False where they do not make enough
        tiles to fill the GPU: these kernels do not cut the keys of a sequence.
    """
    seeds, heads, _ = seeds_PHK.shape
    rows = seeds * batch
    if rows >= MOST_ROWS or (rows + ROWS * (batch + 1)) * heads >= _MOST_HEAD_ROWS:
        return False
    if not takes(seeds_PHK, k_SGK, v_SGV, batch=1):
        return False
    tiles = batch * heads * (seeds // (2 * ROWS))
    return tiles >= _TURNS_THAT_FILL * _multiprocessors(seeds_PHK.device.index or 0)


class Run(NamedTuple):
    """Neighbouring heads with one activation, and the key heads that they read."""

    activation: str
    heads: slice
    kv_heads: slice


def runs(activations: str, heads: int, kv_heads: int) -> list[Run]:
    """Cut the heads of a call into launches of one activation each.

    A branch for each activation in one launch was miscompiled: with products of the same queries in
    three arms the assembler of CUDA 12.8 kept the addresses that the first arm computes, whether it
    was taken or not (docs/kernels/generalized_attention.md).

    Args:
        activations: ``"softmax"``, or one name of ``gem_attention.activations``, or one a query
            head joined by commas.
        heads: query heads.
        kv_heads: key heads, which divide them.

    Returns:
        runs in the order of the heads; heads that share a key head with another activation are a
        run of their own, so that in every run as many query heads read each key head.
    """
    names = activations.split(",")
    if len(set(names)) == 1:
        return [Run(names[0], slice(0, heads), slice(0, kv_heads))]
    group = heads // kv_heads
    alike = [len(set(names[g * group : (g + 1) * group])) == 1 for g in range(kv_heads)]

    def key(head: int) -> tuple[str, int]:
        return names[head], -1 if alike[head // group] else head // group

    made = []
    for (name, _), members in groupby(range(heads), key):
        first, *rest = members
        last = rest[-1] if rest else first
        made.append(Run(name, slice(first, last + 1), slice(first // group, last // group + 1)))
    return made


def ragged(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe a packed tensor for access within one sequence (``gem_attention.hopper.device``)."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, *ragged_view(x, rows), layout)


def plain(x: Tensor, block: list[int], swizzle_bytes: int) -> TensorDescriptor:
    """Describe a contiguous float32 tensor."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle_bytes, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def programs(device: torch.device, items: int) -> int:
    """Return the size of a persistent grid: one program a multiprocessor."""
    return min(_multiprocessors(torch.device(device).index or 0), items)


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count

"""What every launch of a Hopper kernel needs on the host: which calls are taken, descriptors, grid.

Nothing here reads a device tensor: descriptors hold addresses and strides alone, so that a captured
CUDA graph may be replayed with other lengths.
"""

from functools import lru_cache

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
# Bound of int32 coordinates.
_MOST_HEAD_ROWS = 2**28


def takes(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    *,
    batch: int,
    activations: str = "softmax",
) -> bool:
    """Say whether the Hopper kernels of jagged attention take these operands.

    Args:
        q_THK: queries.
        k_SGK: keys.
        v_SGV: values.
        batch: number of sequences; 0 where it is not known.
        activations: ``"softmax"``, or one name of ``gem_attention.activations``, or one a query
            head joined by commas.

    Returns:
        True for bf16 and fp16 on compute capability 9.0 with one head width of 64 or 128, heads
        that lie side by side, rows that begin at multiples of 16 bytes, sequences of at least 32
        queries in the mean (shorter ones would mostly fill their tiles with padding), and the same
        activation in all heads.
    """
    if not one_weight(activations):
        return False
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


def one_weight(activations: str) -> bool:
    """Whether all heads have the same activation.

    Different ones are kept from the Hopper kernels, forward and backward. The forward with
    relu,silu,gelu,silu ended in an illegal memory access on an H200 and its cause is not known
    (docs/kernels/generalized_attention.md); the backward has never run with them as it is.
    """
    return len(set(activations.split(","))) == 1


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

"""Launching ``jagged_flash_attention`` on Hopper: TMA, asynchronous wgmma, specialised warps.

Takes what the fast path takes and nothing else; ``supports`` says what that is, and ``kernel.py``
computes the rest. Nothing here reads a device tensor on the host: tile lists and counts stay on
the device, and descriptors hold addresses and strides alone, so that a captured CUDA graph may be
replayed with other lengths.

The device code is in ``gem_attention.hopper``: forward and backward in Gluon, which has no
interpreter, and what stands around the backward in Triton.
"""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_attention.hopper.backward.kernel_sm90 import backward_kernel
from gem_attention.hopper.forward.kernel_sm90 import forward_kernel
from gem_attention.hopper.gradients.kernel import (
    finish_kernel,
    prepare_kernel,
)
from gem_attention.tiles import Window, key_tiles, query_tiles

_ROWS = 64  # of a warpgroup: wgmma's own height
_KEYS_BACKWARD = 128
_STAGES_BACKWARD = 2
_WIDTHS = (64, 128)
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# Bounds of the ragged descriptors (gem_attention.hopper.device) and of int32 coordinates.
_MOST_ROWS = 2**30
_MOST_HEAD_ROWS = 2**28
# Stands for 0, which would turn the -inf of hidden scores into NaN.
_LEAST_SCALE = 2.0**-126
# Registers of a thread at launch; the warps then trade them: 240 a consumer, 24 the producer.
_REGISTERS = 168


def supports(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    *,
    window: Window,
    deterministic: bool,
    batch: int = 0,
) -> bool:
    """Say whether the kernels of this file take a call.

    Args:
        q_THK: queries.
        k_SGK: keys.
        v_SGV: values.
        window: keys visible left and right; any window is taken.
        deterministic: whether the backward must give the same bits in every run; it does not.
        batch: number of sequences; 0 where it is not known.

    Returns:
        True for bf16 and fp16 on compute capability 9.0 with one head width of 64 or 128, heads
        that lie side by side, rows that begin at multiples of 16 bytes, and sequences of at least
        32 queries in the mean: shorter ones would mostly fill their tiles with padding.
    """
    del window
    tensors = (q_THK, k_SGK, v_SGV)
    padded = q_THK.shape[0] + _ROWS * (batch + 1)
    return (
        not deterministic
        and all(x.is_cuda and x.dtype == q_THK.dtype for x in tensors)
        and q_THK.dtype in _DTYPES
        and torch.cuda.get_device_capability(q_THK.device) == (9, 0)
        and q_THK.shape[2] in _WIDTHS
        and v_SGV.shape[2] == q_THK.shape[2]
        and max(q_THK.shape[0], k_SGK.shape[0]) < _MOST_ROWS
        and padded * q_THK.shape[1] < _MOST_HEAD_ROWS
        and _ROWS * batch <= 2 * q_THK.shape[0]
        and all(_packs(x) for x in tensors)
    )


def launch_forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    *,
    window: Window,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend; see ``op.py`` for the meaning.

    Args:
        q_THK: queries, as ``supports`` takes them.
        k_SGK: keys.
        v_SGV: values.
        q_offsets_O: first query of each sequence, int32 or int64.
        k_offsets_O: first key of each sequence.
        window: keys visible left and right; None for all.
        scale: factor of the scores.

    Returns:
        out_THV, and lse_TH in fp32, natural logarithm, -inf where a row sees no key.
    """
    tokens, heads, width = q_THK.shape
    keys, kv_heads, _ = k_SGK.shape
    out_THV = torch.empty((tokens, heads, width), dtype=q_THK.dtype, device=q_THK.device)
    lse_TH = torch.empty((tokens, heads), dtype=torch.float32, device=q_THK.device)
    if tokens == 0 or keys == 0 or heads == 0:
        return out_THV.zero_(), lse_TH.fill_(float("-inf"))
    tiles = query_tiles(
        q_offsets_O,
        k_offsets_O,
        q_tokens=tokens,
        k_tokens=keys,
        block_tokens=2 * _ROWS,
        window=window,
    )
    scale = scale or _LEAST_SCALE
    block, stages = _forward_config(width, window, keys / max(len(k_offsets_O) - 1, 1))
    left, right = window
    with torch.cuda.device(q_THK.device):
        forward_kernel[(_programs(q_THK.device, tiles.capacity * heads),)](
            _ragged(q_THK, _ROWS),
            _ragged(k_SGK, block),
            _ragged(v_SGV, block),
            _ragged(out_THV, _ROWS),
            lse_TH,
            tiles.entries,
            tiles.count,
            q_offsets_O,
            k_offsets_O,
            len(q_offsets_O) - 1,
            tokens,
            keys,
            left or 0,
            right or 0,
            scale,
            HEADS=heads,
            GROUP=heads // kv_heads,
            ROWS=_ROWS,
            KEYS=block,
            WIDTH=width,
            STAGES=stages,
            LEFT=left is not None,
            RIGHT=right is not None,
            DTYPE=_DTYPES[q_THK.dtype],
            num_warps=4,
            maxnreg=_REGISTERS,
        )
    return out_THV, lse_TH


def launch_backward(
    grad_out_THV: Tensor,
    grad_lse_TH: Tensor | None,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    *,
    window: Window,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate ``launch_forward``.

    Args:
        grad_out_THV: gradient of out.
        grad_lse_TH: gradient of the logsumexp; None for 0.
        q_THK: as in the forward.
        k_SGK: as in the forward.
        v_SGV: as in the forward.
        out_THV: result of the forward.
        lse_TH: result of the forward.
        q_offsets_O: as in the forward.
        k_offsets_O: as in the forward.
        window: as in the forward.
        scale: as in the forward.
        deterministic: False; ``supports`` refuses the other.

    Returns:
        gradients of q, k and v. That of q differs between runs in its last bit.
    """
    del deterministic
    tokens, heads, width = q_THK.shape
    keys, kv_heads, _ = k_SGK.shape
    device = q_THK.device
    grad_q_THK = torch.empty((tokens, heads, width), dtype=q_THK.dtype, device=device)
    grad_k_SGK = torch.empty((keys, kv_heads, width), dtype=q_THK.dtype, device=device)
    grad_v_SGV = torch.empty_like(grad_k_SGK)
    if tokens == 0 or keys == 0 or heads == 0:
        return grad_q_THK.zero_(), grad_k_SGK.zero_(), grad_v_SGV.zero_()
    if not _packs(grad_out_THV):
        grad_out_THV = grad_out_THV.contiguous()
    batch = len(q_offsets_O) - 1
    padded = (-(-tokens // _ROWS) + batch + 1) * _ROWS
    sizes = {"q_tokens": tokens, "k_tokens": keys, "window": window}
    q_tiles = query_tiles(q_offsets_O, k_offsets_O, block_tokens=2 * _ROWS, **sizes)
    k_tiles = key_tiles(q_offsets_O, k_offsets_O, block_tokens=_KEYS_BACKWARD, **sizes)
    delta_HP, lse_HP = torch.empty((2, heads, padded), dtype=torch.float32, device=device)
    block_rows = _ROWS * width // 2 // 32
    blocks = torch.zeros(
        (padded // _ROWS * heads * 2 * block_rows, 32), dtype=torch.float32, device=device
    )
    left, right = window
    scale = scale or _LEAST_SCALE
    with torch.cuda.device(device):
        prepare_kernel[(q_tiles.capacity * heads,)](
            out_THV,
            grad_out_THV,
            lse_TH,
            grad_lse_TH.contiguous() if grad_lse_TH is not None else lse_TH,
            delta_HP,
            lse_HP,
            q_tiles.entries,
            q_tiles.count,
            q_offsets_O,
            batch,
            tokens,
            padded,
            grad_out_THV.stride(0),
            grad_out_THV.stride(1),
            HEADS=heads,
            WIDTH=width,
            ROWS=_ROWS,
            HAS_GRAD_LSE=grad_lse_TH is not None,
            num_warps=4,
        )
        backward_kernel[(_programs(device, k_tiles.capacity * kv_heads),)](
            _ragged(q_THK, _ROWS),
            _ragged(k_SGK, _KEYS_BACKWARD),
            _ragged(v_SGV, _KEYS_BACKWARD),
            _ragged(grad_out_THV, _ROWS),
            _plain(lse_HP, [1, _ROWS], 0),
            _plain(delta_HP, [1, _ROWS], 0),
            _plain(blocks, [block_rows, 32], 128),
            _ragged(grad_k_SGK, _KEYS_BACKWARD // 2),
            _ragged(grad_v_SGV, _KEYS_BACKWARD // 2),
            k_tiles.entries,
            k_tiles.count,
            q_offsets_O,
            k_offsets_O,
            batch,
            tokens,
            keys,
            left or 0,
            right or 0,
            scale,
            KV_HEADS=kv_heads,
            GROUP=heads // kv_heads,
            ROWS=_ROWS,
            KEYS=_KEYS_BACKWARD,
            WIDTH=width,
            STAGES=_STAGES_BACKWARD,
            LEFT=left is not None,
            RIGHT=right is not None,
            DTYPE=_DTYPES[q_THK.dtype],
            num_warps=4,
            maxnreg=_REGISTERS,
        )
        finish_kernel[(q_tiles.capacity * heads,)](
            blocks,
            grad_q_THK,
            q_tiles.entries,
            q_tiles.count,
            q_offsets_O,
            batch,
            tokens,
            scale,
            HEADS=heads,
            WIDTH=width,
            ROWS=_ROWS,
            num_warps=4,
        )
    return grad_q_THK, grad_k_SGK, grad_v_SGV


def _forward_config(width: int, window: Window, mean_keys: float) -> tuple[int, int]:
    """Return keys of a tile and stages: small tiles where most of a large one would be masked."""
    if None not in window or (width == 128 and mean_keys < 512):
        return 64, 4
    return 128, 256 // width


def _packs(x: Tensor) -> bool:
    """Whether heads lie side by side in rows that TMA can read: a view of a fused QKV does."""
    return (
        x.stride(2) == 1
        and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
        and x.stride(0) >= x.shape[1] * x.shape[2]
        and x.stride(0) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def _ragged(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe a packed tensor for access within one sequence (``gem_attention.hopper.device``)."""
    heads, width = x.shape[1:]
    stride = x.stride(0)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(
        x,
        [0x7FFF0000, 0x7FFF0000, _MOST_ROWS, heads * width],
        [2**34 - stride, stride, stride, 1],
        [1, 1, rows, width],
        layout,
    )


def _plain(x: Tensor, block: list[int], swizzle_bytes: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle_bytes, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def _programs(device: torch.device, items: int) -> int:
    """Return the size of a persistent grid: one program a multiprocessor."""
    return min(_multiprocessors(torch.device(device).index or 0), items)


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count

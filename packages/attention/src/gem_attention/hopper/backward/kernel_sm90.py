"""Launching the backward of jagged attention on Hopper, with softmax or with activations.

dQ of a sequence with several tiles of keys is summed in fp32. A buffer for all of it would be a
quarter of all operands and results, so it is that of a few key heads, and each launch of the fused
kernel does these heads. A kernel after it turns the sums into dq and leaves zeros behind.

With many keys a launch does half of the sequences, and while it runs, two of its warps convert what
the launch before has added: the two halves of the buffer take turns, and of clearing and converting
only the first and the last half are seen.

Where every sequence has the same queries, dQ is one sum over the whole batch. Its buffer is small
and stays in the cache; it holds dQ several times, so that additions meet less often, and a last
kernel adds these copies.
"""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_attention.choosing import bounded_sides
from gem_attention.hopper.backward.fused.kernel_sm90 import backward_kernel
from gem_attention.hopper.gradients.kernel import finish_kernel, gather_kernel, prepare_kernel
from gem_attention.hopper.launching import (
    DTYPES,
    LEAST_SCALE,
    REGISTERS,
    plain,
    programs,
    ragged,
)
from gem_attention.portable.ragged.descriptor import packs, ragged_view
from gem_attention.tiles import Window, key_tiles, query_tiles

_KEYS = 128
_STAGES = 2
_SIDE = 64  # rows and columns of a part of dQ
_PREPARED = 128  # queries that a program of the preparing kernel has
_PIECE = 128  # rows of 32 numbers that a converting warp fetches
# Queries of a tile, by width: as many as registers hold.
_ROWS = {64: 128, 128: 64}
# A buffer of all heads may be this large: torch rounds allocations up to twice as much.
_UNSPLIT_BYTES = 10 * 2**20
# From this many queries and keys a sequence on, in the mean, converting beside the products pays
# for cutting the batch: with fewer, or a window, launches are short and the converting warps last.
_HALVED_FROM = 512
# The buffer is this part of that of all heads, or the next larger one.
_SHARES = 4
# What the buffer of shared queries may take: a sixth of the cache.
_SHARED_BYTES = 8 * 2**20


def launch_backward(
    grad_out_THV: Tensor,
    grad_lse_TH: Tensor | None,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor | None,
    lse_TH: Tensor | None,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    *,
    window: Window,
    scale: float,
    activations: str = "softmax",
    shared: bool = False,
    grad_v_SGV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate ``gem_attention.hopper.forward.kernel_sm90.launch_forward``.

    Args:
        grad_out_THV: gradient of out.
        grad_lse_TH: gradient of the logsumexp; None for 0 and without softmax.
        q_THK: as in the forward.
        k_SGK: as in the forward.
        v_SGV: as in the forward.
        out_THV: result of the forward; not read without softmax, and may be None.
        lse_TH: result of the forward; likewise.
        q_offsets_O: as in the forward.
        k_offsets_O: as in the forward.
        window: as in the forward.
        scale: as in the forward.
        activations: as in the forward.
        shared: whether ``q_THK`` are the queries of one sequence, which every sequence has;
            without a window.
        grad_v_SGV: where to write the gradient of v, heads side by side; None for memory of its
            own.

    Returns:
        gradients of q, k and v. That of q differs between runs in its last bit where a sequence
        has more than 128 keys, or a window, or where queries are shared; it is then summed over
        the sequences.

    Cost: besides the results, fp32 of a quarter of dq where there are four key heads and more, of
    a half with two and of all of it with one, and of shared queries at most 8 MiB or once dq; and
    two floats a query and head.
    """
    queries, heads, width = q_THK.shape
    tokens = queries * (len(q_offsets_O) - 1 if shared else 1)
    keys, kv_heads, _ = k_SGK.shape
    group = heads // kv_heads if kv_heads else 1
    softmax = activations == "softmax"
    device = q_THK.device
    grad_q_THK = torch.empty((queries, heads, width), dtype=q_THK.dtype, device=device)
    grad_k_SGK = torch.empty((keys, kv_heads, width), dtype=q_THK.dtype, device=device)
    if grad_v_SGV is None:
        grad_v_SGV = torch.empty_like(grad_k_SGK)
    if tokens == 0 or keys == 0 or heads == 0:
        return grad_q_THK.zero_(), grad_k_SGK.zero_(), grad_v_SGV.zero_()
    if not packs(grad_out_THV):
        grad_out_THV = grad_out_THV.contiguous()
    batch = len(q_offsets_O) - 1
    rows = _ROWS[width]
    padded = (-(-tokens // rows) + batch + 1) * rows
    left, right = window = bounded_sides(window)
    windowed = window != (None, None)
    sizes = {"q_tokens": tokens, "k_tokens": keys, "window": window}
    q_tiles = query_tiles(q_offsets_O, k_offsets_O, block_tokens=_PREPARED, **sizes)
    k_tiles = key_tiles(q_offsets_O, k_offsets_O, block_tokens=_KEYS, **sizes)
    delta_HP, lse_HP = torch.empty(
        (2, heads, padded if softmax else rows), dtype=torch.float32, device=device
    )
    split = not shared and padded * heads * width * 4 > _UNSPLIT_BYTES
    mine = heads_of_launch(kv_heads) if split else kv_heads
    halves = split and not windowed and min(tokens, keys) >= _HALVED_FROM * batch
    copies, sums = 1, _sums(padded, mine * group, width, device)
    if shared:
        summed = -(-queries // rows) * rows
        copies = max(min(_SHARED_BYTES // (summed * heads * width * 4), batch), 1)
        sums = _sums(copies * summed, heads, width, device).zero_()
    bounds = torch.empty(3, dtype=torch.int32, device=device)
    grid = programs(device, k_tiles.capacity * mine)
    counts = (batch, tokens, keys)
    if softmax:
        scale = scale or LEAST_SCALE
    if out_THV is None or lse_TH is None:
        out_THV, lse_TH = grad_out_THV, delta_HP
    with torch.cuda.device(device):
        # Without softmax nothing but the bounds is left to prepare for shared queries.
        prepare_kernel[(q_tiles.capacity * heads if softmax or not shared else 1,)](
            out_THV,
            grad_out_THV,
            lse_TH,
            grad_lse_TH.contiguous() if grad_lse_TH is not None else lse_TH,
            delta_HP,
            lse_HP,
            grad_q_THK,
            sums,
            bounds,
            q_tiles.entries,
            q_tiles.count,
            k_tiles.entries,
            k_tiles.count,
            q_offsets_O,
            k_offsets_O,
            *counts,
            padded,
            grid,
            grad_out_THV.stride(0),
            grad_out_THV.stride(1),
            HEADS=heads,
            KV_HEADS=mine,
            SUM_HEADS=0 if shared else mine * group,
            WIDTH=width,
            ROWS=rows,
            KEYS=_KEYS,
            SOFTMAX=softmax,
            HAS_GRAD_LSE=grad_lse_TH is not None,
            WINDOWED=windowed,
            SPLIT=halves,
            DESCENDING=left is not None and right is None,
            SHARED=shared,
            num_warps=4,
        )
        operands = (
            ragged(q_THK, rows),
            ragged(k_SGK, _KEYS),
            ragged(v_SGV, _KEYS),
            ragged(grad_out_THV, rows),
            plain(lse_HP, [1, rows], 0),
            plain(delta_HP, [1, rows], 0),
            plain(sums, [2 * _SIDE, 32], 128),
            plain(sums, [_PIECE, 32], 128),
            _columns(grad_q_THK),
            ragged(grad_k_SGK, _KEYS // 2),
            ragged(grad_v_SGV, _KEYS // 2),
            sums,
            grad_q_THK,
            k_tiles.entries,
            bounds,
            q_offsets_O,
            k_offsets_O,
            *counts,
            left or 0,
            right or 0,
        )
        shape = {"KV_HEADS": mine, "GROUP": group, "ALL_HEADS": heads, "ROWS": rows}
        shape |= {"KEYS": _KEYS, "WIDTH": width}
        # In the order of the kernel's arguments.
        constants = shape | {
            "STAGES": _STAGES,
            "LEFT": left is not None,
            "RIGHT": right is not None,
            "DTYPE": DTYPES[q_THK.dtype],
            "ACTIVATIONS": activations,
            "SHARED": shared,
        }
        compiled = None
        launches = [(head, part) for head in range(0, kv_heads, mine) for part in range(1 + halves)]
        before = (0, -1)
        for head, part in launches:
            zeros = int((head, part) != launches[-1])
            mine_alone = (head, part, *before, zeros, copies, scale)
            if compiled is None:
                compiled = backward_kernel[(grid,)](
                    *operands,
                    *mine_alone,
                    **constants,
                    num_warps=4,
                    maxnreg=REGISTERS,
                )
            else:
                # Past the search for the kernel, which takes as long as a short launch.
                compiled[(grid, 1, 1)](*operands, *mine_alone, *constants.values())
            if shared:
                _add_copies(sums, grad_q_THK, copies, scale)
                continue
            if halves and zeros:
                before = (head, part)
                continue
            finish_kernel[(k_tiles.capacity * mine,)](
                sums,
                grad_q_THK,
                bounds,
                k_tiles.entries,
                q_offsets_O,
                k_offsets_O,
                part,
                head,
                zeros,
                *counts,
                scale,
                **shape,
                WINDOWED=windowed,
                num_warps=4,
            )
    return grad_q_THK, grad_k_SGK, grad_v_SGV


def heads_of_launch(kv_heads: int) -> int:
    """Return how many key heads a launch does, so that their buffer is a quarter of all or more.

    Args:
        kv_heads: key heads, at least 1.

    Returns:
        the largest divisor of ``kv_heads`` that is no more than a quarter of them, or 1.
    """
    most = max(kv_heads // _SHARES, 1)
    return next(heads for heads in range(most, 0, -1) if kv_heads % heads == 0)


def _sums(rows: int, heads: int, width: int, device: torch.device) -> Tensor:
    """Return memory for dQ of so many rows and heads, in rows of 32 numbers."""
    return torch.empty((rows // _SIDE * heads * width * 2, 32), dtype=torch.float32, device=device)


def _add_copies(sums: Tensor, grad_q_PHK: Tensor, copies: int, scale: float) -> None:
    """Write dq of shared queries from its copies."""
    queries, heads, width = grad_q_PHK.shape
    parts = sums.numel() // (copies * _SIDE * _SIDE)
    gather_kernel[(parts * 4,)](
        sums,
        grad_q_PHK,
        queries,
        parts,
        copies,
        scale,
        HEADS=heads,
        WIDTH=width,
        num_warps=4,
    )


def _columns(x: Tensor) -> TensorDescriptor:
    """Describe dq for access to a part of it, within one sequence."""
    shape, strides, _block = ragged_view(x, _SIDE)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, shape, strides, [1, 1, _SIDE, _SIDE], layout)

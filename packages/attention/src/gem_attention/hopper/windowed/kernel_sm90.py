"""Launching the backward of softmax attention under a narrow window on Hopper.

A narrow window leaves so few products that the fp32 sums of dQ, their zeros and their conversion
cost much beside them. So dQ has a kernel of its own, which makes the scores a second time: seven
products a pair instead of five, but no sum in memory, no launch for each group of heads, and every
result has one owner, so that the bits are the same in every run.
"""

import torch
from torch import Tensor

from gem_attention.hopper.launching import (
    DTYPES,
    LEAST_SCALE,
    REGISTERS,
    ROWS,
    plain,
    programs,
    ragged,
)
from gem_attention.hopper.windowed.keys.kernel_sm90 import grad_keys_kernel
from gem_attention.hopper.windowed.queries.kernel_sm90 import grad_queries_kernel
from gem_attention.portable.ragged.descriptor import packs
from gem_attention.tiles import Window, key_tiles, query_tiles

_TILE = 128  # queries or keys of an item
_STAGES = 3
# Windows of at most so many keys left and right of a query together: at 512 this took 1.74 ms and
# the fused kernel 1.93, at 1024 it was level.
_NARROW = 512


def is_narrow(window: Window) -> bool:
    """Say whether a window leaves so few keys that making scores twice pays.

    Args:
        window: keys visible left and right; None for all.

    Returns:
        True where both sides are bounded and small together.
    """
    left, right = window
    return left is not None and right is not None and left + right <= _NARROW


def launch_narrow_backward(
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
    grad_v_SGV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate softmax attention under a window.

    Args:
        grad_out_THV: gradient of out.
        grad_lse_TH: gradient of the logsumexp; None for 0.
        q_THK: as in ``gem_attention.hopper.forward.kernel_sm90.launch_forward``.
        k_SGK: as there.
        v_SGV: as there.
        out_THV: result of the forward.
        lse_TH: result of the forward.
        q_offsets_O: as there.
        k_offsets_O: as there.
        window: keys visible left and right.
        scale: as there.
        grad_v_SGV: where to write the gradient of v, heads side by side; None for memory of its
            own.

    Returns:
        gradients of q, k and v, with the same bits in every run.

    Cost: seven products a pair; besides the results two floats a query and head.
    """
    tokens, heads, width = q_THK.shape
    keys, kv_heads, _ = k_SGK.shape
    device = q_THK.device
    grad_q_THK = torch.empty((tokens, heads, width), dtype=q_THK.dtype, device=device)
    grad_k_SGK = torch.empty((keys, kv_heads, width), dtype=q_THK.dtype, device=device)
    if grad_v_SGV is None:
        grad_v_SGV = torch.empty_like(grad_k_SGK)
    if tokens == 0 or keys == 0 or heads == 0:
        return grad_q_THK.zero_(), grad_k_SGK.zero_(), grad_v_SGV.zero_()
    if not packs(grad_out_THV):
        grad_out_THV = grad_out_THV.contiguous()
    batch = len(q_offsets_O) - 1
    padded = (-(-tokens // ROWS) + batch + 1) * ROWS
    left, right = window
    sizes = {"q_tokens": tokens, "k_tokens": keys, "window": window, "block_tokens": _TILE}
    q_tiles = query_tiles(q_offsets_O, k_offsets_O, **sizes)
    k_tiles = key_tiles(q_offsets_O, k_offsets_O, **sizes)
    delta_HP, lse_HP = torch.empty((2, heads, padded), dtype=torch.float32, device=device)
    offsets = (q_offsets_O, k_offsets_O)
    counts = (batch, tokens, keys)
    sides = (left or 0, right or 0)
    scale = scale or LEAST_SCALE
    queries = (ragged(q_THK, ROWS), ragged(grad_out_THV, ROWS))
    keyed = (ragged(k_SGK, ROWS), ragged(v_SGV, ROWS))
    shape = {"GROUP": heads // kv_heads, "ROWS": ROWS, "KEYS": ROWS, "WIDTH": width}
    shape |= {"STAGES": _STAGES, "LEFT": left is not None, "RIGHT": right is not None}
    with torch.cuda.device(device):
        grad_queries_kernel[(programs(device, q_tiles.capacity * heads),)](
            *queries,
            *keyed,
            ragged(out_THV, ROWS),
            ragged(grad_q_THK, ROWS),
            lse_TH,
            grad_lse_TH.contiguous() if grad_lse_TH is not None else lse_TH,
            lse_HP,
            delta_HP,
            q_tiles.entries,
            q_tiles.count,
            *offsets,
            *counts,
            padded,
            *sides,
            scale,
            HEADS=heads,
            **shape,
            DTYPE=DTYPES[q_THK.dtype],
            HAS_GRAD_LSE=grad_lse_TH is not None,
            num_warps=4,
            maxnreg=REGISTERS,
        )
        grad_keys_kernel[(programs(device, k_tiles.capacity * kv_heads),)](
            *queries,
            *keyed,
            plain(lse_HP, [1, ROWS], 0),
            plain(delta_HP, [1, ROWS], 0),
            ragged(grad_k_SGK, ROWS),
            ragged(grad_v_SGV, ROWS),
            k_tiles.entries,
            k_tiles.count,
            *offsets,
            *counts,
            *sides,
            scale,
            KV_HEADS=kv_heads,
            **shape,
            DTYPE=DTYPES[q_THK.dtype],
            num_warps=4,
            maxnreg=REGISTERS,
        )
    return grad_q_THK, grad_k_SGK, grad_v_SGV

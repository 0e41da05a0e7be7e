"""Launching the backward of jagged attention on Hopper, with softmax or with activations."""

import torch
from torch import Tensor

from gem_attention.hopper.backward.fused.kernel_sm90 import backward_kernel
from gem_attention.hopper.gradients.kernel import finish_kernel, prepare_kernel
from gem_attention.hopper.launching import (
    DTYPES,
    LEAST_SCALE,
    REGISTERS,
    ROWS,
    plain,
    programs,
    ragged,
)
from gem_attention.portable.ragged.descriptor import packs
from gem_attention.tiles import Window, key_tiles, query_tiles

_KEYS = 128
_STAGES = 2


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

    Returns:
        gradients of q, k and v. That of q differs between runs in its last bit.
    """
    tokens, heads, width = q_THK.shape
    keys, kv_heads, _ = k_SGK.shape
    group = heads // kv_heads if kv_heads else 1
    softmax = activations == "softmax"
    device = q_THK.device
    grad_q_THK = torch.empty((tokens, heads, width), dtype=q_THK.dtype, device=device)
    grad_k_SGK = torch.empty((keys, kv_heads, width), dtype=q_THK.dtype, device=device)
    grad_v_SGV = torch.empty_like(grad_k_SGK)
    if tokens == 0 or keys == 0 or heads == 0:
        return grad_q_THK.zero_(), grad_k_SGK.zero_(), grad_v_SGV.zero_()
    if not packs(grad_out_THV):
        grad_out_THV = grad_out_THV.contiguous()
    batch = len(q_offsets_O) - 1
    padded = (-(-tokens // ROWS) + batch + 1) * ROWS
    sizes = {"q_tokens": tokens, "k_tokens": keys, "window": window}
    q_tiles = query_tiles(q_offsets_O, k_offsets_O, block_tokens=2 * ROWS, **sizes)
    k_tiles = key_tiles(q_offsets_O, k_offsets_O, block_tokens=_KEYS, **sizes)
    delta_HP, lse_HP = torch.empty(
        (2, heads, padded if softmax else ROWS), dtype=torch.float32, device=device
    )
    block_rows = ROWS * width // 2 // 32
    blocks = torch.zeros(
        (padded // ROWS * heads * 2 * block_rows, 32), dtype=torch.float32, device=device
    )
    left, right = window
    if softmax:
        scale = scale or LEAST_SCALE
    with torch.cuda.device(device):
        if softmax:
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
                ROWS=ROWS,
                HAS_GRAD_LSE=grad_lse_TH is not None,
                num_warps=4,
            )
        backward_kernel[(programs(device, k_tiles.capacity * kv_heads),)](
            ragged(q_THK, ROWS),
            ragged(k_SGK, _KEYS),
            ragged(v_SGV, _KEYS),
            ragged(grad_out_THV, ROWS),
            plain(lse_HP, [1, ROWS], 0),
            plain(delta_HP, [1, ROWS], 0),
            plain(blocks, [block_rows, 32], 128),
            ragged(grad_k_SGK, _KEYS // 2),
            ragged(grad_v_SGV, _KEYS // 2),
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
            GROUP=group,
            ROWS=ROWS,
            KEYS=_KEYS,
            WIDTH=width,
            STAGES=_STAGES,
            LEFT=left is not None,
            RIGHT=right is not None,
            DTYPE=DTYPES[q_THK.dtype],
            ACTIVATIONS=activations,
            num_warps=4,
            maxnreg=REGISTERS,
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
            ROWS=ROWS,
            num_warps=4,
        )
    return grad_q_THK, grad_k_SGK, grad_v_SGV

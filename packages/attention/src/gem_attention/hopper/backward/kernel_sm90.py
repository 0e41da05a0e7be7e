"""Launching the backward of jagged attention on Hopper, with softmax or with activations."""

import torch
from torch import Tensor

from gem_attention.hopper.backward.fused.kernel_sm90 import backward_kernel
from gem_attention.hopper.gradients.kernel import prepare_kernel
from gem_attention.hopper.launching import (
    DTYPES,
    LEAST_SCALE,
    ROWS,
    packs,
    plain,
    programs,
    ragged,
)
from gem_attention.tiles import Window, key_tiles, query_tiles

_KEYS = 128
_STAGES = {128: 2, 64: 3}
# Registers of a thread at launch, of which the warps then give each other (``backward.fused``): a
# multiprocessor has 65,536 for 12 warps, or for 16 where dQ has a warpgroup of its own.
_REGISTERS = {128: 168, 64: 128}
# Blocks of dQ, of 64 rows, in the ring: what three rounds of items touch, and at least so many.
_ROUNDS = 3
_FEWEST_BLOCKS = 1024
_PIECE_ROWS = 64


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
    blocks = -(-tokens // ROWS)
    padded = (blocks + batch + 1) * ROWS
    sizes = {"q_tokens": tokens, "k_tokens": keys, "window": window}
    q_tiles = query_tiles(q_offsets_O, k_offsets_O, block_tokens=2 * ROWS, **sizes)
    # Where one tile holds all keys of a sequence, and no window hides it from some of the queries,
    # dq needs no sum, and the sequence no slots.
    others_from = 2 if window == (None, None) else 1
    k_tiles = key_tiles(
        q_offsets_O, k_offsets_O, block_tokens=_KEYS, others_from=others_from, **sizes
    )
    wanted = wanted_blocks(device, blocks, keys, batch=batch, group=group)
    # As many as one sequence can have, so that no unit waits for itself.
    slots = min((blocks + batch) * heads, max(blocks * group, wanted))
    ring = torch.empty((slots * ROWS * width // 32, 32), dtype=torch.float32, device=device)
    state = torch.empty(1 + (batch + 1) * kv_heads + slots, dtype=torch.int32, device=device)
    delta_HP, lse_HP = torch.empty(
        (2, heads, padded if softmax else ROWS), dtype=torch.float32, device=device
    )
    if out_THV is None or lse_TH is None:
        out_THV, lse_TH = grad_out_THV, delta_HP
    left, right = window
    if softmax:
        scale = scale or LEAST_SCALE
    counts = (batch, tokens, keys)
    with torch.cuda.device(device):
        prepare_kernel[(q_tiles.capacity * heads,)](
            out_THV,
            grad_out_THV,
            lse_TH,
            grad_lse_TH.contiguous() if grad_lse_TH is not None else lse_TH,
            delta_HP,
            lse_HP,
            grad_q_THK,
            ring,
            state,
            k_tiles.others,
            q_tiles.entries,
            q_tiles.count,
            q_offsets_O,
            k_offsets_O,
            *counts,
            padded,
            slots,
            wanted,
            grad_out_THV.stride(0),
            grad_out_THV.stride(1),
            HEADS=heads,
            GROUP=group,
            WIDTH=width,
            ROWS=ROWS,
            SOFTMAX=softmax,
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
            plain(ring, [ROWS * 64 // 32, 32], 128),
            plain(ring, [_PIECE_ROWS, 32], 128),
            ragged(grad_q_THK, ROWS, columns=64),
            ragged(grad_k_SGK, _KEYS // 2),
            ragged(grad_v_SGV, _KEYS // 2),
            ring,
            grad_q_THK,
            state,
            k_tiles.entries,
            k_tiles.count,
            k_tiles.others,
            q_offsets_O,
            k_offsets_O,
            *counts,
            left or 0,
            right or 0,
            slots,
            wanted,
            scale,
            KV_HEADS=kv_heads,
            GROUP=group,
            ROWS=ROWS,
            KEYS=_KEYS,
            WIDTH=width,
            STAGES=_STAGES[width],
            LEFT=left is not None,
            RIGHT=right is not None,
            DTYPE=DTYPES[q_THK.dtype],
            ACTIVATIONS=activations,
            num_warps=4,
            maxnreg=_REGISTERS[width],
        )
    return grad_q_THK, grad_k_SGK, grad_v_SGV


def wanted_blocks(device: torch.device, blocks: int, keys: int, *, batch: int, group: int) -> int:
    """Return how many blocks of dQ the ring should hold for nobody to wait long.

    Args:
        device: whose multiprocessors each do an item at a time.
        blocks: blocks of 64 queries of one head.
        keys: keys of all sequences.
        batch: number of sequences.
        group: query heads of a key head.

    Returns:
        the blocks that an item of mean size brings, its sequence's over its tiles, for each of
        three rounds of items: one that is worked on, one that is loaded, one that is converted.
    """
    items = max(-(-keys // _KEYS), batch, 1)
    rounds = _ROUNDS * programs(device, 2**30)
    return max(_FEWEST_BLOCKS, rounds * -(-blocks // items) * group)

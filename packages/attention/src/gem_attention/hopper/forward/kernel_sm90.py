"""Launching the forward of jagged attention on Hopper, with softmax or with activations."""

import torch
from torch import Tensor

from gem_attention.hopper.forward.streaming.kernel_sm90 import forward_kernel
from gem_attention.hopper.launching import (
    DTYPES,
    LEAST_SCALE,
    REGISTERS,
    ROWS,
    programs,
    ragged,
)
from gem_attention.tiles import Window, query_tiles


def launch_forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    *,
    window: Window,
    scale: float,
    activations: str = "softmax",
) -> tuple[Tensor, Tensor]:
    """Attend: softmax(scale · QKᵀ) V, or f(scale · QKᵀ) V.

    Args:
        q_THK: queries, as ``gem_attention.hopper.launching.takes`` takes them.
        k_SGK: keys.
        v_SGV: values.
        q_offsets_O: first query of each sequence, int32 or int64.
        k_offsets_O: first key of each sequence.
        window: keys visible left and right; None for all.
        scale: factor of the scores; without softmax of either sign.
        activations: ``"softmax"``, or one name of ``gem_attention.activations``, or one a query
            head joined by commas.

    Returns:
        out_THV, and lse_TH in fp32, natural logarithm, -inf where a row sees no key; of shape
        (0, H) where there is no softmax.
    """
    tokens, heads, width = q_THK.shape
    keys, kv_heads, _ = k_SGK.shape
    softmax = activations == "softmax"
    out_THV = torch.empty((tokens, heads, width), dtype=q_THK.dtype, device=q_THK.device)
    lse_TH = torch.empty(
        (tokens if softmax else 0, heads), dtype=torch.float32, device=q_THK.device
    )
    if tokens == 0 or keys == 0 or heads == 0:
        return out_THV.zero_(), lse_TH.fill_(float("-inf"))
    tiles = query_tiles(
        q_offsets_O,
        k_offsets_O,
        q_tokens=tokens,
        k_tokens=keys,
        block_tokens=2 * ROWS,
        window=window,
    )
    if softmax:
        scale = scale or LEAST_SCALE
    elif scale < 0:
        # A factor that is taken out of the weights must not turn their signs.
        q_THK, scale = -q_THK, -scale
    mean_keys = keys / max(len(k_offsets_O) - 1, 1)
    block, stages = _tiling(width, window, mean_keys, softmax=softmax)
    left, right = window
    with torch.cuda.device(q_THK.device):
        forward_kernel[(programs(q_THK.device, tiles.capacity * heads),)](
            ragged(q_THK, ROWS),
            ragged(k_SGK, block),
            ragged(v_SGV, block),
            ragged(out_THV, ROWS),
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
            ROWS=ROWS,
            KEYS=block,
            WIDTH=width,
            STAGES=stages,
            LEFT=left is not None,
            RIGHT=right is not None,
            DTYPE=DTYPES[q_THK.dtype],
            ACTIVATIONS=activations,
            num_warps=4,
            maxnreg=REGISTERS,
        )
    return out_THV, lse_TH


def _tiling(width: int, window: Window, mean_keys: float, *, softmax: bool) -> tuple[int, int]:
    """Return keys of a tile and stages: small tiles where most of a large one would be masked."""
    if None not in window:
        return 64, 4
    # A mean that is a whole number of large tiles is that of sequences with equally many keys,
    # which fill them. Softmax, which has more to do between the products, gains nothing by it.
    full = mean_keys % 128 == 0 and not softmax
    if width == 128 and mean_keys < 512 and not full:
        return 64, 4
    return 128, 256 // width

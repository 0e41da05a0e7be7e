"""Launching the forward of jagged attention on Hopper, with softmax or with activations."""

from typing import NamedTuple

import torch
from torch import Tensor

from gem_attention.hopper.forward.streaming.kernel_sm90 import forward_kernel
from gem_attention.hopper.launching import (
    DTYPES,
    LEAST_SCALE,
    ROWS,
    programs,
    ragged,
    runs,
)
from gem_attention.tiles import Window, query_tiles

# Registers of a thread at launch, by consumers; the warps then trade them.
_REGISTERS = {2: 168, 3: 128}
# Mean keys from which sequences fill large tiles, and mean lengths from which three consumers win:
# they did at 1024 and lost at 256.
_LONG, _VERY_LONG = 512, 768


class Tiling(NamedTuple):
    """Sizes of a launch.

    Attributes:
        keys: keys of a tile.
        stages: tiles of keys, and of values, that have room.
        consumers: warpgroups that attend, each from 64 queries of a tile.
        slots: tiles of queries that have room.
    """

    keys: int
    stages: int
    consumers: int
    slots: int


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
    shared: bool = False,
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
        shared: whether ``q_THK`` are the queries of one sequence, which every sequence has.

    Returns:
        out_THV, and lse_TH in fp32, natural logarithm, -inf where a row sees no key; of shape
        (0, H) where there is no softmax.
    """
    tokens, heads, width = q_THK.shape
    if shared:
        tokens *= len(q_offsets_O) - 1
    keys, kv_heads, _ = k_SGK.shape
    softmax = activations == "softmax"
    out_THV = torch.empty((tokens, heads, width), dtype=q_THK.dtype, device=q_THK.device)
    lse_TH = torch.empty(
        (tokens if softmax else 0, heads), dtype=torch.float32, device=q_THK.device
    )
    if tokens == 0 or keys == 0 or heads == 0:
        return out_THV.zero_(), lse_TH.fill_(float("-inf"))
    batch = max(len(k_offsets_O) - 1, 1)
    tiling = choose_tiling(width, window, tokens / batch, keys / batch, softmax=softmax)
    tiles = query_tiles(
        q_offsets_O,
        k_offsets_O,
        q_tokens=tokens,
        k_tokens=keys,
        block_tokens=tiling.consumers * ROWS,
        window=window,
    )
    if softmax:
        scale = scale or LEAST_SCALE
    elif scale < 0:
        # A factor that is taken out of the weights must not turn their signs.
        q_THK, scale = -q_THK, -scale
    # A mean that is a whole number of tiles is that of sequences which fill them.
    even = softmax and window == (None, None) and keys % (tiling.keys * batch) == 0
    left, right = window
    with torch.cuda.device(q_THK.device):
        for run in runs(activations, heads, kv_heads):
            q, out = (x[:, run.heads] for x in (q_THK, out_THV))
            k, v = (x[:, run.kv_heads] for x in (k_SGK, v_SGV))
            forward_kernel[(programs(q.device, tiles.capacity * q.shape[1]),)](
                ragged(q, ROWS),
                ragged(k, tiling.keys),
                ragged(v, tiling.keys),
                ragged(out, ROWS),
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
                HEADS=q.shape[1],
                GROUP=q.shape[1] // k.shape[1],
                ROWS=ROWS,
                KEYS=tiling.keys,
                WIDTH=width,
                STAGES=tiling.stages,
                LEFT=left is not None,
                RIGHT=right is not None,
                DTYPE=DTYPES[q.dtype],
                ACTIVATION=run.activation,
                CONSUMERS=tiling.consumers,
                SLOTS=tiling.slots,
                EVEN=even,
                SHARED=shared,
                num_warps=4,
                maxnreg=_REGISTERS[tiling.consumers],
            )
    return out_THV, lse_TH


def choose_tiling(
    width: int, window: Window, mean_queries: float, mean_keys: float, *, softmax: bool
) -> Tiling:
    """Return the tile sizes that were the fastest on an H200.

    Args:
        width: of the heads, 64 or 128.
        window: keys visible left and right.
        mean_queries: of a sequence.
        mean_keys: of a sequence.
        softmax: whether the weights are those of softmax.

    Returns:
        three consumers, which hide each other's arithmetic, where sequences fill their tiles and
        the products do not take long enough to hide it behind; small tiles of keys where most of a
        large one would be masked.
    """
    very_long = window == (None, None) and min(mean_queries, mean_keys) >= _VERY_LONG
    if very_long and not (softmax and width == 128):
        return Tiling(64, 4, 3, 128 // width)
    if None not in window:
        return Tiling(64, 4, 2, 2)
    # A mean that is a whole number of large tiles is that of sequences with equally many keys,
    # which fill them. Softmax, which has more to do between the products, gains nothing by it.
    full = mean_keys % 128 == 0 and not softmax
    if width == 128 and mean_keys < _LONG and not full:
        return Tiling(64, 4, 2, 2)
    return Tiling(128, 256 // width, 2, 2)

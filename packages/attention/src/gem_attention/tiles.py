"""Tile lists: which tile of which sequence a program of an attention kernel works on.

A batch of unequal sequences is cut into tiles of ``block_tokens`` rows. The list holds every tile
once, costliest first, so that a grid that takes them in turn ends everywhere at about the same
time. It is made on the device, from device offsets alone: nothing waits for the GPU, and a
captured CUDA graph that is replayed with other lengths makes the list anew.

Rows behind the last offset (T > offsets[-1]) are the tail: one more sequence, of index B, that
sees nothing. A kernel that follows the list thus writes zeros there on its ordinary path.

Two lists serve attention. ``query_tiles`` cuts the queries and costs a tile by the keys that it
sees (forward, gradient of q); ``key_tiles`` cuts the keys and costs a tile by the queries that see
it (gradients of k and v). Heads are not in the list: kernels run them innermost, so that
neighbours share keys in the cache.

Left out: the kernels that read it, and tile sizes, which are theirs to choose.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from gem_opkit.errors import ShapeError, refusal

Window = tuple[int | None, int | None]

# A side of a window at least this wide is open: no sequence is as long.
OPEN_TOKENS = 2**30
# Counting costlier sequences takes B^2 comparisons; from here on sorting is cheaper.
_SORTED_FROM = 16_384
# Lists kept for each offsets tensor: two sides, a few tile sizes and windows of a model's layers.
_KEPT = 16


@dataclass(frozen=True, slots=True)
class TileList:
    """The tiles of a packed batch, costliest first.

    Attributes:
        entries: int32 (capacity, 2), on the device: sequence and tile within it. A tile covers
            rows [tile·block_tokens, (tile+1)·block_tokens) of its sequence. Sequence B is the
            tail. Entries from ``count`` on are not written.
        count: int32 (1,), on the device: number of tiles.
        capacity: most tiles that these numbers of tokens and sequences can have, a host int.
        block_tokens: rows of a tile.
    """

    entries: Tensor
    count: Tensor
    capacity: int
    block_tokens: int


def query_tiles(
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    *,
    q_tokens: int,
    k_tokens: int,
    block_tokens: int,
    window: Window = (None, None),
) -> TileList:
    """List the tiles of queries, those that see most keys first.

    Args:
        q_offsets_O: first query of each sequence, int32 or int64, on a GPU (on a CPU in Triton's
            interpreter).
        k_offsets_O: first key of each sequence.
        q_tokens: rows of q, from its shape; may be more than the last offset.
        k_tokens: rows of k, likewise.
        block_tokens: rows of a tile.
        window: keys visible left and right of a query's place; None for all.

    Returns:
        the list; the same object for the same offsets tensors, unless they were changed or a
        CUDA graph is being captured.

    Numerics: the same list in every run.
    Cost: one kernel of B²/2^14 steps and a few integers a tile; nothing waits for the device.
    """
    # With a bounded right side alone, the last queries see most.
    descending = _is_open(window[0]) and not _is_open(window[1])
    return _tile_list(
        q_offsets_O,
        k_offsets_O,
        q_tokens,
        k_tokens,
        block_tokens,
        _span(block_tokens, window),
        descending=descending,
    )


def key_tiles(
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    *,
    q_tokens: int,
    k_tokens: int,
    block_tokens: int,
    window: Window = (None, None),
) -> TileList:
    """List the tiles of keys, those that most queries see first.

    Args:
        q_offsets_O: as in ``query_tiles``.
        k_offsets_O: as in ``query_tiles``.
        q_tokens: as in ``query_tiles``.
        k_tokens: as in ``query_tiles``.
        block_tokens: keys of a tile.
        window: as in ``query_tiles``.

    Returns:
        the list, as ``query_tiles``; its sequence B is the tail of the keys.
    """
    # With a bounded left side alone, the last keys are seen by most.
    descending = not _is_open(window[0]) and _is_open(window[1])
    return _tile_list(
        k_offsets_O,
        q_offsets_O,
        k_tokens,
        q_tokens,
        block_tokens,
        _span(block_tokens, window),
        descending=descending,
    )


def tile_capacity(batch: int, tokens: int, block_tokens: int) -> int:
    """Return the most tiles that a batch can have, its tail included.

    Args:
        batch: number of sequences.
        tokens: rows, those behind the last sequence included.
        block_tokens: rows of a tile.

    Returns:
        at least the number of tiles, at most B + 1 more.
    """
    return tokens // block_tokens + batch + 1


def tile_list_reference(
    tiled_lengths: list[int],
    other_lengths: list[int],
    *,
    tokens: int,
    block_tokens: int,
    window: Window,
    descending: bool,
) -> list[tuple[int, int]]:
    """Return the list that the kernel must write, in plain Python.

    Args:
        tiled_lengths: tokens of each sequence on the side that is cut.
        other_lengths: tokens of each sequence on the other side.
        tokens: rows on the side that is cut.
        block_tokens: rows of a tile.
        window: keys visible left and right.
        descending: whether the last tile of a sequence stands first.

    Returns:
        (sequence, tile) in order.
    """
    lengths = [*tiled_lengths, tokens - sum(tiled_lengths)]
    span = _span(block_tokens, window)
    costs = [min(length, span) for length in other_lengths] + [0]
    listed = []
    for sequence in sorted(range(len(lengths)), key=lambda b: (-costs[b], b)):
        tiles = range(-(-lengths[sequence] // block_tokens))
        listed += [(sequence, tile) for tile in (reversed(tiles) if descending else tiles)]
    return listed


def forget_tile_lists() -> None:
    """Drop every kept list.

    Needed only where offsets are changed behind torch's back: by another framework (numpy too), by
    a kernel of one's own, by writing to ``offsets.data``, or by the replay of a CUDA graph that
    writes them.
    """
    with _lock:
        _kept.clear()


def _is_open(side: int | None) -> bool:
    return side is None or side >= OPEN_TOKENS


def _span(block_tokens: int, window: Window) -> int:
    """Return the most tokens of the other side that one tile can meet within the window."""
    left, right = window
    if left is None or right is None:
        return 2**31 - 1
    return min(block_tokens + min(left, OPEN_TOKENS) + min(right, OPEN_TOKENS), 2**31 - 1)


# Keyed by the tensor object, because the address of a freed tensor is soon another's.
_kept: Any = WeakTensorKeyDictionary()  # dict[Tensor, dict[tuple, (versions, other, TileList)]]
_lock = threading.Lock()  # the backward runs on a thread of its own


def _tile_list(
    tiled_offsets_O: Tensor,
    other_offsets_O: Tensor,
    tokens: int,
    other_tokens: int,
    block_tokens: int,
    span: int,
    *,
    descending: bool,
) -> TileList:
    if tiled_offsets_O.shape != other_offsets_O.shape:
        raise ShapeError(
            refusal(
                "tile_list",
                "k_offsets_O",
                must=f"have the shape {tuple(tiled_offsets_O.shape)} of q_offsets_O",
                got=tuple(other_offsets_O.shape),
                fix="pass the offsets of the same sequences",
            )
        )

    def build() -> TileList:
        return _build(
            tiled_offsets_O,
            other_offsets_O,
            tokens,
            other_tokens,
            block_tokens,
            span,
            descending=descending,
        )

    on_gpu = tiled_offsets_O.is_cuda
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return build()
    if tiled_offsets_O.is_inference() or other_offsets_O.is_inference():
        return build()  # such tensors do not count their changes
    # A list is ready only for what comes later on the stream that wrote it.
    stream = torch.cuda.current_stream(tiled_offsets_O.device).cuda_stream if on_gpu else 0
    key = (tokens, other_tokens, block_tokens, span, descending, stream, id(other_offsets_O))
    # An assignment to ``.data`` moves a tensor to other memory and counts no change.
    sides = (tiled_offsets_O, other_offsets_O)
    versions = tuple((offsets._version, offsets.data_ptr()) for offsets in sides)
    with _lock:
        lists = _kept.setdefault(tiled_offsets_O, {})
        found = lists.get(key)
        if found is not None and found[0] == versions and found[1]() is other_offsets_O:
            return found[2]
        listed = build()
        if len(lists) >= _KEPT:
            lists.pop(next(iter(lists)))
        lists[key] = (versions, TensorWeakRef(other_offsets_O), listed)
    return listed


def _build(
    tiled_offsets_O: Tensor,
    other_offsets_O: Tensor,
    tokens: int,
    other_tokens: int,
    block_tokens: int,
    span: int,
    *,
    descending: bool,
) -> TileList:
    from gem_attention.tiling.kernel import launch_tile_list

    device = tiled_offsets_O.device
    batch = tiled_offsets_O.shape[0] - 1
    capacity = tile_capacity(batch, tokens, block_tokens)
    entries = torch.empty((capacity, 2), dtype=torch.int32, device=device)
    count = torch.empty((1,), dtype=torch.int32, device=device)
    starts_C = None
    if batch >= _SORTED_FROM:
        starts_C = _starts_by_sorting(
            tiled_offsets_O, other_offsets_O, tokens, other_tokens, block_tokens, span
        )
    launch_tile_list(
        tiled_offsets_O,
        other_offsets_O,
        starts_C,
        entries,
        count,
        tokens=tokens,
        other_tokens=other_tokens,
        span=span,
        block_tokens=block_tokens,
        descending=descending,
    )
    return TileList(entries, count, capacity, block_tokens)


def _starts_by_sorting(
    tiled_offsets_O: Tensor,
    other_offsets_O: Tensor,
    tokens: int,
    other_tokens: int,
    block_tokens: int,
    span: int,
) -> Tensor:
    """Return the place of each sequence's first tile, of the tail's, and the number of tiles."""
    ends = tiled_offsets_O.to(torch.int64).clamp(0, tokens)
    lengths = torch.cat([ends, ends.new_full((1,), tokens)]).diff().clamp(min=0)
    tiles = (lengths + block_tokens - 1) // block_tokens
    costs = other_offsets_O.to(torch.int64).clamp(0, other_tokens).diff().clamp(0, span)
    # The tail comes last: no sequence costs less than nothing.
    order = torch.cat([costs, costs.new_full((1,), -1)]).argsort(descending=True, stable=True)
    ends = tiles[order].cumsum(0)
    starts = torch.empty_like(ends).scatter_(0, order, ends - tiles[order])
    return torch.cat([starts, ends[-1:]])

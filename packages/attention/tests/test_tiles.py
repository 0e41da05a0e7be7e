import gc
import math
import weakref

import pytest
import torch

from gem_attention import tiles
from gem_attention.patterns import window_mask
from gem_attention.tiles import forget_tile_lists, key_tiles, query_tiles, tile_capacity
from gem_jagged.batch import Layout
from gem_opkit.errors import ShapeError
from gem_opkit.testing import check_refuses, count_launches, poisoned_empty

LENGTHS = [
    ((3, 5, 2), (7, 0, 1)),
    ((0, 4, 3), (0, 4, 3)),
    ((0, 0, 0), (1, 2, 3)),
    ((), ()),
    ((1,), (0,)),
    ((130, 1, 64, 65, 0, 300), (10, 500, 64, 64, 9, 300)),
]
WINDOWS = [(None, None), (None, 0), (4, None), (3, 2), (2**40, 0)]


def offsets(lengths, dtype=torch.int32, device="cpu"):
    return Layout.from_lengths(list(lengths), dtype=dtype, device=device).offsets_O


def entries_of(listed):
    return [tuple(row) for row in listed.entries[: int(listed.count)].tolist()]


def expected_entries(tiled, other, tail, block, window, *, of_queries):
    """From the masks: what a sequence's costliest tile could see, then sequence by sequence."""
    left, right = (None if side is None or side >= 2**30 else side for side in window)
    reach = None if left is None or right is None else block + left + right
    costs = [length if reach is None else min(length, reach) for length in other]
    backwards = (left is None and right is not None) if of_queries else right is None and left
    rows = []
    for index, length in [*enumerate(tiled), (len(tiled), tail)]:
        cost = -1 if index == len(tiled) else costs[index]
        for start in range(0, length, block):
            tile = start // block
            rows.append((-cost, index, -tile if backwards else tile, tile))
    return [(index, tile) for _, index, _, tile in sorted(rows)]


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sorted_from", [0, 10**9])
def test_list_holds_every_tile_costliest_first(dtype, sorted_from, monkeypatch):
    monkeypatch.setattr(tiles, "_SORTED_FROM", sorted_from)
    for (q_lengths, k_lengths), window, tail in zip(
        LENGTHS * 2, WINDOWS * 3, [0, 7, 0, 100, 1, 70] * 2, strict=False
    ):
        pair = offsets(q_lengths, dtype), offsets(k_lengths, dtype)
        sizes = {"q_tokens": sum(q_lengths) + tail, "k_tokens": sum(k_lengths) + tail}
        sizes |= {"block_tokens": 16, "window": window}
        with poisoned_empty("all"):
            queries, keys = query_tiles(*pair, **sizes), key_tiles(*pair, **sizes)
        wanted = expected_entries(q_lengths, k_lengths, tail, 16, window, of_queries=True)
        assert entries_of(queries) == wanted
        wanted = expected_entries(k_lengths, q_lengths, tail, 16, window, of_queries=False)
        assert entries_of(keys) == wanted


@pytest.mark.interpreter
def test_many_sequences_and_one_giant_are_listed_whole():
    lengths = [(i * 37) % 90 for i in range(400)] + [5000]
    pair = offsets(lengths), offsets(lengths)
    listed = query_tiles(*pair, q_tokens=sum(lengths), k_tokens=sum(lengths), block_tokens=32)
    wanted = tiles.tile_list_reference(
        lengths,
        lengths,
        tokens=sum(lengths),
        block_tokens=32,
        window=(None, None),
        descending=False,
    )
    assert entries_of(listed) == wanted
    assert len(wanted) <= listed.capacity == tile_capacity(401, sum(lengths), 32)


def test_order_follows_what_the_masks_show():
    # Within a sequence the first tile listed is the one that sees most.
    for window, of_queries in [((None, 0), True), ((0, None), True), ((None, 0), False)]:
        mask = window_mask(64, 64, *window)
        seen = (mask if of_queries else mask.T).view(4, 16, 64).sum((1, 2))
        rows = expected_entries((64,), (64,), 0, 16, window, of_queries=of_queries)
        assert seen[[tile for _, tile in rows]].tolist() == sorted(seen.tolist(), reverse=True)


@pytest.mark.interpreter
@pytest.mark.parametrize("sorted_from", [0, 10**9])
@pytest.mark.parametrize(
    "wrong",
    [
        [0, 40, 20, 200],  # beyond the tokens
        [0, 50, 0, 50, 0, 50],  # the same tokens three times: more tiles than the list holds
        [-30, 20, 50],  # before the first token
        [2**40, -(2**40), 2**33],
    ],
)
def test_wrong_offsets_list_nothing_outside(wrong, sorted_from, monkeypatch):
    monkeypatch.setattr(tiles, "_SORTED_FROM", sorted_from)
    allocated = []

    def guarded(size, **options):
        # Behind each result lies memory that nobody may write.
        whole = torch.full((math.prod(size) + 64,), -7, **options)
        allocated.append(whole[math.prod(size) :])
        return whole[: math.prod(size)].view(size)

    monkeypatch.setattr(tiles.torch, "empty", guarded)
    pair = torch.tensor(wrong), torch.tensor(wrong)
    for make in (query_tiles, key_tiles):
        listed = make(*pair, q_tokens=50, k_tokens=50, block_tokens=16)
        assert int(listed.count) <= listed.capacity
        for sequence, tile in entries_of(listed):
            assert 0 <= sequence <= len(wrong) - 1
            assert 0 <= tile < 4
    assert all((rest == -7).all() for rest in allocated)


@pytest.mark.interpreter
def test_list_is_made_once_for_the_same_offsets():
    forget_tile_lists()
    q_offsets, k_offsets = offsets((5, 9)), offsets((3, 8))
    sizes = {"q_tokens": 14, "k_tokens": 11, "block_tokens": 16}
    with count_launches() as launches:
        first = query_tiles(q_offsets, k_offsets, **sizes)
        assert query_tiles(q_offsets, k_offsets, **sizes) is first
        assert launches.count == 1
        assert query_tiles(q_offsets, k_offsets, **sizes, window=(1, 1)) is not first
        assert query_tiles(q_offsets.clone(), k_offsets, **sizes) is not first
        assert query_tiles(q_offsets, k_offsets.clone(), **sizes) is not first
        assert launches.count == 4
    q_offsets.copy_(offsets((9, 5)))  # other lengths in the same tensor
    k_offsets[1] = 0
    again = query_tiles(q_offsets, k_offsets, **sizes)
    assert entries_of(again) == [(1, 0), (0, 0)]
    q_offsets.data = offsets((0, 14))
    assert entries_of(query_tiles(q_offsets, k_offsets, **sizes)) == [(1, 0)]
    with torch.inference_mode():
        loose = offsets((9, 5))
        first = query_tiles(loose, loose, **sizes)
        assert query_tiles(loose, loose, **sizes) is not first


@pytest.mark.interpreter
def test_kept_lists_die_with_their_offsets():
    forget_tile_lists()
    gone = offsets((5, 9))
    other = offsets((5, 9))
    sizes = {"q_tokens": 14, "k_tokens": 14, "block_tokens": 16}
    alive = weakref.ref(query_tiles(gone, other, **sizes).entries)
    assert alive() is not None
    for block in range(17, 60):
        query_tiles(other, other, q_tokens=14, k_tokens=14, block_tokens=block)
    assert sum(len(lists) for lists in tiles._kept.values()) <= 2 * tiles._KEPT
    del gone
    gc.collect()
    assert alive() is None


@pytest.mark.interpreter
def test_offsets_that_take_the_place_of_freed_ones_get_their_own_list(monkeypatch):
    # A new tensor may have the identity and the memory of a dead one; here the former always.
    monkeypatch.setattr(tiles, "id", lambda _: 7, raising=False)
    q_offsets = offsets((4, 4))
    for turn in range(40):
        k_offsets = torch.tensor([0, turn % 9, 8])
        listed = query_tiles(q_offsets, k_offsets, q_tokens=8, k_tokens=8, block_tokens=16)
        assert entries_of(listed)[0] == (0 if turn % 9 >= 4 else 1, 0)
        del k_offsets


def test_refuses_offsets_of_other_sequences():
    check_refuses(
        [
            (
                lambda: query_tiles(
                    offsets((1, 2)), offsets((3,)), q_tokens=3, k_tokens=3, block_tokens=16
                ),
                ShapeError,
                r"k_offsets_O must have the shape \(3,\)",
            )
        ]
    )


@pytest.mark.gpu
def test_list_on_gpu_equals_the_reference():
    generator = torch.Generator().manual_seed(0)
    for batch in (0, 1, 1152, 20_000):
        lengths = torch.randint(0, 300, (batch,), generator=generator).tolist()
        device_offsets = offsets(lengths, device="cuda")
        tokens = sum(lengths) + 77
        sizes = {"q_tokens": tokens, "k_tokens": tokens, "block_tokens": 64}
        query_tiles(device_offsets.clone(), device_offsets, **sizes)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            listed = query_tiles(device_offsets, device_offsets, **sizes)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert entries_of(listed) == tiles.tile_list_reference(
            lengths,
            lengths,
            tokens=tokens,
            block_tokens=64,
            window=(None, None),
            descending=False,
        )

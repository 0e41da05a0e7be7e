import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gem_attention.costs import block_pairs_in_sequence, visible_pairs_in_sequence
from gem_attention.patterns import (
    block_mask,
    causal_mask,
    cross_mask,
    full_mask,
    visible_pairs,
    visible_pairs_block,
    window_mask,
)


def picture(mask):
    return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]


def test_full_and_cross_hide_nothing():
    assert picture(full_mask(2)) == ["xx", "xx"]
    assert picture(cross_mask(2, 3)) == ["xxx", "xxx"]


def test_causal_is_aligned_at_the_end():
    assert picture(causal_mask(3, 3)) == ["x..", "xx.", "xxx"]
    assert picture(causal_mask(2, 4)) == ["xxx.", "xxxx"]
    assert picture(causal_mask(4, 2)) == ["..", "..", "x.", "xx"]


def test_window_counts_from_the_place_of_the_query():
    assert picture(window_mask(4, 4, 1, 0)) == ["x...", "xx..", ".xx.", "..xx"]
    assert picture(window_mask(4, 4, 0, 2)) == ["xxx.", ".xxx", "..xx", "...x"]
    assert picture(window_mask(2, 5, 1, 1)) == ["..xxx", "...xx"]
    assert picture(window_mask(5, 2, 0, 1)) == ["..", "..", "x.", "xx", ".x"]


def test_blocks_are_counted_from_the_first_token():
    assert picture(block_mask(5, 2)) == ["xx...", "xx...", "..xx.", "..xx.", "....x"]


def test_an_empty_sequence_has_an_empty_mask():
    assert window_mask(0, 3, 1, 1).shape == (0, 3)
    assert window_mask(3, 0, None, None).shape == (3, 0)
    assert block_mask(0, 4).shape == (0, 0)


side = st.one_of(st.none(), st.integers(0, 12))
lengths = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=5)


@given(lengths, side, side)
def test_counted_pairs_are_those_of_the_masks(pairs, left, right):
    q_lengths = torch.tensor([q for q, _ in pairs], dtype=torch.int64)
    k_lengths = torch.tensor([k for _, k in pairs], dtype=torch.int64)
    counted = sum(int(window_mask(q, k, left, right).sum()) for q, k in pairs)
    assert visible_pairs(q_lengths, k_lengths, left, right) == counted
    assert sum(visible_pairs_in_sequence(q, k, left, right) for q, k in pairs) == counted


@given(st.lists(st.integers(0, 20), max_size=5), st.integers(1, 9))
def test_counted_block_pairs_are_those_of_the_masks(tokens, block):
    counted = sum(int(block_mask(n, block).sum()) for n in tokens)
    assert visible_pairs_block(torch.tensor(tokens, dtype=torch.int64), block) == counted
    assert sum(block_pairs_in_sequence(n, block) for n in tokens) == counted


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_pass_int32(dtype):
    long = torch.tensor([100_000, 100_000], dtype=dtype)
    assert visible_pairs(long, long) == 2 * 10**10

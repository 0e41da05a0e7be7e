import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gem_embeddings.hashing import hash_parts_to_rows, hash_to_rows, mix64
from gem_opkit.errors import ConfigError, DtypeError
from gem_opkit.testing import check_refuses

WORD = 2**64 - 1
IDS = [0, 1, -1, 2**63 - 1, -(2**63), 42, -42, 2**32, 2**31 - 1, -(2**31)]


def mix_python(value, seed):
    """The mix in unbounded integers, from its definition."""
    word = (value + 0x9E3779B97F4A7C15 * (seed + 1)) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def mix_numpy(values, seed):
    """The mix in numpy's own unsigned arithmetic."""
    with np.errstate(over="ignore"):
        word = values.view(np.uint64) + np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) & WORD)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))


def test_published_sequence():
    # The first outputs of splitmix64 seeded with 1234567, as its test vector gives them. Its k-th
    # output is the mix of the seed plus k steps, which is what an id and a seed are here.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for step, value in enumerate(expected):
        assert int(mix64(torch.tensor([1234567]), seed=step)[0]) & WORD == value


@pytest.mark.parametrize("seed", [0, 1, 17, 2**63 - 1])
def test_torch_numpy_and_python_agree(seed):
    ids = torch.tensor(IDS, dtype=torch.int64)
    by_torch = [word & WORD for word in mix64(ids, seed=seed).tolist()]
    assert by_torch == [mix_python(value, seed) for value in IDS]
    assert by_torch == mix_numpy(ids.numpy(), seed).tolist()


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    st.integers(1, 2**62),
    st.integers(0, 2**63 - 1),
)
def test_rows_are_the_defined_ones_and_in_range(ids, num_embeddings, seed):
    rows = hash_to_rows(torch.tensor(ids, dtype=torch.int64), num_embeddings, seed=seed).tolist()
    assert rows == [(mix_python(value, seed) >> 1) % num_embeddings for value in ids]
    assert all(0 <= row < num_embeddings for row in rows)


def test_ids_are_not_changed_and_narrow_ones_are_widened():
    ids = torch.arange(-5, 5, dtype=torch.int32)
    kept = ids.clone()
    assert torch.equal(hash_to_rows(ids, 7), hash_to_rows(ids.long(), 7))
    wide = kept.long()
    hash_to_rows(wide, 7)
    assert torch.equal(ids, kept)
    assert torch.equal(wide, kept.long())


@pytest.mark.parametrize("stride", [1, 2**20, 2**32, -3])
def test_rows_are_even_for_patterned_ids(stride):
    # 64 rows, 6,400 ids: every count lies within six standard deviations of 100.
    counts = torch.bincount(hash_to_rows(torch.arange(6400) * stride, 64), minlength=64)
    assert (counts - 100).abs().max() < 60


def test_seeds_give_unrelated_rows():
    ids = torch.arange(6400)
    same = (hash_to_rows(ids, 64, seed=0) == hash_to_rows(ids, 64, seed=1)).sum()
    assert 40 < int(same) < 180  # 100 by chance


def test_refuses():
    check_refuses(
        [
            (lambda: mix64(torch.zeros(2)), DtypeError, "ids must be integers; got torch.float32"),
            (lambda: mix64(torch.tensor([True])), DtypeError, "got torch.bool"),
            (
                lambda: mix64(torch.tensor([1]), seed=-1),
                ConfigError,
                r"seed must be in \[0, 2\^63\); got -1",
            ),
            (
                lambda: hash_to_rows(torch.tensor([1]), 0),
                ConfigError,
                "num_embeddings must be at least 1; got 0",
            ),
        ]
    )


def test_features_hashed_together_get_the_rows_that_each_gets_alone():
    draw = torch.Generator().manual_seed(4)
    sizes, rows, seeds = [5, 0, 7, 1], [3, 10, 2**62, 1], [0, 1, 2**63 - 1, 7]
    parts = [torch.randint(-(2**63), 2**63 - 1, (size,), generator=draw) for size in sizes]
    alone = [
        hash_to_rows(ids, count, seed=seed)
        for ids, count, seed in zip(parts, rows, seeds, strict=True)
    ]
    assert torch.equal(hash_parts_to_rows(torch.cat(parts), sizes, rows, seeds), torch.cat(alone))

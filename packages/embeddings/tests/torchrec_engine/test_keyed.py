"""Batches and tables to torchrec and back, and what a batch that does not fit is told."""

import pytest
import torch

from gem_embeddings.contract import LookupSpec, TableSpec
from gem_embeddings.keyed import (
    from_keyed,
    from_torchrec_configs,
    key_ends,
    split_keyed,
    to_keyed,
    to_torchrec_configs,
)
from gem_jagged.batch import Jagged
from gem_opkit.errors import ShapeError, UnsupportedError


def batch() -> tuple[dict[str, Jagged], dict[str, torch.Tensor]]:
    ids = {
        "a": Jagged.from_lengths(torch.tensor([4, 5, 6]), torch.tensor([2, 0, 1])),
        "b": Jagged.from_lengths(torch.tensor([7]), torch.tensor([0, 0, 1])),
    }
    ids["none"] = Jagged.from_lengths(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0, 0]))
    return ids, {"a": torch.tensor([0.5, 2.0, 3.0])}


def assert_same(found: dict[str, Jagged], wanted: dict[str, Jagged]) -> None:
    assert list(found) == list(wanted)
    for name, one in wanted.items():
        assert found[name].values.tolist() == one.values.tolist()
        assert found[name].lengths.tolist() == one.lengths.tolist()


@pytest.mark.torchrec
def test_a_batch_comes_back_with_its_weights() -> None:
    ids, weights = batch()
    keyed = to_keyed(ids, weights)
    assert keyed["a"].values().tolist() == [4, 5, 6]
    assert keyed["a"].weights().tolist() == [0.5, 2.0, 3.0]
    found, found_weights = from_keyed(keyed)
    assert_same(found, ids)
    assert found_weights["a"].tolist() == [0.5, 2.0, 3.0]
    assert found_weights["b"].tolist() == [1.0]
    assert from_keyed(to_keyed(ids))[1] == {}


@pytest.mark.torchrec
def test_two_permutations_keep_weights() -> None:
    """Edge case 23."""
    ids, weights = batch()
    keyed = to_keyed({"a": ids["a"], "b": ids["b"]}, weights)
    twice = keyed.permute([1, 0]).permute([1, 0])
    found, found_weights = from_keyed(twice)
    assert_same(found, {"a": ids["a"], "b": ids["b"]})
    assert found_weights["a"].tolist() == [0.5, 2.0, 3.0]
    plain = to_keyed({"a": ids["a"], "b": ids["b"]}).permute([1, 0]).permute([1, 0])
    assert_same(from_keyed(plain)[0], {"a": ids["a"], "b": ids["b"]})


@pytest.mark.torchrec
def test_keys_without_any_example() -> None:
    """Edge case 20: keys, but no lengths; and no keys at all."""
    from torchrec import KeyedJaggedTensor

    nothing = torch.zeros(0, dtype=torch.int64)
    found, _ = from_keyed(KeyedJaggedTensor(["a", "b"], values=nothing, lengths=nothing))
    assert [one.batch for one in found.values()] == [0, 0]
    found, _ = from_keyed(KeyedJaggedTensor(["a", "b"], values=nothing, lengths=nothing, stride=0))
    assert [one.total_tokens for one in found.values()] == [0, 0]
    assert to_keyed(found).keys() == ["a", "b"]
    assert from_keyed(to_keyed({})) == ({}, {})


@pytest.mark.torchrec
def test_keys_may_have_batches_of_their_own() -> None:
    from torchrec import KeyedJaggedTensor

    keyed = KeyedJaggedTensor(
        ["a", "b"],
        values=torch.tensor([4, 5, 6]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    found, _ = from_keyed(keyed)
    assert [(one.batch, one.values.tolist()) for one in found.values()] == [(2, [4, 5]), (1, [6])]


@pytest.mark.torchrec
def test_tables_come_back() -> None:
    specs = [
        TableSpec(name="t", embedding_dim=8, num_embeddings=5, feature_names=("a", "b")),
        TableSpec(name="u", embedding_dim=4, num_embeddings=3, feature_names=("c",)),
    ]
    specs[0] = specs[0].model_copy(update={"pooling": "mean", "row_dtype": "fp16"})
    specs[1] = specs[1].model_copy(update={"pooling": "none"})
    bags, vectors = to_torchrec_configs(specs)
    assert [config.name for config in bags] == ["t"]
    assert [config.name for config in vectors] == ["u"]
    assert from_torchrec_configs([*bags, *vectors]) == specs


@pytest.mark.torchrec
@pytest.mark.parametrize(
    ("change", "lookups", "says"),
    [
        ({"id_space": "hash"}, [], "table 't' must have ids that are rows"),
        ({"out_of_range": "zero"}, [], "table 't' must have ids in range"),
        ({}, [LookupSpec(feature_name="h", table_name="t")], "must pool its features in one way"),
    ],
)
def test_tables_that_torchrec_does_not_hold_are_named(change, lookups, says) -> None:
    spec = TableSpec(name="t", embedding_dim=8, num_embeddings=5, feature_names=("a",))
    with pytest.raises(UnsupportedError, match=says):
        to_torchrec_configs([spec.model_copy(update=change)], lookups)


@pytest.mark.torchrec
def test_initial_bounds_of_torchrec_are_not_dropped() -> None:
    from torchrec import EmbeddingBagConfig

    given = {"name": "t", "embedding_dim": 8, "num_embeddings": 4, "feature_names": ["a"]}
    assert from_torchrec_configs([EmbeddingBagConfig(**given, weight_init_max=0.5)])
    with pytest.raises(UnsupportedError, match="weight_init_min of table 't' must be left out"):
        from_torchrec_configs([EmbeddingBagConfig(**given, weight_init_min=-2.0)])


def test_lengths_that_do_not_divide_name_both_numbers() -> None:
    """Edge case 21: 5 lengths, 2 keys."""
    values, lengths = torch.arange(5), torch.ones(5, dtype=torch.int64)
    with pytest.raises(ShapeError, match="lengths must divide among 2 keys; got 5 lengths"):
        split_keyed(["a", "b"], values, lengths)
    with pytest.raises(ShapeError, match="lengths must divide among 0 keys; got 5 lengths"):
        split_keyed([], values, lengths)
    with pytest.raises(ShapeError, match="values must be the 5 ids that the lengths say; got 4"):
        split_keyed(["a"], values[:4], lengths)
    with pytest.raises(ShapeError, match="weights must be the weights of 5 ids"):
        split_keyed(["a"], values, lengths, weights=torch.ones(4))
    with pytest.raises(ShapeError, match="keys must differ; got a, a"):
        split_keyed(["a", "a"], values[:2], lengths[:2])
    with pytest.raises(ShapeError, match="be as many as the 4 examples of 2 keys; got 5 lengths"):
        split_keyed(["a", "b"], values, lengths, batches=[3, 1])


def test_more_ids_than_int32_counts() -> None:
    """Edge case 15: the places of ids are whole numbers, whatever the lengths are."""
    lengths = torch.full((4,), 2**30, dtype=torch.int32)
    assert key_ends(lengths, [1, 1, 2]) == [2**30, 2**31, 2**32]


def test_features_that_do_not_fit_are_named() -> None:
    ids, _ = batch()
    ids["b"] = Jagged.from_lengths(torch.tensor([7]), torch.tensor([0, 1]))
    with pytest.raises(ShapeError, match="a: 3, b: 2, none: 3"):
        to_keyed(ids)
    with pytest.raises(ShapeError, match="weights\\['x'\\] must have one weight for each id"):
        to_keyed({"a": ids["a"]}, {"x": torch.ones(3)})

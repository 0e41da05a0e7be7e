import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gem_embeddings.contract import LookupSpec, TableSpec
from gem_embeddings.hashing import hash_to_rows
from gem_embeddings.lookup import sum_by_row, unique_rows
from gem_embeddings.tables import EmbeddingTables
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, DataError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import LENGTH_CASES, check_refuses, length_case_id, poisoned_empty

POOLINGS = ["sum", "mean", "none"]


def one_table(pooling="sum", *, rows=11, width=3, **options):
    return EmbeddingTables(
        [
            TableSpec(
                name="item",
                embedding_dim=width,
                num_embeddings=rows,
                feature_names=("a",),
                pooling=pooling,
                **options,
            )
        ]
    )


def drawn(lengths, rows=11, dtype=torch.int64):
    return Jagged.from_lengths(torch.randint(0, rows, (sum(lengths),)).to(dtype), lengths)


def seen_rows(tables, name="item"):
    """The rows of a gradient as they are stored: each once."""
    grad = tables.weights[name].grad
    assert grad.is_sparse
    return grad._indices()[0].tolist()


def oracle(table, ids, pooling, weight=None):
    """One example after the other, dense autograd, in fp64."""
    table = table.double()
    vectors = table[ids.values.long()]
    if pooling == "none":
        return vectors
    if weight is not None:
        vectors = vectors * weight.double()[:, None]
    parts = vectors.split(ids.lengths.tolist())
    rows = [part.sum(0) / (max(len(part), 1) if pooling == "mean" else 1) for part in parts]
    # A slice keeps an empty batch differentiable.
    return torch.stack(rows) if rows else vectors[:0]


@pytest.mark.parametrize("case", LENGTH_CASES, ids=length_case_id)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_outputs_and_gradients_are_those_of_the_definition(case, pooling, weighted):
    if weighted and pooling == "none":
        return
    tables, ids = one_table(pooling), drawn(case.lengths)
    weight = torch.randn(case.total_tokens, requires_grad=True) if weighted else None
    exact_table = tables.weights["item"].detach().clone().requires_grad_()
    exact_weight = None if weight is None else weight.detach().clone().requires_grad_()
    exact = oracle(exact_table, ids, pooling, exact_weight)
    upstream = torch.randn_like(exact, dtype=torch.float32)
    with poisoned_empty("all"):
        found = tables({"a": ids}, {"a": weight} if weighted else None)["a"]
        found.backward(upstream)
    exact.backward(upstream.double())
    torch.testing.assert_close(found, exact.float())
    grad = tables.weights["item"].grad
    torch.testing.assert_close(grad.to_dense(), exact_table.grad)
    assert seen_rows(tables) == sorted(set(ids.values.tolist()))
    if weighted:
        torch.testing.assert_close(weight.grad, exact_weight.grad)


def test_numeric_derivative_of_the_pooling_weights():
    tables = one_table("mean").double()
    ids = drawn((2, 0, 3))
    weight = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: tables({"a": ids}, {"a": w})["a"], (weight,))


def test_features_of_a_table_share_one_gradient():
    spec = TableSpec(
        name="item", embedding_dim=2, num_embeddings=5, feature_names=("a", "b"), pooling="sum"
    )
    tables = EmbeddingTables([spec], [LookupSpec(feature_name="c", table_name="item")])
    ids = {
        "a": Jagged.from_list([torch.tensor([1, 1])]),
        "b": Jagged.from_list([torch.tensor([1, 3])]),
        "c": Jagged.from_list([torch.tensor([3, 3, 4])]),
    }
    out = tables(ids)
    assert out["a"].shape == out["b"].shape == (1, 2)
    assert out["c"].shape == (3, 2)
    (out["a"].sum() + 10 * out["b"].sum() + 100 * out["c"].sum()).backward()
    assert seen_rows(tables) == [1, 3, 4]
    grad = tables.weights["item"].grad.to_dense()
    assert grad[:, 0].tolist() == [0.0, 12.0, 0.0, 210.0, 100.0]


def test_a_feature_whose_output_is_unused_leaves_no_row():
    spec = TableSpec(name="item", embedding_dim=2, num_embeddings=5, feature_names=("a", "b"))
    tables = EmbeddingTables([spec])
    out = tables(
        {"a": Jagged.from_list([torch.tensor([1])]), "b": Jagged.from_list([torch.tensor([2])])}
    )
    out["b"].sum().backward()
    assert seen_rows(tables) == [2]


def test_gradients_of_two_forwards_add_up():
    tables = one_table("none")
    for ids in (torch.tensor([1, 2]), torch.tensor([2, 3])):
        tables({"a": Jagged.from_list([ids])})["a"].sum().backward()
    dense = tables.weights["item"].grad.to_dense()
    assert dense[:4, 0].tolist() == [0.0, 1.0, 2.0, 1.0]


def test_order_of_features_and_foreign_features_do_not_matter():
    # The same permutation twice must lose neither ids nor weights.
    spec = TableSpec(name="item", embedding_dim=3, num_embeddings=9, feature_names=("a", "b"))
    tables = EmbeddingTables([spec])
    ids = {"a": drawn((2, 1), 9), "b": drawn((0, 3), 9)}
    weights = {"a": torch.rand(3), "b": torch.rand(3)}
    turn = lambda named: dict(reversed(list(named.items())))  # noqa: E731
    expected = tables(ids, weights)
    for given_ids, given_weights in (
        (turn(ids), weights),
        (turn(turn(ids)), turn(turn(weights))),
        ({"other": drawn((1, 1)), **turn(ids)}, turn(weights)),
    ):
        found = tables(given_ids, given_weights)
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    unweighted = tables(turn(ids))
    assert not torch.equal(unweighted["a"], expected["a"])
    assert torch.equal(unweighted["a"], tables(turn(turn(ids)))["a"])


def test_weighted_and_unweighted_features_mix_in_poisoned_memory():
    # What is not given a weight counts as 1, whatever the memory held before.
    spec = TableSpec(name="item", embedding_dim=3, num_embeddings=9, feature_names=("a", "b"))
    tables = EmbeddingTables([spec])
    ids = {"a": drawn((2, 0, 1), 9), "b": drawn((0, 3, 2), 9)}
    weight = torch.rand(3, requires_grad=True)
    with poisoned_empty("all"):
        out = tables(ids, {"a": weight})
        (out["a"].sum() + out["b"].sum()).backward()
    table = tables.weights["item"]
    torch.testing.assert_close(out["a"], oracle(table, ids["a"], "sum", weight).float())
    torch.testing.assert_close(out["b"], oracle(table, ids["b"], "sum").float())
    assert table.grad.to_dense().isfinite().all()
    assert weight.grad.isfinite().all()


def test_a_batch_of_none_and_a_batch_of_empty_examples():
    spec = TableSpec(name="item", embedding_dim=3, num_embeddings=9, feature_names=("a", "b"))
    tables = EmbeddingTables([spec])
    none = Jagged.from_lengths(torch.zeros(0, dtype=torch.int64), [])
    empty = Jagged.from_lengths(torch.zeros(0, dtype=torch.int64), [0, 0])
    out = tables({"a": none, "b": empty})
    assert out["a"].shape == (0, 3)
    assert out["b"].tolist() == [[0.0] * 3] * 2
    (out["a"].sum() + out["b"].sum()).backward()
    assert tables.weights["item"].grad.shape == (9, 3)
    assert seen_rows(tables) == []


def test_lengths_that_do_not_match_the_ids_name_both_numbers():
    tables = one_table()
    five, offsets = torch.zeros(5, dtype=torch.int64), torch.tensor([0, 2, 4])
    lie = Jagged(five, offsets, torch.tensor([2, 2]), 2)
    check_refuses(
        [
            (
                lambda: tables({"a": lie}),
                ShapeError,
                r"ids\['a'\] must have one dim of 4 ids, the sum of its 2 lengths; .*\(5,\)",
            ),
            (
                lambda: Jagged.from_lengths(five, [2, 2]),
                ShapeError,
                "values has 5 tokens but the lengths sum to 4",
            ),
        ]
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_and_offsets_of_either_width(dtype):
    tables, ids = one_table("mean"), drawn((2, 0, 3))
    narrow = Jagged(
        ids.values.to(dtype), ids.offsets_O.to(torch.int32), ids.lengths, ids.max_length
    )
    assert torch.equal(tables({"a": narrow})["a"], tables({"a": ids})["a"])


def test_ids_may_be_strided():
    tables, ids = one_table("sum"), drawn((2, 0, 3))
    wide = torch.stack([ids.values, ids.values + 1], dim=1)[:, 0]
    assert not wide.is_contiguous()
    assert torch.equal(tables({"a": ids.with_values(wide)})["a"], tables({"a": ids})["a"])


def test_example_alone_equals_in_batch():
    tables = one_table("mean")
    ids = drawn((3, 0, 6, 1))
    together = tables({"a": ids})["a"]
    for row, values in enumerate(ids.to_list()):
        alone = tables({"a": Jagged.from_list([values])})["a"]
        assert torch.equal(alone[0], together[row])


# Policies


def outside():
    return Jagged.from_lengths(torch.tensor([3, -1, 11, 2, 2**40]), [2, 1, 2])


def test_error_names_table_feature_position_value_and_range():
    check_refuses(
        [
            (
                lambda: one_table()({"a": outside()}),
                DataError,
                r"ids\['a'\] must be in \[0, 11\) for table 'item'; got -1 at position 1 "
                r"\(example 0\); .*out_of_range",
            ),
            (
                lambda: one_table()({"a": outside().with_values(torch.tensor([3, 1, 0, 11, 0]))}),
                DataError,
                r"got 11 at position 3 \(example 2\)",
            ),
        ]
    )
    tables = one_table()
    with pytest.raises(DataError):
        tables({"a": outside()})
    assert tables.out_of_range_counts() == {"item": 0}


@pytest.mark.parametrize("pooling", POOLINGS)
def test_clamp_reads_the_nearest_row_and_counts(pooling):
    tables = one_table(pooling, out_of_range="clamp")
    clamped = outside().with_values(torch.tensor([3, 0, 10, 2, 10]))
    assert torch.equal(tables({"a": outside()})["a"], tables({"a": clamped})["a"])
    assert tables.out_of_range_counts() == {"item": 3}
    tables({"a": outside()})
    assert tables.out_of_range_counts() == {"item": 6}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_zero_reads_zeros_counts_and_leaves_no_gradient(pooling, weighted):
    if weighted and pooling == "none":
        return
    tables = one_table(pooling, out_of_range="zero")
    with torch.no_grad():
        tables.weights["item"][0] = float("nan")  # where the id is read, nothing may come
    ids = outside()
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    out = tables({"a": ids}, {"a": weight} if weighted else None)["a"]
    table = tables.weights["item"].detach()
    factor = weight.detach() if weighted else torch.ones(5)
    expected = {
        "none": torch.stack([table[3], 0 * table[3], 0 * table[3], table[2], 0 * table[3]]),
        "sum": torch.stack([factor[0] * table[3], 0 * table[3], factor[3] * table[2]]),
        # An id that is read as zeros still counts in the mean.
        "mean": torch.stack([factor[0] * table[3] / 2, 0 * table[3], factor[3] * table[2] / 2]),
    }[pooling]
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert seen_rows(tables) == [2, 3]
    if weighted:
        assert weight.grad[[1, 2, 4]].tolist() == [0.0, 0.0, 0.0]
    assert tables.out_of_range_counts() == {"item": 3}


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_zero_with_one_id_an_example(pooling):
    tables = one_table(pooling, out_of_range="zero")
    ids = Jagged.from_lengths(torch.tensor([3, -7, 2]), [1, 1, 1])
    out = tables({"a": ids}, {"a": torch.tensor([2.0, 2.0, 2.0])})["a"]
    assert out[1].tolist() == [0.0] * 3
    torch.testing.assert_close(out[0], 2 * tables.weights["item"][3])


def test_counts_are_for_each_table_and_saved():
    specs = [
        TableSpec(
            name=name,
            embedding_dim=2,
            num_embeddings=rows,
            feature_names=(f"{name}_id",),
            out_of_range="clamp",
        )
        for name, rows in (("a", 3), ("b", 8))
    ]
    tables = EmbeddingTables(specs)
    ids = Jagged.from_list([torch.tensor([5, -2, 9])])
    tables({"a_id": ids, "b_id": ids})
    assert tables.out_of_range_counts() == {"a": 3, "b": 2}
    again = EmbeddingTables(specs)
    again.load_state_dict(tables.state_dict())
    assert again.out_of_range_counts() == {"a": 3, "b": 2}


def test_hashed_ids_take_any_number():
    tables = one_table("none", id_space="hash", hash_seed=5)
    raw = torch.tensor([-1, 2**62, 7, -(2**63)])
    out = tables({"a": Jagged.from_list([raw])})["a"]
    assert torch.equal(out, tables.weights["item"][hash_to_rows(raw, 11, seed=5)])
    assert tables.out_of_range_counts() == {"item": 0}


# Sums by row


@given(st.lists(st.integers(0, 40), max_size=30), st.sampled_from([41, 10_000]))
def test_marking_and_sorting_find_the_same_rows(rows, num_rows):
    rows_I = torch.tensor(rows, dtype=torch.int64)
    different, places = unique_rows(rows_I, num_rows)
    assert different.tolist() == sorted(set(rows))
    assert torch.equal(different[places], rows_I)


@pytest.mark.parametrize("num_rows", [50, 10**9])
def test_gradients_of_equal_rows_add_up_in_their_order(num_rows):
    rows, values = torch.randint(0, 50, (200,)), torch.randn(200, 3)
    # The rows of a billion take no memory: only those seen are stored.
    parts = [rows[:70], rows[70:]], [values[:70], values[70:]]
    total = sum_by_row(*parts, (num_rows, 3))
    expected = torch.zeros(50, 3)
    for row, value in zip(rows.tolist(), values, strict=True):
        expected[row] += value
    assert total.shape == (num_rows, 3)
    torch.sparse_coo_tensor(total.indices(), total.values(), total.shape, check_invariants=True)
    assert torch.equal(total.values(), expected[total.indices()[0]])


def test_row_numbers_pass_int32():
    # Rows beyond 2^31, without a table that holds them.
    rows = torch.tensor([2**40, 2**31, 2**40])
    total = sum_by_row([rows], [torch.ones(3, 1)], (2**41, 1))
    assert total.indices()[0].tolist() == [2**31, 2**40]
    assert total.values()[:, 0].tolist() == [1.0, 2.0]


# The module


def test_initial_weights_follow_the_spec():
    torch.manual_seed(3)
    wide = one_table(rows=400, width=50)
    assert wide.weights["item"].abs().max() <= 400**-0.5
    assert wide.weights["item"].detach().std() == pytest.approx(400**-0.5 / 3**0.5, rel=0.05)
    normal = one_table(rows=400, width=50, init_std=0.3)
    assert normal.weights["item"].detach().std() == pytest.approx(0.3, rel=0.05)
    torch.manual_seed(3)
    assert torch.equal(one_table(rows=400, width=50).weights["item"], wide.weights["item"])


def test_reset_draws_anew_and_forgets_the_counts():
    tables = one_table(out_of_range="clamp")
    before = tables.weights["item"].detach().clone()
    tables({"a": outside()})
    tables.reset_parameters()
    assert not torch.equal(tables.weights["item"], before)
    assert tables.out_of_range_counts() == {"item": 0}


@pytest.mark.parametrize("name", ["items", "keys", "type", "training", "user", "_keys", "float"])
def test_any_table_name_works(name):
    spec = TableSpec(name=name, embedding_dim=2, num_embeddings=3, feature_names=("a",))
    tables = EmbeddingTables([spec])
    ids = {"a": Jagged.from_list([torch.tensor([1])])}
    tables(ids)["a"].sum().backward()
    assert [parameter.shape for parameter in tables.table_parameters()] == [(3, 2)]
    again = EmbeddingTables([spec])
    again.load_state_dict(tables.state_dict())
    assert torch.equal(again(ids)["a"], tables(ids)["a"])
    tables.double().train()
    assert len(list(tables.weights.items())) == 1
    assert tables.out_of_range_counts() == {name: 0}


def test_features_and_specs_are_told():
    spec = TableSpec(name="item", embedding_dim=2, num_embeddings=5, feature_names=("a",))
    tables = EmbeddingTables([spec], [LookupSpec(feature_name="c", table_name="item")])
    assert tables.feature_names == ("a", "c")
    assert tables.specs == (spec,)


def test_tables_are_left_out_of_a_compiled_graph():
    tables, head = one_table("sum"), nn.Linear(3, 1)
    ids = {"a": drawn((2, 0, 3))}
    model = torch.compile(lambda given: head(tables(given)["a"]), backend="aot_eager")
    torch.testing.assert_close(model(ids), head(tables(ids)["a"]))
    model(ids).sum().backward()
    assert tables.weights["item"].grad.is_sparse


def test_evaluates_a_loaded_state_without_an_optimizer():
    trained = one_table("mean", out_of_range="zero")
    evaluated = one_table("mean", out_of_range="zero")
    evaluated.load_state_dict(trained.state_dict())
    evaluated.eval()
    with torch.inference_mode():
        assert torch.equal(evaluated({"a": outside()})["a"], trained({"a": outside()})["a"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_another_dtype_mix_with_features_without(dtype):
    spec = TableSpec(name="item", embedding_dim=3, num_embeddings=9, feature_names=("a", "b"))
    tables = EmbeddingTables([spec])
    ids = {"a": drawn((2, 0, 1), 9), "b": drawn((0, 3, 2), 9)}
    weight = torch.rand(3).to(dtype).requires_grad_()
    out = tables(ids, {"a": weight})
    (out["a"].sum() + out["b"].sum()).backward()
    grad, expected = tables.weights["item"].grad, torch.zeros(9, 3)
    expected.index_add_(0, ids["a"].values, weight.detach().float()[:, None].expand(3, 3))
    expected.index_add_(0, ids["b"].values, torch.ones(5, 3))
    assert grad.dtype == torch.float32
    torch.testing.assert_close(grad.to_dense(), expected)
    assert weight.grad.dtype == dtype


def test_ids_overwritten_before_the_backward_pass_are_noticed():
    # A loader that uses its memory again would otherwise move the rows of the next batch.
    tables, ids = one_table(), torch.tensor([1, 2, 3])
    out = tables({"a": Jagged.from_lengths(ids, [2, 1])})["a"]
    ids.fill_(7)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_ids_without_lengths_are_refused():
    with pytest.raises(DtypeError, match=r"ids\['a'\] must be a Jagged; got Tensor"):
        one_table()({"a": torch.tensor([1])})


def test_refuses():
    def spec(name="t", features=("a",), **options):
        return TableSpec(
            name=name, embedding_dim=2, num_embeddings=3, feature_names=features, **options
        )

    def lookup(feature="b", table="t"):
        return LookupSpec(feature_name=feature, table_name=table)

    tables = EmbeddingTables([spec(features=("a", "b"))], [lookup("c")])
    ids = {name: drawn((1, 2), 3) for name in "abc"}
    check_refuses(
        [
            (
                lambda: EmbeddingTables([spec(), spec(features=("b",))]),
                ConfigError,
                "tables must have different names; got 't' twice",
            ),
            (
                lambda: EmbeddingTables([spec(), spec("u")]),
                ConfigError,
                "feature 'a' must be looked up in one table; got 't' and 'u'",
            ),
            (
                lambda: EmbeddingTables([spec(), spec("u", ("b",))], [lookup("b", "t")]),
                ConfigError,
                "feature 'b' must be looked up in one table",
            ),
            (
                lambda: EmbeddingTables([spec()], [lookup(table="v")]),
                ConfigError,
                "lookup of 'b' must name one of t; got 'v'",
            ),
            (
                lambda: EmbeddingTables([spec()], [lookup(), lookup()]),
                ConfigError,
                "lookup of 'b' must be given once",
            ),
            (
                lambda: EmbeddingTables([spec(), spec("u", ())]),
                ConfigError,
                "tables must be looked up by a feature; got u",
            ),
            (
                lambda: EmbeddingTables([spec("type"), spec("type_table", ("b",))]),
                ConfigError,
                "different names",
            ),
            (
                lambda: tables({"a": ids["a"], "c": ids["c"]}),
                DataError,
                "ids must have the feature 'b'; got a, c",
            ),
            (
                lambda: tables({**ids, "a": ids["a"].with_values(torch.zeros(3))}),
                DtypeError,
                r"ids\['a'\] must be int32 or int64; got torch.float32",
            ),
            (
                lambda: tables({**ids, "a": ids["a"].with_values(torch.zeros(3, 1).long())}),
                ShapeError,
                r"ids\['a'\] must have one dim",
            ),
            (
                lambda: tables(ids, {"a": torch.ones(2)}),
                ShapeError,
                r"weights\['a'\] must have one weight for each of 3 ids",
            ),
            (
                lambda: tables(ids, {"a": torch.ones(3).long()}),
                DtypeError,
                r"weights\['a'\] must be floating point",
            ),
            (
                lambda: tables(ids, {"c": torch.ones(3)}),
                ConfigError,
                r"weights\['c'\] must belong to a pooled feature; got a feature without pooling",
            ),
            (
                lambda: tables(ids, {"z": torch.ones(3)}),
                ConfigError,
                r"weights\['z'\] must belong to a pooled feature; got an unknown feature",
            ),
        ]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["error", "clamp", "zero"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_gpu_equals_cpu(pooling, policy):
    tables = one_table(pooling, out_of_range=policy)
    ids = drawn((3, 0, 6)) if policy == "error" else outside()
    expected = tables({"a": ids})["a"]
    expected.sum().backward()
    expected_grad = tables.weights["item"].grad.to_dense()
    tables.zero_grad()
    tables.cuda()
    batch = {"a": ids.to("cuda")}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("default" if policy == "error" else "error")
    try:
        out = tables(batch)["a"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    out.sum().backward()
    torch.testing.assert_close(out.cpu(), expected)
    torch.testing.assert_close(tables.weights["item"].grad.to_dense().cpu(), expected_grad)


def test_narrow_rows_are_not_held_as_wide_ones():
    spec = TableSpec(name="t", embedding_dim=4, num_embeddings=3, row_dtype="bf16")
    with pytest.raises(UnsupportedError, match="row_dtype of table 't' must be fp32; got bf16"):
        EmbeddingTables([spec])

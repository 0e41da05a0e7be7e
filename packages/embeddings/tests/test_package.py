from pathlib import Path

import pytest
from pydantic import ValidationError

import gem_embeddings.contract
from gem_embeddings.contract import LookupSpec, OptimizerSpec, TableSpec
from gem_embeddings.costs import lookup_backward_cost, lookup_cost, optimizer_cost
from gem_embeddings.plan import plan_tables
from gem_opkit.cost import Cost
from gem_opkit.testing import (
    check_contract_json,
    check_torch_free,
    run_fresh,
    run_without_triton,
)


def spec(**options):
    return TableSpec(**{"name": "item", "embedding_dim": 8, "num_embeddings": 100, **options})


def test_contract_is_the_committed_one():
    check_contract_json(gem_embeddings.contract, Path(__file__).parent / "contract.json")


def test_contract_and_plan_need_no_torch():
    check_torch_free(
        "gem_embeddings.contract",
        "gem_embeddings.costs",
        "gem_embeddings.plan",
        "gem_embeddings.planning.__main__",
    )


def test_training_needs_no_triton():
    printed = run_without_triton(
        "import torch\n"
        "from gem_embeddings.contract import OptimizerSpec, TableSpec\n"
        "from gem_embeddings.optimizer import table_optimizer\n"
        "from gem_embeddings.tables import EmbeddingTables\n"
        "from gem_jagged.batch import Jagged\n"
        "spec = TableSpec(name='t', embedding_dim=2, num_embeddings=4, feature_names=('a',))\n"
        "tables = EmbeddingTables([spec])\n"
        "optimizer = table_optimizer(tables.table_parameters(), OptimizerSpec())\n"
        "out = tables({'a': Jagged.from_list([torch.tensor([1, 3])])})['a']\n"
        "out.sum().backward()\n"
        "optimizer.step()\n"
        "print(tuple(out.shape))\n"
    )
    assert printed == "(1, 2)\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "two words"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a.b"}, "name"),
        ({"embedding_dim": 0}, "embedding_dim"),
        ({"num_embeddings": 0}, "num_embeddings"),
        ({"pooling": "max"}, "pooling"),
        ({"id_space": "raw"}, "id_space"),
        ({"out_of_range": "wrap"}, "out_of_range"),
        ({"hash_seed": -1}, "hash_seed"),
        ({"init_std": -0.1}, "init_std"),
        ({"feature_names": ("a", "b", "a")}, "feature_names must differ; got a twice"),
        ({"embeding_dim": 8}, "embeding_dim"),
    ],
)
def test_a_wrong_table_is_refused_by_field(options, message):
    with pytest.raises(ValidationError, match=message):
        spec(**options)


def test_a_wrong_lookup_or_optimizer_is_refused_by_field():
    with pytest.raises(ValidationError, match="feature_name"):
        LookupSpec(feature_name="", table_name="item")
    with pytest.raises(ValidationError, match="kind"):
        OptimizerSpec(kind="lamb")
    with pytest.raises(ValidationError, match="lr"):
        OptimizerSpec(lr=0)
    with pytest.raises(ValidationError, match="moment_scale must be 1 unless"):
        OptimizerSpec(kind="adam", moment_scale=2.0)
    with pytest.raises(ValidationError, match="beta2"):
        OptimizerSpec(beta2=1.0)


@pytest.mark.parametrize(
    ("kind", "state"), [("rowwise_adagrad", 400), ("adagrad", 3200), ("sgd", 0), ("adam", 6400)]
)
def test_plan_counts_weights_and_state(kind, state):
    plan = plan_tables([spec(), spec(name="user")], ranks=4, optimizer=OptimizerSpec(kind=kind))
    assert plan.ranks == 4
    assert [p.table_name for p in plan.placements] == ["item", "user"]
    assert [p.sharding for p in plan.placements] == ["replicated"] * 2
    assert plan.rank_bytes == 2 * (3200 + state)
    assert plan_tables([]).rank_bytes == 0


def test_plan_agrees_with_the_tensors():
    import torch

    from gem_embeddings.optimizer import table_optimizer
    from gem_embeddings.tables import EmbeddingTables

    tables = EmbeddingTables([spec(feature_names=("a",))])
    for kind in ("rowwise_adagrad", "adam"):
        optimizer_spec = OptimizerSpec(kind=kind)
        optimizer = table_optimizer(tables.table_parameters(), optimizer_spec)
        tables.weights["item"].grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 8), (100, 8))
        optimizer.step()
        state = optimizer.state[tables.weights["item"]]
        held = tables.weights["item"].nbytes
        held += sum(value.nbytes for name, value in state.items() if name != "step")
        plan = plan_tables(tables.specs, optimizer=optimizer_spec)
        assert plan.rank_bytes == held


def test_costs_of_a_small_case_by_hand():
    # Three ids, two of them equal, pooled into one vector of width 4.
    forward = lookup_cost(ids=3, vectors=1, rows=2, embedding_dim=4)
    assert forward == Cost(flops=2 * 4, bytes=3 * 8 + (2 + 1) * 4 * 4)
    assert lookup_cost(ids=3, vectors=3, rows=2, embedding_dim=4).flops == 0
    empty = lookup_cost(ids=0, vectors=2, rows=0, embedding_dim=4)
    assert empty == Cost(flops=0, bytes=2 * 4 * 4)
    backward = lookup_backward_cost(ids=3, vectors=1, rows=2, embedding_dim=4)
    assert backward == Cost(flops=4, bytes=(3 + 2) * 8 + (1 + 2) * 4 * 4)
    adagrad = optimizer_cost(OptimizerSpec(), rows=2, embedding_dim=4)
    assert adagrad == Cost(flops=4 * 8 + 4 * 2, bytes=2 * 8 + (3 * 8 + 2 * 2) * 4)
    adam = optimizer_cost(OptimizerSpec(kind="adam"), rows=2, embedding_dim=4)
    assert adam == Cost(flops=12 * 8, bytes=2 * 8 + 7 * 8 * 4)
    # 16-bit rows: gradients stay fp32, weights are read and written in 2 bytes.
    adagrad = optimizer_cost(OptimizerSpec(kind="adagrad"), rows=2, embedding_dim=4, row_bytes=2)
    assert adagrad == Cost(flops=5 * 8, bytes=2 * 8 + 8 * (4 + 2 * 2) + 2 * 8 * 4)
    sgd = optimizer_cost(OptimizerSpec(kind="sgd"), rows=2, embedding_dim=4)
    assert sgd == Cost(flops=2 * 8, bytes=2 * 8 + 3 * 8 * 4)


def test_a_first_backward_pass_warns_of_nothing():
    # In a fresh process, because torch says it once; from any module, ours or torch's.
    printed = run_fresh(
        "import warnings\n"
        "import torch\n"
        "from gem_embeddings.contract import TableSpec\n"
        "from gem_embeddings.tables import EmbeddingTables\n"
        "from gem_jagged.batch import Jagged\n"
        "warnings.simplefilter('error')\n"
        "spec = TableSpec(name='t', embedding_dim=2, num_embeddings=4, feature_names=('a',))\n"
        "out = EmbeddingTables([spec])({'a': Jagged.from_list([torch.tensor([1, 3])])})['a']\n"
        "out.sum().backward()\n"
        "print('silent')\n"
    )
    assert printed == "silent\n"

"""What the torchrec engine cannot do is refused before any rank waits for another."""

from typing import Any

import pytest
import torch

from gem_embeddings.contract import OptimizerSpec, TablePlan, TableSpec
from gem_embeddings.engine import build_tables
from gem_embeddings.plan import place_tables
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, GemError, UnsupportedError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

pytestmark = pytest.mark.torchrec


def plan_for(
    spec: TableSpec, sharding: Any, ranks: int = 2, *, replicas: int = 1, fully: bool = False
) -> TablePlan:
    """A plan of one table."""
    return place_tables(
        [spec],
        {spec.name: sharding},
        table_shard=ranks // replicas,
        table_replicate=replicas,
        fully_sharded=fully,
    )


TABLE = TableSpec(name="t", embedding_dim=8, num_embeddings=5, feature_names=("a",))
ONE_PIECE = OptimizerSpec()


@pytest.mark.parametrize(
    ("spec", "plan", "optimizer", "wire_dtype", "says"),
    [
        (TABLE, plan_for(TABLE, "row_wise"), OptimizerSpec(kind="adam"), "fp32", "got adam"),
        (
            TABLE,
            plan_for(TABLE, "column_wise"),
            ONE_PIECE,
            "fp32",
            r"optimizer of table 't' \(column_wise\) must be adagrad or sgd where columns are cut",
        ),
        (
            TABLE.model_copy(update={"row_dtype": "bf16"}),
            plan_for(TABLE, "row_wise"),
            ONE_PIECE,
            "fp32",
            r"row_dtype of table 't' \(row_wise\) must be fp32 or fp16",
        ),
        (
            TABLE.model_copy(update={"embedding_dim": 6}),
            plan_for(TABLE.model_copy(update={"embedding_dim": 6}), "table_wise"),
            ONE_PIECE,
            "fp32",
            r"width of table 't' \(table_wise\) must be a multiple of 4",
        ),
        (
            TABLE,
            plan_for(TABLE, "row_wise"),
            ONE_PIECE,
            "fp16",
            r"wire_dtype of table 't' \(row_wise\) must be fp32 where rows are cut",
        ),
        (TABLE, plan_for(TABLE, "table_wise"), ONE_PIECE, "bf16", "wire_dtype must be fp32 or"),
        (
            TABLE,
            plan_for(TABLE, "table_wise", replicas=2, fully=True),
            ONE_PIECE,
            "fp32",
            "plan.fully_sharded must be False, as rows are to be read after their mean",
        ),
        (
            TABLE.model_copy(update={"pooling": "none"}),
            plan_for(TABLE, "table_row_wise"),
            ONE_PIECE,
            "fp32",
            r"features of table 't' \(table_row_wise\) must all be pooled",
        ),
    ],
)
def test_what_torchrec_cannot_do_is_named_with_the_engine_that_can(
    spec: TableSpec, plan: TablePlan, optimizer: OptimizerSpec, wire_dtype: Any, says: str
) -> None:
    world = World(rank=0, size=2)  # refused before any rank is talked to
    with pytest.raises(UnsupportedError, match=says) as refused:
        build_tables([spec], [], plan, optimizer, world, engine="torchrec", wire_dtype=wire_dtype)
    assert "with engine torchrec" in str(refused.value)
    assert str(refused.value).endswith('use engine="torch"')


def test_rows_must_ascend_with_the_ranks() -> None:
    placement = plan_for(TABLE, "row_wise").placements[0]
    first, second = placement.shards
    swapped = (
        first.model_copy(update={"rank": second.rank}),
        second.model_copy(update={"rank": first.rank}),
    )
    plan = plan_for(TABLE, "row_wise")
    placements = (placement.model_copy(update={"shards": swapped}),)
    plan = plan.model_copy(update={"placements": placements})
    with pytest.raises(UnsupportedError, match=r"rows of table 't' .* must ascend with the ranks"):
        build_tables([TABLE], [], plan, ONE_PIECE, World(rank=0, size=2), engine="torchrec")


def test_a_plan_for_others_is_refused() -> None:
    other = TABLE.model_copy(update={"name": "other"})
    with pytest.raises(ConfigError, match="plan must place the tables other; got t"):
        plan = plan_for(TABLE, "table_wise")
        build_tables([other], [], plan, ONE_PIECE, World(rank=0, size=2), engine="torchrec")
    with pytest.raises(ConfigError, match=r"plan\.ranks must be the 1 ranks of the world; got 2"):
        build_tables([TABLE], [], plan, ONE_PIECE, World(), engine="torchrec")
    taller = TABLE.model_copy(update={"num_embeddings": 7})
    with pytest.raises(ConfigError, match="must cover 7 rows of 8; got 5 rows of 8"):
        build_tables([taller], [], plan, ONE_PIECE, World(rank=0, size=2), engine="torchrec")


def misuse(world: World) -> list[str]:
    """What a call is told that this engine cannot do, on one rank."""
    engine = build_tables(
        [TABLE], [], plan_for(TABLE, "table_wise", 1), ONE_PIECE, world, engine="torchrec"
    )
    ids = {"a": Jagged.from_lengths(torch.tensor([1, 2]), torch.tensor([2]))}
    started = engine.start(ids)
    engine(started)
    told = []
    for call in (
        lambda: engine(ids, {"a": torch.ones(2, requires_grad=True)}),
        lambda: engine(started),
        lambda: engine(engine.start(ids), {"a": torch.ones(2)}),
        lambda: engine.set_lr(-1.0),
        lambda: engine.full_weight("x"),
        lambda: engine.load_table_state({}),
    ):
        try:
            call()
        except GemError as fault:
            told.append(f"{type(fault).__name__}: {fault}")
    assert engine.counters()["t"].unique > 0
    before = engine.counters()["t"]
    engine.set_count_unique(wanted=False)
    engine(ids)
    assert engine.counters()["t"].unique == before.unique
    assert engine.counters()["t"].looked_up == before.looked_up + 2
    assert not list(engine.parameters())
    assert not engine.state_dict()
    return told


def test_calls_that_cannot_be_are_named() -> None:
    (told,) = run_ranks(misuse, 1)
    starts = [
        "UnsupportedError: TorchrecTables: weights['a'] must need no gradient with engine torchrec",
        "ConfigError: TorchrecTables: ids must be a batch, or what start of this engine returned",
        "ConfigError: TorchrecTables: weights must be given to start",
        "ConfigError: TorchrecTables: lr must be at least 0 and finite; got -1.0",
        "ConfigError: TorchrecTables: name must be one of t; got 'x'",
        "ConfigError: ",
    ]
    assert len(told) == len(starts)
    assert all(text.startswith(start) for text, start in zip(told, starts, strict=True)), told

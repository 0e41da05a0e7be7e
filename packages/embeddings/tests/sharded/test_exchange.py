"""What travels between ranks, and what happens when a batch is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gem_embeddings.contract import LookupSpec, OptimizerSpec, RowDtype, Sharding, TableSpec
from gem_embeddings.engine import TableEngine, build_tables
from gem_embeddings.planning.layout import place_tables
from gem_embeddings.sharded.engine import TorchTables
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, DataError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

SPECS = (
    TableSpec(name="item", embedding_dim=8, num_embeddings=40, feature_names=("liked",)),
    TableSpec(
        name="shop", embedding_dim=8, num_embeddings=5, feature_names=("seen",), pooling="mean"
    ),
)
LOOKUPS = (LookupSpec(feature_name="history", table_name="item"),)


def engine_of(
    world: World, kind: Sharding = "row_wise", wire_dtype: RowDtype = "fp32"
) -> TorchTables:
    plan = place_tables(
        SPECS, {spec.name: kind for spec in SPECS}, table_shard=world.size, table_replicate=1
    )
    engine = build_tables(
        SPECS, LOOKUPS, plan, OptimizerSpec(lr=0.1), world, wire_dtype=wire_dtype, seed=3
    )
    assert isinstance(engine, TorchTables)
    return engine


def ids_of(rank: int, *, extra: int | None = None) -> dict[str, Jagged]:
    liked = [1 + rank, 39, 39, 2] + ([] if extra is None else [extra])
    return {
        "liked": Jagged.from_list([torch.tensor(liked), torch.tensor([], dtype=torch.int64)]),
        "history": Jagged.from_list([torch.tensor([39, 7, 39]), torch.tensor([rank])]),
        # Another number of examples than the others have.
        "seen": Jagged.from_list([torch.tensor([4]), torch.tensor([0, 1]), torch.tensor([2])]),
    }


def train(engine: TableEngine, rank: int) -> Tensor:
    vectors = engine(ids_of(rank))
    loss = torch.stack([x.square().sum() for x in vectors.values()]).sum()
    loss.backward()
    return torch.cat([x.detach().flatten() for x in vectors.values()])


def count_messages(world: World) -> dict[str, Any]:
    row_wise, cut = engine_of(world), engine_of(world, "column_wise")
    for engine in (row_wise, cut):
        train(engine, world.rank)
    same = torch.full((1000,), 39)
    many = dict.fromkeys(("liked", "history", "seen"), Jagged.from_list([torch.tensor([0])]))
    few = engine_of(world)
    with torch.no_grad():
        few(many)
        before = few.group.sent_bytes["all_to_all"]
        few({**many, "liked": Jagged.from_list([same])})
        one = few.group.sent_bytes["all_to_all"] - before
        few({**many, "liked": Jagged.from_list([same, same])})
    twice = few.group.sent_bytes["all_to_all"] - before - one
    narrow = engine_of(world, wire_dtype="bf16")
    first = train(narrow, world.rank)
    second = train(engine_of(world), world.rank)
    return {
        "calls": (row_wise.group.calls["all_to_all"], cut.group.calls["all_to_all"]),
        "bytes": (row_wise.group.sent_bytes["all_to_all"], narrow.group.sent_bytes["all_to_all"]),
        "repeats": (one, twice),
        "outputs": (second, first),
        "moved": (row_wise.full_weight("item"), narrow.full_weight("item")),
    }


def test_each_id_travels_once_and_vectors_in_the_format_asked_for() -> None:
    for found in run_ranks(count_messages, 2):
        # Counts, ids and vectors forward, gradients backward; cut columns send their square sums.
        assert found["calls"] == (4, 5)
        assert found["repeats"][0] == found["repeats"][1]
        wide, narrow = found["bytes"]
        # Both send 8 bytes an id and for the counts; of the rest the narrow one sends half.
        assert wide / 2 < narrow < 0.7 * wide
        exact, rounded = found["outputs"]
        assert not torch.equal(exact, rounded)
        torch.testing.assert_close(rounded, exact, rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(*found["moved"], rtol=0, atol=0.02)


def refuse(world: World) -> list[str]:
    engine = engine_of(world)
    before = engine.full_weight("item")
    said = []
    for extra, drop in ((99, None), (None, "seen"), (-1, None)):
        # Only rank 1 has a bad batch.
        ids = ids_of(world.rank, extra=extra if world.rank == 1 else None)
        if drop is not None and world.rank == 1:
            del ids[drop]
        with pytest.raises(DataError) as error:
            engine(ids)
        said.append(str(error.value))
    assert all(counts.looked_up == 0 for counts in engine.counters().values())
    assert torch.equal(engine.full_weight("item"), before)
    train(engine, world.rank)
    assert engine.counters()["item"].looked_up == 8
    assert engine.counters()["item"].unique == len({1 + world.rank, 39, 2, 7, world.rank})
    assert engine.counters()["item"].empty_bags == 1
    return said


def test_a_bad_batch_on_one_rank_is_refused_on_all_and_training_goes_on() -> None:
    other, own = run_ranks(refuse, 2)
    assert "99 at position 4 (example 0)" in own[0]
    assert "'seen'" in own[1]
    assert "-1 at position 4" in own[2]
    assert all("refusal by rank 1" in words for words in other)


def start_and_repeat(world: World) -> None:
    plain, ahead = engine_of(world), engine_of(world)
    for _ in range(2):
        expected = train(plain, world.rank)
        vectors = ahead(ahead.start(ids_of(world.rank)))
        torch.stack([x.square().sum() for x in vectors.values()]).sum().backward()
        assert torch.equal(torch.cat([x.detach().flatten() for x in vectors.values()]), expected)
    assert torch.equal(plain.full_weight("item"), ahead.full_weight("item"))
    started = ahead.start(ids_of(world.rank))
    out = ahead(started)["seen"].sum()
    out.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="a second one"):
        out.backward()
    with pytest.raises(ConfigError, match="a second forward"):
        ahead(started)
    with pytest.raises(ConfigError, match="given to start"):
        ahead(ahead.start(ids_of(world.rank)), {})
    with pytest.raises(ConfigError, match="lr must"):
        ahead.set_lr(float("nan"))


def test_a_started_lookup_is_the_plain_one_and_serves_once() -> None:
    run_ranks(start_and_repeat, 2)


def test_ids_without_pooling_may_stand_beside_pooled_features_without_examples() -> None:
    engine = engine_of(World())
    nothing = Jagged.from_lengths(torch.zeros(0, dtype=torch.int64), [])
    history = Jagged.from_list([torch.tensor([39, 7]), torch.tensor([39])])
    before = engine.full_weight("item")
    vectors = engine({"liked": nothing, "seen": nothing, "history": history})
    assert vectors["liked"].shape == (0, 8)
    assert torch.equal(vectors["history"], before[[39, 7, 39]])
    vectors["history"].sum().backward()
    moved = (engine.full_weight("item") != before).any(dim=1).nonzero().flatten()
    assert moved.tolist() == [7, 39]


def test_evaluation_neither_moves_nor_counts() -> None:
    engine = engine_of(World()).eval()
    before = engine.full_weight("item")
    with torch.no_grad():
        vectors = engine(ids_of(0))
    assert not vectors["liked"].requires_grad
    assert torch.equal(vectors["history"][0], before[39])
    assert torch.equal(engine.full_weight("item"), before)
    assert engine.counters()["item"].looked_up == 0
    assert engine.step == 0
    engine.train()(ids_of(0))["liked"].sum().backward()
    assert engine.step == 1
    assert not torch.equal(engine.full_weight("item"), before)

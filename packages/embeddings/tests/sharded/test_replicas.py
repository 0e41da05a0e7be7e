"""Several sharding groups: equal data changes nothing, slices hold the memory, means are fair."""

from typing import Any

import torch
from torch import Tensor

from gem_embeddings.contract import OptimizerSpec, RowDtype, TableSpec
from gem_embeddings.engine import build_tables
from gem_embeddings.planning.layout import place_tables
from gem_embeddings.sharded.engine import TorchTables
from gem_jagged.batch import Jagged
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

WIDTH, ROWS = 16, 600


def engine_of(
    world: World,
    replicas: int,
    *,
    fully: bool = False,
    row_dtype: RowDtype = "fp32",
    optimizer: OptimizerSpec | None = None,
) -> TorchTables:
    specs = (
        TableSpec(
            name="big", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=("big",),
            row_dtype=row_dtype, init_std=0.5,
        ),
        TableSpec(
            name="small", embedding_dim=WIDTH, num_embeddings=4, feature_names=("small",),
            row_dtype=row_dtype,
        ),
    )  # fmt: skip
    optimizer = OptimizerSpec(lr=0.1) if optimizer is None else optimizer
    plan = place_tables(
        specs,
        {"big": "row_wise"},
        table_shard=world.size // replicas,
        table_replicate=replicas,
        fully_sharded=fully,
        optimizer=optimizer,
    )
    engine = build_tables(specs, (), plan, optimizer, world, seed=5)
    assert isinstance(engine, TorchTables)
    return engine


def train(engine: TorchTables, draw: int, *, ahead: bool = False) -> int:
    """Run a step; returns the bytes of rows between its forward and its backward pass."""
    numbers = torch.Generator().manual_seed(draw)
    ids = {
        "big": Jagged.from_lengths(torch.randint(0, ROWS, (50,), generator=numbers), [5] * 10),
        "small": Jagged.from_lengths(torch.randint(0, 4, (20,), generator=numbers), [2] * 10),
    }
    vectors = engine(ids)
    between = engine.resident_bytes()
    if ahead:
        engine.gather_ahead(backward=True)
    factors = torch.randn(10, WIDTH, generator=numbers)
    ((vectors["big"] + 3 * vectors["small"]) * factors).mean().backward()
    if ahead:
        engine.gather_ahead(backward=False)
    return between


def weights_of(engine: TorchTables) -> list[Tensor]:
    return [engine.full_weight(name) for name in ("big", "small")]


def learn_the_same(world: World, replicas: int) -> list[list[Tensor]]:
    results = []
    for fully in (False, True) if replicas > 1 else (False,):
        engine = engine_of(world, replicas, fully=fully, row_dtype="fp32")
        for step in range(3):
            # The batch depends on the place in the group alone: all groups see the same.
            train(engine, 10 * step + world.rank // replicas)
            engine.sync()
        results.append(weights_of(engine))
    return results


def test_groups_that_see_equal_data_train_as_one_bit_for_bit() -> None:
    alone = run_ranks(learn_the_same, 2, 1)[0][0]
    for results in run_ranks(learn_the_same, 4, 2):
        for weights in results:
            assert all(torch.equal(a, b) for a, b in zip(weights, alone, strict=True))


def measure(world: World) -> dict[str, Any]:
    whole, sliced = engine_of(world, 2), engine_of(world, 2, fully=True)
    held = sum(tensor.numel() * 4 for tensor in sliced.table_state().values())
    between = [train(engine, world.rank) for engine in (whole, sliced)]
    whole.sync()
    return {
        "between": between,
        "bytes": (whole.resident_bytes(), sliced.resident_bytes(), held),
        "whole": dict(whole.replicas.calls),
        "sliced": dict(sliced.replicas.calls),
    }


def test_fully_sharded_keeps_half_and_gathers_only_around_reads_and_moves() -> None:
    for found in run_ranks(measure, 2):
        whole, sliced, held = found["bytes"]
        assert sliced * 2 == whole
        assert found["between"] == [whole, sliced]
        # Nothing but rows, accumulators and padding to equal slices.
        assert held <= whole < 1.1 * held
        # Shards and copies, each weights and accumulators: averaged once.
        assert found["whole"] == {"all_reduce": 4}
        # Weights before the lookup, weights and accumulators before the update, and back.
        assert found["sliced"] == {"all_gather": 2 + 4, "reduce_scatter": 4}


def round_means(world: World) -> list[Tensor]:
    sgd = OptimizerSpec(kind="sgd")
    sliced = engine_of(world, 2, fully=True, row_dtype="bf16", optimizer=sgd)
    train(sliced, world.rank)
    engine = engine_of(world, 2, row_dtype="bf16", optimizer=sgd)
    with torch.no_grad():
        # One replica has 1, the other the next number of bf16: their mean lies half way.
        for weight in engine.table_state().values():
            local: Any = weight
            for shard in local.to_local().local_shards():
                shard.fill_(1.0 + world.rank * 2**-7)
    engine.step = 4
    engine.sync()
    first = engine.full_weight("big")
    engine.sync()
    return [first, engine.full_weight("big"), *weights_of(sliced)]


def gather_early(world: World) -> tuple[dict[str, int], list[list[Tensor]], list[int]]:
    plain, early = engine_of(world, 2, fully=True), engine_of(world, 2, fully=True)
    for step in range(3):
        train(plain, 10 * step + world.rank)
        train(early, 10 * step + world.rank, ahead=True)
    held = [early.resident_bytes(), plain.resident_bytes()]
    state = [part for engine in (plain, early) for part in engine.table_state().values()]
    assert len(state) == 8
    return dict(early.replicas.calls), [weights_of(plain), weights_of(early)], held


def test_gathering_ahead_changes_nothing_but_when_memory_is_taken() -> None:
    for calls, (plain, early), held in run_ranks(gather_early, 2):
        assert all(torch.equal(a, b) for a, b in zip(plain, early, strict=True))
        # Three steps as ever, and the weights of two stores for a step that has not come.
        assert calls == {"all_gather": 3 * (2 + 4) + 2, "reduce_scatter": 3 * 4}
        assert held[0] > 2 * held[1]


def test_means_of_narrow_rows_are_rounded_by_chance_and_equal_on_all_replicas() -> None:
    one, other = run_ranks(round_means, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    mean, again, *_ = one
    # Equal rows stay as they are.
    assert torch.equal(mean, again)
    up = (mean.float() - 1.0) / 2**-7
    # The mean of neighbours is not a number of bf16: it becomes one of the two, as often as not.
    assert set(up.unique().tolist()) == {0.0, 1.0}
    assert abs(float(up.mean()) - 0.5) < 4 * 0.5 / up.numel() ** 0.5


def load_over_what_was_gathered(world: World) -> list[bool]:
    saved, other = (engine_of(world, 2, fully=True) for _ in range(2))
    same = []
    for step, backward in enumerate((False, True)):
        train(saved, 10 * step + world.rank)
        train(other, 10 * step + 5 + world.rank)
        other.gather_ahead(backward=backward)
        other.load_table_state(saved.table_state())
        for engine in (saved, other):
            train(engine, 10 * step + 2 + world.rank)
        pairs = zip(*(buffers_of(engine) for engine in (saved, other)), strict=True)
        same.append(all(torch.equal(a, b) for a, b in pairs))
    return same


def buffers_of(engine: TorchTables) -> list[Tensor]:
    return [buffer.filled() for buffer in engine._rows.buffers()]


def test_rows_that_were_gathered_ahead_do_not_outlive_a_load() -> None:
    assert run_ranks(load_over_what_was_gathered, 2) == [[True, True]] * 2

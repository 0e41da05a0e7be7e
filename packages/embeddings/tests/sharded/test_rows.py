"""Rows by themselves: initial weights, narrow formats, rules over cut columns, state, refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from gem_embeddings.contract import (
    OptimizerSpec,
    RowDtype,
    Sharding,
    TablePlacement,
    TablePlan,
    TableShard,
    TableSpec,
)
from gem_embeddings.engine import build_tables
from gem_embeddings.initial import fill_initial
from gem_embeddings.planning.layout import place_tables
from gem_embeddings.sharded.engine import TorchTables
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, UnsupportedError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks


def spec_of(*, row_dtype: RowDtype = "fp32", rows: int = 30, width: int = 8) -> TableSpec:
    return TableSpec(
        name="t", embedding_dim=width, num_embeddings=rows, feature_names=("f",), pooling="none",
        row_dtype=row_dtype,
    )  # fmt: skip


def engine_of(
    world: World, spec: TableSpec, kind: Sharding, optimizer: OptimizerSpec, *, replicas: int = 1
) -> TorchTables:
    plan = place_tables(
        [spec], {"t": kind}, table_shard=world.size // replicas, table_replicate=replicas,
        fully_sharded=replicas > 1,
    )  # fmt: skip
    engine = build_tables([spec], (), plan, optimizer, world, seed=1)
    assert isinstance(engine, TorchTables)
    return engine


def train(engine: TorchTables, rows: Tensor, grad: Tensor) -> None:
    out = engine({"f": Jagged.from_lengths(rows, [rows.shape[0]])})["f"]
    (out * grad).sum().backward()


@pytest.mark.parametrize("init_std", [None, 0.3])
def test_initial_weights_depend_on_their_place_alone(init_std: float | None) -> None:
    spec = TableSpec(
        name="t", embedding_dim=50, num_embeddings=4000, feature_names=("f",), init_std=init_std
    )
    whole, again, other = torch.empty(3, 4000, 50)
    fill_initial(whole, spec, seed=9)
    fill_initial(other, spec, seed=10)
    for rows, columns in ((slice(0, 1500), slice(0, 20)), (slice(1500, 4000), slice(0, 20)),
                          (slice(0, 4000), slice(20, 50))):  # fmt: skip
        fill_initial(
            again[rows, columns], spec, seed=9, row_start=rows.start, column_start=columns.start
        )
    assert torch.equal(again, whole)
    assert abs(float(torch.corrcoef(torch.stack([whole.flatten(), other.flatten()]))[0, 1])) < 0.01
    deviation = 0.3 if init_std else (4000**-0.5) / 3**0.5
    assert float(whole.std()) == pytest.approx(deviation, rel=0.01)
    assert abs(float(whole.mean())) < 5 * deviation / whole.numel() ** 0.5
    if init_std is None:
        assert float(whole.abs().max()) <= 4000**-0.5
    # Neighbouring rows and columns have nothing to do with each other.
    for shifted in (whole[1:] * whole[:-1], whole[:, 1:] * whole[:, :-1]):
        assert abs(float(shifted.mean())) < 5 * deviation**2 / shifted.numel() ** 0.5
    narrow = torch.empty(4000, 50, dtype=torch.bfloat16)
    fill_initial(narrow, spec, seed=9)
    assert torch.equal(narrow, whole.to(torch.bfloat16))


def scaled_adagrad(world: World, kinds: tuple[Sharding, ...]) -> list[Tensor]:
    found = []
    for kind in kinds:
        engine = engine_of(world, spec_of(), kind, OptimizerSpec(lr=0.1, moment_scale=4.0))
        for step in range(3):
            train(engine, torch.tensor([3, 5, 3]), torch.arange(24.0).view(3, 8) + step)
        found.append(engine.full_weight("t"))
    return found


def test_momentum_scaled_adagrad_divides_its_accumulator() -> None:
    want = torch.empty(30, 8)
    fill_initial(want, spec_of(), seed=1)
    sums = torch.zeros(30)
    for step in range(3):
        each = torch.arange(24.0).view(3, 8) + step
        for row, grad in ((3, each[0] + each[2]), (5, each[1])):
            sums[row] += grad.square().mean()
            want[row] -= 0.1 * grad / ((sums[row] / 4.0).sqrt() + 1e-8)
    torch.testing.assert_close(scaled_adagrad(World(), ("table_wise",)), [want])
    # Both ranks bring the same ids: the mean of their gradients is that of one.
    for found in run_ranks(scaled_adagrad, 2, ("column_wise", "row_wise")):
        torch.testing.assert_close(found, [want, want])


def test_narrow_rows_move_to_a_neighbour_of_the_exact_row_and_do_not_stall() -> None:
    sgd = OptimizerSpec(kind="sgd", lr=1.0)
    units: dict[RowDtype, float] = {"bf16": 2**-8, "fp16": 2**-11}
    for row_dtype, unit in units.items():
        engine = engine_of(World(), spec_of(row_dtype=row_dtype, width=512), "row_wise", sgd)
        (weight,) = engine.table_state().values()
        weight.fill_(0.75)
        # A hundredth of the distance to the next number: rounding to the nearest would lose it.
        for _ in range(100):
            train(engine, torch.tensor([2]), torch.full((1, 512), unit / 100))
        moved = 0.75 - engine.full_weight("t")[2].float()
        assert float(moved.mean()) == pytest.approx(unit, rel=0.15)
        steps = moved / unit
        assert torch.equal(steps, steps.round())
        assert bool((engine.full_weight("t")[3] == 0.75).all())


def save_and_go_on(world: World, kind: Sharding, replicas: int) -> list[list[Tensor]]:
    optimizer = OptimizerSpec(kind="adam", lr=0.1)
    first, second = (
        engine_of(world, spec_of(), kind, optimizer, replicas=replicas) for _ in range(2)
    )
    rows = torch.tensor([2, 29, 7]) - world.rank % 2
    train(first, rows, torch.ones(3, 8))
    second.load_table_state(first.table_state())
    second.step = first.step
    second.set_lr(first.lr)
    for engine in (first, second):
        train(engine, rows - 1, torch.full((3, 8), 2.0))
    state: dict[str, Any] = dict(first.table_state())
    with pytest.raises(ConfigError, match="have the keys"):
        second.load_table_state({"tables.t.weight": state["tables.t.weight"]})
    return [[engine.full_weight("t")] for engine in (first, second)]


def test_a_loaded_state_goes_on_as_the_one_that_was_saved() -> None:
    for first, second in [
        save_and_go_on(World(), "table_wise", 1),
        *run_ranks(save_and_go_on, 2, "column_wise", 1),
        *run_ranks(save_and_go_on, 4, "row_wise", 2),
    ]:
        assert torch.equal(first[0], second[0])


def uneven(world: World) -> bool:
    spec = spec_of()
    # Half of the columns whole on one rank, the other half cut by rows over two.
    shards = (
        TableShard(rank=0, row_start=0, row_end=30, column_start=0, column_end=4),
        TableShard(rank=1, row_start=0, row_end=11, column_start=4, column_end=8),
        TableShard(rank=2, row_start=11, row_end=30, column_start=4, column_end=8),
    )
    placement = TablePlacement(table_name="t", sharding="grid", shards=shards)
    plan = TablePlan(ranks=3, table_shard=3, placements=(placement,))
    with pytest.raises(UnsupportedError, match=r"table 't' \(grid, engine torch\)"):
        build_tables([spec], (), plan, OptimizerSpec(kind="rowwise_adagrad"), world)
    engine = build_tables([spec], (), plan, OptimizerSpec(kind="adagrad"), world, seed=1)
    before = engine.full_weight("t")
    out = engine({"f": Jagged.from_lengths(torch.tensor([12, 3]), [2])})["f"]
    assert torch.equal(out, before[[12, 3]])
    out.sum().backward()
    moved = engine.full_weight("t") - before
    return set(moved.abs().sum(1).nonzero().flatten().tolist()) == {3, 12}


def test_rows_cut_differently_by_columns_are_refused_only_where_the_rule_needs_whole_rows() -> None:
    assert all(run_ranks(uneven, 3))


def test_a_plan_of_other_ranks_or_tables_is_refused() -> None:
    spec, rule = spec_of(), OptimizerSpec()
    plan = place_tables([spec], {"t": "row_wise"}, table_shard=2)
    with pytest.raises(ConfigError, match="be for the 1 ranks that there are; got 2"):
        build_tables([spec], (), plan, rule, World())
    one = place_tables([spec], {"t": "row_wise"}, table_shard=1)
    with pytest.raises(ConfigError, match="cover 31 rows of 8; got 30 rows"):
        build_tables([spec_of(rows=31)], (), one, rule, World())
    with pytest.raises(ConfigError, match="place the tables u; got t"):
        build_tables([spec.model_copy(update={"name": "u"})], (), one, rule, World())
    engine: Any = "tensorflow"
    with pytest.raises(ConfigError, match='"torch" or "torchrec"'):
        build_tables([spec], (), one, rule, World(), engine=engine)


def refused_meshes(world: World) -> list[str]:
    spec, rule = spec_of(), OptimizerSpec()
    plan = place_tables([spec], {"t": "row_wise"}, table_shard=2, optimizer=rule)
    told = []
    for shape, names in (
        ((1, 2), ("table_shard", "table_replicate")),
        ((2, 1), ("table_replicate", "table_shard")),
        ((2,), ("table_shard",)),
        ((2, 1), None),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with pytest.raises(ConfigError) as refused:
            build_tables([spec], (), plan, rule, world, mesh=mesh)
        told.append(str(refused.value))
    return told


def test_a_mesh_of_other_axes_than_the_plans_is_refused() -> None:
    for told in run_ranks(refused_meshes, 2):
        for words in told:
            assert "mesh must have the axes {'table_shard': 2, 'table_replicate': 1}" in words
        assert "got {'table_shard': 1, 'table_replicate': 2} over [0, 1]" in told[0]

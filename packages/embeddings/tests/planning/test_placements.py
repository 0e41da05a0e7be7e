"""What a plan may say: shards that cut a table exactly once, on ranks of their own group."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gem_embeddings.contract import (
    OptimizerSpec,
    TablePlacement,
    TablePlan,
    TableShard,
    TableSpec,
)
from gem_embeddings.plan import place_tables, plan_tables
from gem_opkit.errors import ConfigError

KINDS = ("replicated", "table_wise", "row_wise", "column_wise", "table_row_wise", "grid")


def shard(rank, rows, columns=(0, 4), **options):
    return TableShard(
        rank=rank,
        row_start=rows[0],
        row_end=rows[1],
        column_start=columns[0],
        column_end=columns[1],
        **options,
    )


def placement(sharding, *shards):
    return TablePlacement(table_name="item", sharding=sharding, shards=shards)


def covered(table, placement):
    """How often each element of a table lies on some rank."""
    count = np.zeros((table.num_embeddings, table.embedding_dim), dtype=int)
    for part in placement.shards:
        count[part.row_start : part.row_end, part.column_start : part.column_end] += 1
    return count


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 20),
    hosts=st.integers(1, 4),
    host_ranks=st.integers(1, 4),
    kind=st.sampled_from(KINDS[1:]),
)
def test_placed_shards_hold_every_element_once(rows, columns, hosts, host_ranks, kind):
    table = TableSpec(name="item", embedding_dim=columns, num_embeddings=rows)
    plan = place_tables(
        [table], {"item": kind}, table_shard=hosts * host_ranks, host_ranks=host_ranks
    )
    placed = plan.placements[0]
    assert (covered(table, placed) == 1).all()
    assert len({part.rank for part in placed.shards}) == len(placed.shards)
    # Elements and, for row-wise AdaGrad, one accumulator a row of every range of columns.
    held = sum(
        4 * part.rows * part.columns + 4 * part.rows * (part.columns > 0) for part in placed.shards
    )
    assert sum(plan.group_rank_bytes()) == held


def test_a_group_of_two_in_a_world_of_four_names_only_its_own_ranks():
    tables = [TableSpec(name=kind, embedding_dim=4, num_embeddings=6) for kind in KINDS]
    plan = place_tables(tables, {kind: kind for kind in KINDS}, table_shard=2, table_replicate=2)
    assert plan.ranks == 4
    assert {part.rank for placed in plan.placements for part in placed.shards} == {0, 1}
    # Replicas are neighbours: a group is every second rank.
    groups = [[plan.world_rank(rank, replica) for rank in range(2)] for replica in range(2)]
    assert groups == [[0, 2], [1, 3]]


def test_fully_sharded_copies_hold_their_part():
    tables = [TableSpec(name="item", embedding_dim=4, num_embeddings=8, row_dtype="fp16")]
    options = {"table_shard": 2, "optimizer": OptimizerSpec(kind="adam")}
    plain = place_tables(tables, {"item": "row_wise"}, table_replicate=4, **options)
    sharded = place_tables(
        tables, {"item": "row_wise"}, table_replicate=4, fully_sharded=True, **options
    )
    # 4 rows of 4 elements: 2 bytes of weight and 8 of moments each.
    assert plain.group_rank_bytes() == (160, 160)
    assert sharded.group_rank_bytes() == (40, 40)


@pytest.mark.parametrize(
    ("sharding", "shards", "message"),
    [
        ("row_wise", [shard(0, (0, 3)), shard(1, (4, 6))], "none for rows 3 to 4"),
        ("row_wise", [shard(0, (0, 3)), shard(1, (2, 6))], "two for rows 2 to 3"),
        ("row_wise", [shard(0, (1, 6))], "none for rows 0 to 1"),
        ("column_wise", [shard(0, (0, 6), (0, 2)), shard(1, (0, 6), (3, 4))], "columns 2 to 3"),
        ("column_wise", [shard(0, (0, 6), (0, 3)), shard(1, (0, 6), (2, 4))], "two for columns"),
        ("grid", [shard(0, (0, 6), (0, 2)), shard(1, (0, 5), (2, 4))], "none for rows 5 to 6"),
        ("row_wise", [shard(0, (0, 3)), shard(0, (3, 6))], "several on rank 0"),
        ("table_wise", [shard(0, (0, 3)), shard(1, (3, 6))], "table_wise must have one shard"),
        ("row_wise", [shard(0, (0, 6), (0, 2)), shard(1, (0, 6), (2, 4))], "as wide as the table"),
        ("column_wise", [shard(0, (0, 3)), shard(1, (3, 6))], "hold every row"),
        ("replicated", [shard(0, (0, 6))], "shards must be empty"),
        ("row_wise", [], "got none"),
        ("row_wise", [shard(0, (6, 6))], "got none"),
        ("row_wise", [shard(0, (0, 6)), shard(1, (6, 5))], "end where it starts or later"),
    ],
)
def test_shards_that_do_not_cut_a_table_are_refused(sharding, shards, message):
    with pytest.raises(ValidationError, match=message):
        placement(sharding, *shards)


def test_an_empty_shard_is_a_rank_that_owns_nothing():
    placed = placement("row_wise", shard(0, (0, 6)), shard(1, (6, 6)))
    assert (placed.rows, placed.columns) == (6, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 8}, r"2 \* 2 = 4 and ranks=8"),
        (
            {"table_shard": 1, "ranks": 2},
            r"below table_shard=1; got 1 \(ranks=2, table_replicate=2",
        ),
        ({"host_ranks": 1}, "rows of a range of columns on one host of 1 ranks; got hosts 0, 1"),
        ({"table_shard": 4, "ranks": 8, "host_ranks": 3}, "host_ranks must divide table_shard"),
        ({"times": 2}, "each table once; got item twice"),
    ],
)
def test_plans_that_contradict_themselves_are_refused(options, message):
    placed = placement("table_row_wise", shard(0, (0, 3)), shard(1, (3, 6)))
    times = options.pop("times", 1)
    with pytest.raises(ValidationError, match=message):
        TablePlan(
            **{"ranks": 4, "table_shard": 2, "table_replicate": 2, **options},
            placements=(placed,) * times,
        )


def test_place_tables_refuses():
    table = TableSpec(name="item", embedding_dim=4, num_embeddings=8)
    with pytest.raises(ConfigError, match="name tables that are there; got user"):
        place_tables([table], {"user": "row_wise"}, table_shard=2)
    with pytest.raises(ConfigError, match="host_ranks must divide table_shard=4; got 3"):
        place_tables([table], {"item": "grid"}, table_shard=4, host_ranks=3)
    for factors in ({"table_shard": 0}, {"table_shard": 1, "table_replicate": -1}):
        name = list(factors)[-1]
        with pytest.raises(ConfigError, match=f"{name} must be at least 1; got"):
            place_tables([table], {}, **factors)
    with pytest.raises(ConfigError, match="table_shard must be at least 1; got 0"):
        plan_tables([table], ranks=0)

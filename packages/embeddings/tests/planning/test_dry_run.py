"""The bytes that the planner foresees are those that the engine gives to its collectives."""

import pytest

from gem_embeddings.contract import OptimizerSpec, TableLoad, TableSpec
from gem_embeddings.dry_run import dry_run
from gem_embeddings.plan import explain_tables, place_tables
from gem_embeddings.planning.spec import PlanningSpec
from gem_opkit.errors import UnsupportedError
from gem_opkit.testing import check_refuses
from gem_parallel.contract import LinkTier, Topology

BATCH = 256
KINDS = {
    "copied": "replicated",
    "whole": "table_wise",
    "rows": "row_wise",
    "columns": "column_wise",
    "host": "table_row_wise",
    "both": "grid",
}
TABLES = [
    TableSpec(
        name=name,
        embedding_dim=64,
        num_embeddings=4000,
        feature_names=(f"{name}_a", f"{name}_b"),
        row_dtype="fp16" if name == "rows" else "fp32",
    )
    for name in KINDS
]
LOADS = {
    feature: TableLoad(feature_name=feature, ids_per_example=ids, zipf_exponent=1.1)
    for table in TABLES
    for feature, ids in zip(table.feature_names, (6.0, 0.5), strict=True)
}
# A padding of 64 elements a shard and of 64 a slice, in the widest format.
PADDING = 64 * 4


def planned(copies, *, fully_sharded):
    topology = Topology(
        hosts=4,
        ranks_per_host=4 * copies,
        hosts_per_zone=4,
        host_tier=LinkTier(name="nvlink", gbytes_per_s=400, latency_us=1),
        zone_tier=LinkTier(name="zone", gbytes_per_s=40, latency_us=5),
    )
    return explain_tables(
        TABLES,
        planning=PlanningSpec(
            topology=topology,
            loads=tuple(LOADS.values()),
            batch_per_rank=BATCH,
            table_replicate=copies,
            fully_sharded=fully_sharded,
            wire_dtype="bf16",
            allowed={name: (kind,) for name, kind in KINDS.items()},
        ),
    )


@pytest.mark.parametrize(("copies", "fully_sharded"), [(1, False), (2, False), (2, True)])
def test_the_engine_gives_the_bytes_that_were_planned(copies, fully_sharded):
    explained = planned(copies, fully_sharded=fully_sharded)
    plan, solution = explained.plan, explained.solution
    assert {p.table_name: p.sharding for p in plan.placements} == KINDS
    # A rank that holds pieces of rows, for which square sums travel.
    group_rank = plan.placements[5].shards[0].rank
    ran = dry_run(
        TABLES,
        (),
        plan,
        OptimizerSpec(),
        LOADS,
        batch_per_rank=BATCH,
        wire_dtype="bf16",
        rank=plan.world_rank(group_rank, copies - 1),
    )
    mean = {exchange.name: exchange.rank_bytes for exchange in solution.step.exchanges}
    parts = [way.part for name, way in solution.chosen.items()
             if group_rank in way.holders(solution.loads.ranks[name])]  # fmt: skip
    # Forward: counts, ids, then vectors; as many as the other ranks ask for, so by what this one
    # holds. Backward: gradients of what this rank asked for, and square sums of what it holds.
    counts, ids, *vectors = ran.forward_bytes["table_shard", "all_to_all"]
    assert counts == mean["counts"]
    assert ids == pytest.approx(mean["ids"], rel=0.03)
    assert sum(vectors) == pytest.approx(sum(part.vector_bytes for part in parts), rel=0.1)
    squares = sum(part.square_bytes for part in parts)
    assert squares > 0
    backward = sum(ran.backward_bytes["table_shard", "all_to_all"])
    assert backward == pytest.approx(mean["gradients"] + squares, rel=0.03)
    for table in TABLES:
        assert ran.asked_rows[table.name] == pytest.approx(
            solution.traffic[table.name].unique, rel=0.05
        )
    spread = mean["ids and gradients of replicated tables"] / (plan.table_shard - 1)
    copied = ran.backward_bytes["table_shard", "all_gather"]
    assert sum(copied) == pytest.approx(spread, rel=0.05)
    # Memory, and what goes on between the copies of a shard, but for padding.
    padding = 4 * PADDING * len(TABLES)
    held = plan.group_rank_bytes()[group_rank]
    assert 0 <= ran.held_bytes - held <= padding
    between = {name: sum(sent) for (axis, name), sent in ran.backward_bytes.items()
               if axis == "table_replicate"}  # fmt: skip
    if copies == 1:
        assert between == {}
        return
    whole = held * copies if fully_sharded else held
    # fp16 weights are averaged by an exchange, everything else by the backend.
    mean_of = "reduce_scatter" if fully_sharded else "all_reduce"
    assert 0 <= between[mean_of] + between["all_to_all"] - whole <= padding
    if fully_sharded:
        assert 0 <= copies * between["all_gather"] - whole <= padding
        read = copies * sum(ran.forward_bytes["table_replicate", "all_gather"])
        # 4 bytes of accumulator a row of each shard are not read.
        rows = sum(4000 if p.sharding == "replicated" else
                   sum(s.rows for s in p.shards if s.rank == group_rank)
                   for p in plan.placements)  # fmt: skip
        assert 0 <= read - (whole - 4 * rows) <= padding


@pytest.mark.parametrize("fully_sharded", [False, True])
def test_gradients_between_groups_are_those_that_were_planned(fully_sharded):
    explained = explain_tables(
        TABLES,
        ranks=4,
        planning=PlanningSpec(
            topology=Topology(
                hosts=1,
                ranks_per_host=4,
                host_tier=LinkTier(name="nvlink", gbytes_per_s=400, latency_us=1),
            ),
            loads=tuple(LOADS.values()),
            batch_per_rank=BATCH,
            table_replicate=4,
            fully_sharded=fully_sharded,
            wire_dtype="bf16",
            replicas="gradients",
        ),
    )
    plan = explained.plan
    ran = dry_run(
        TABLES, (), plan, OptimizerSpec(), LOADS,
        batch_per_rank=BATCH, wire_dtype="bf16", replicas="gradients",
    )  # fmt: skip
    mean = {each.name: each.rank_bytes for each in explained.solution.step.exchanges}
    # How many rows will have gradients is told in the forward pass.
    counts, *reads = ran.forward_bytes["table_replicate", "all_gather"]
    assert bool(reads) == fully_sharded
    *gathers, ids, grads = ran.backward_bytes["table_replicate", "all_gather"]
    # Each rank passes on what three ranks have.
    planned_bytes = mean["gradients between groups"] / 3
    assert counts + ids + grads == pytest.approx(planned_bytes, rel=0.05)
    assert ids * 64 * 2 == grads * 8
    # Groups stay equal without a mean.
    assert ran.backward_bytes.keys() == {("table_replicate", "all_gather")}
    assert bool(gathers) == fully_sharded
    gathered = mean.get("gather weights and optimizer rows to update", 0)
    assert sum(gathers) == pytest.approx(gathered / 3, rel=0.01)


def test_refuses():
    plan = place_tables(TABLES, KINDS, table_shard=4)
    measured = {"rows_a": TableLoad(feature_name="rows_a", unique_fraction=0.5)}
    check_refuses(
        [
            (
                lambda: dry_run(TABLES, (), plan, OptimizerSpec(), measured, batch_per_rank=1),
                UnsupportedError,
                "unique_fraction=0.5",
            )
        ]
    )

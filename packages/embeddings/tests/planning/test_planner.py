"""What the planner decides: whole tables, memory held, the same answer whatever the order."""

import itertools
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_embeddings.contract import LookupSpec, OptimizerSpec, TableLoad, TableSpec
from gem_embeddings.plan import explain_tables, place_tables, plan_tables
from gem_embeddings.planning.links import group_links
from gem_embeddings.planning.spec import PlanningSpec, TableFamily, TableRates
from gem_embeddings.planning.traffic import expected_unique
from gem_opkit.errors import ConfigError, UnsupportedError
from gem_opkit.testing import check_refuses
from gem_parallel.contract import LinkTier, Topology

GIB = 1 << 30
KINDS = ("replicated", "table_wise", "row_wise", "column_wise", "table_row_wise", "grid")
NVLINK = LinkTier(name="nvlink", gbytes_per_s=400, latency_us=0)
ZONE = LinkTier(name="zone", gbytes_per_s=40, latency_us=0)
CLUSTER = LinkTier(name="cluster", gbytes_per_s=10, latency_us=0)


def machines(hosts, ranks_per_host=8):
    return Topology(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        hosts_per_zone=4,
        host_tier=NVLINK,
        zone_tier=ZONE,
        cluster_tier=CLUSTER,
    )


def test_far_copies_leave_a_group_its_near_links():
    """Sixteen hosts of eight in zones of four: groups of 32 fill a zone, or are spread over all."""
    sizes = {"ranks": 128, "table_shard": 32, "table_replicate": 4}
    near, far = (group_links(machines(16), **sizes, copies=copies) for copies in ("near", "far"))
    assert [near.shares[tier.name] for tier in (NVLINK, ZONE, CLUSTER)] == [1 / 32, 6 / 32, 24 / 32]
    assert [far.shares[tier.name] for tier in (NVLINK, ZONE, CLUSTER)] == [7 / 32, 24 / 32, 0]
    assert (near.host_ranks, far.host_ranks) == (2, 8)
    assert (near.replica_tier, far.replica_tier) == (NVLINK, CLUSTER)
    assert (near.spread_tier, far.spread_tier) == (CLUSTER, ZONE)
    assert far.ms_per_byte() < near.ms_per_byte()
    with pytest.raises(ConfigError, match=r"table_shard must divide ranks_per_host=8 or .* got 12"):
        group_links(machines(3), ranks=24, table_shard=12, table_replicate=2, copies="far")


def table(name, rows, columns=32, **options):
    options = {"feature_names": (f"{name}_ids",), **options}
    return TableSpec(name=name, embedding_dim=columns, num_embeddings=rows, **options)


def load(name, ids, **options):
    return TableLoad(feature_name=f"{name}_ids", ids_per_example=ids, **options)


@st.composite
def planning_cases(draw):
    count = draw(st.integers(1, 6))
    tables = [
        table(
            f"t{index}",
            draw(st.integers(1, 3000)),
            draw(st.sampled_from([1, 3, 16, 64])),
            row_dtype=draw(st.sampled_from(["fp32", "fp16"])),
        )
        for index in range(count)
    ]
    loads = tuple(load(t.name, draw(st.sampled_from([0, 1, 7])), zipf_exponent=1.0) for t in tables)
    planning = PlanningSpec(
        topology=machines(draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))),
        loads=loads,
        batch_per_rank=draw(st.sampled_from([1, 64])),
        memory_gib=draw(st.sampled_from([None, 1e-4, 5e-4])),
        fully_sharded=draw(st.sampled_from([None, True, False])),
        allowed={
            t.name: tuple(draw(st.sets(st.sampled_from(KINDS), min_size=1)))
            for t in tables
            if draw(st.booleans())
        },
    )
    kind = draw(st.sampled_from(["rowwise_adagrad", "adam", "sgd"]))
    return tables, planning, OptimizerSpec(kind=kind), draw(st.permutations(tables))


@settings(max_examples=60)
@given(planning_cases())
def test_a_plan_is_whole_fits_and_ignores_the_order_of_tables(case):
    tables, planning, optimizer, shuffled = case
    try:
        plan = plan_tables(tables, optimizer=optimizer, planning=planning)
    except ConfigError as error:
        # The same tables are refused in any order, by name and with the bytes.
        with pytest.raises(ConfigError, match=re.escape(str(error))):
            plan_tables(shuffled, optimizer=optimizer, planning=planning)
        assert re.search(r"table t\d must fit .*; got \d+ bytes", str(error))
        return
    held = np.zeros(plan.table_shard)
    copies = plan.table_replicate if plan.fully_sharded else 1
    for spec, placed in zip(tables, plan.placements, strict=True):
        assert placed.sharding in planning.allowed.get(spec.name, KINDS)
        count = np.zeros((spec.num_embeddings, spec.embedding_dim), dtype=int)
        width = 4 if spec.row_dtype == "fp32" else 2
        if placed.sharding == "replicated":
            count += 1
            rows, columns = count.shape
            state = {"rowwise_adagrad": rows, "adam": 2 * rows * columns, "sgd": 0}
            held += (width * rows * columns + 4 * state[optimizer.kind]) / copies
        for part in placed.shards:
            count[part.row_start : part.row_end, part.column_start : part.column_end] += 1
            state = {
                "rowwise_adagrad": part.rows * (part.columns > 0),
                "adam": 2 * part.rows * part.columns,
                "sgd": 0,
            }
            mine = width * part.rows * part.columns + 4 * state[optimizer.kind]
            held[part.rank] += mine / copies
        assert (count == 1).all()
    if planning.memory_gib is not None:
        assert held.max() <= planning.memory_gib * GIB
    # Bytes are rounded up where a copy keeps a part of them.
    assert np.all(np.abs(held - plan.group_rank_bytes()) <= len(tables))
    again = plan_tables(shuffled, optimizer=optimizer, planning=planning)
    assert again.model_copy(update={"placements": ()}) == plan.model_copy(update={"placements": ()})
    by_name = {placed.table_name: placed for placed in again.placements}
    assert all(by_name[placed.table_name] == placed for placed in plan.placements)


@pytest.mark.parametrize(
    ("draws", "rows"),
    [
        ([(500, 1.05)], 1000),
        ([(30_000, 0.8)], 100_000),
        ([(1000, 0.0)], 700),
        ([(5, 1.2)], 3),
        ([(300, 1.2), (2000, 0.5)], 5000),
        ([(0, 1.0)], 10),
        ([(7, 1.0)], 1),
    ],
)
def test_different_rows_are_those_of_the_sum_over_all_rows(draws, rows):
    missed = np.ones(rows)
    for ids, exponent in draws:
        share = np.arange(1, rows + 1) ** -exponent
        missed *= (1 - share / share.sum()) ** ids
    assert expected_unique(draws, rows) == pytest.approx((1 - missed).sum(), rel=0.01)


def test_bytes_and_memory_of_a_small_plan_by_hand():
    # Four ranks on two hosts; 8 ids an example, 2 examples, half of the ids different.
    planning = PlanningSpec(
        topology=machines(2, 2),
        loads=(load("item", 8, unique_fraction=0.5),),
        batch_per_rank=2,
        table_shard=4,
        wire_dtype="fp16",
        allowed={"item": ("row_wise",)},
    )
    explained = explain_tables([table("item", 1000, 16)], planning=planning)
    step = explained.solution.step
    sent = {exchange.name: exchange for exchange in step.exchanges}
    # A rank asks for 8 rows, of which each rank holds a quarter; all ranks do.
    assert sent["ids"].rank_bytes == 8 * 8
    assert sent["vectors"].rank_bytes == sent["gradients"].rank_bytes == 8 * 16 * 2
    # To each rank a flag and the count of its shard.
    assert sent["counts"].rank_bytes == 4 * (8 + 8)
    # A quarter stays, a quarter goes to the neighbour, a half to the other host.
    assert sent["vectors"].tier_bytes == {"nvlink": 64, "zone": 128}
    assert sent["vectors"].ms >= 128 / 40e6
    assert step.held_bytes == (250 * (16 * 4 + 4), 250 * (16 * 4 + 4))
    assert step.balance_ms == step.balance_bytes == 1.0


def test_collectives_between_groups_by_hand():
    options = {
        "topology": machines(1, 8),
        "table_shard": 2,
        "table_replicate": 4,
        "allowed": {"item": ("row_wise",)},
    }
    tables = [table("item", 100, 16)]
    plain = explain_tables(tables, planning=PlanningSpec(**options, fully_sharded=False))
    sharded = explain_tables(tables, planning=PlanningSpec(**options, fully_sharded=True))
    weights, both = 50 * 16 * 4, 50 * (16 * 4 + 4)
    sent = {e.name: e.rank_bytes for e in plain.solution.step.exchanges}
    assert sent["average weights and optimizer rows"] == 2 * 0.75 * both
    sent = {e.name: e.rank_bytes for e in sharded.solution.step.exchanges}
    assert sent["gather weights to read"] == 0.75 * weights
    assert sent["gather weights and optimizer rows to update"] == 0.75 * both
    assert sent["scatter their mean"] == 0.75 * both
    assert plain.solution.step.held_bytes[0] == both
    assert sharded.solution.step.held_bytes[0] == both / 4
    assert sharded.solution.step.gathered_bytes[0] == both / 4 + both


@pytest.mark.parametrize("seed", range(4))
def test_whole_tables_are_spread_nearly_as_well_as_can_be(seed):
    # Tables of equal size, so that time alone decides; every arrangement is tried.
    rng = np.random.default_rng(seed)
    tables = [table(f"t{index}", 4000) for index in range(7)]
    loads = tuple(load(t.name, float(rng.integers(1, 40))) for t in tables)
    planning = PlanningSpec(
        topology=machines(1, 3),
        loads=loads,
        table_shard=3,
        allowed={t.name: ("table_wise",) for t in tables},
    )
    explained = explain_tables(tables, planning=planning)
    ms = [line.part_ms for line in explained.lines]
    best = min(
        max(sum(m for m, r in zip(ms, ranks, strict=True) if r == rank) for rank in range(3))
        for ranks in itertools.product(range(3), repeat=7)
    )
    placed = [placement.shards[0].rank for placement in explained.plan.placements]
    found = max(sum(m for m, r in zip(ms, placed, strict=True) if r == rank) for rank in range(3))
    assert found <= 4 / 3 * best
    assert found == pytest.approx(max(explained.solution.loads.ms))


def test_parts_are_swapped_where_the_greedy_order_is_unlucky():
    # By size 3, 3, 2, 2, 2 on two ranks the greedy order ends at 7 and 5; 6 and 6 is there.
    tables = [table(f"t{index}", 1_000_000_000) for index in range(5)]
    planning = PlanningSpec(
        topology=machines(1, 2),
        loads=tuple(load(t.name, n) for t, n in zip(tables, (3, 3, 2, 2, 2), strict=True)),
        table_shard=2,
        allowed={t.name: ("table_wise",) for t in tables},
        rates=TableRates(shard_us=0),
    )
    explained = explain_tables(tables, planning=planning)
    assert explained.solution.step.balance_ms == pytest.approx(1.0, abs=1e-4)


def test_square_sums_travel_where_row_wise_adagrad_needs_other_columns():
    # Of 64 columns over 4 ranks each of 4 pieces tells all 4 its sum of each id that arrived.
    options = {
        "topology": machines(1, 4),
        "loads": (load("item", 8, unique_fraction=0.5),),
        "batch_per_rank": 2,
        "table_shard": 4,
        "allowed": {"item": ("column_wise",)},
    }
    tables = [table("item", 1000, 64)]
    sent = {}
    for kind in ("rowwise_adagrad", "adam"):
        explained = explain_tables(
            tables, optimizer=OptimizerSpec(kind=kind), planning=PlanningSpec(**options)
        )
        sent[kind] = {e.name: e.rank_bytes for e in explained.solution.step.exchanges}
        cuts = len(explained.plan.placements[0].shards)
        assert sent[kind]["ids"] == 8 * 8 * cuts
        assert sent[kind]["vectors"] == 8 * 64 * 4
    assert sent["rowwise_adagrad"]["square sums"] == 8 * 4 * cuts**2
    assert "square sums" not in sent["adam"]


def test_a_plan_costs_the_same_given_as_found():
    tables = [table(f"t{index}", 10 ** (3 + index), 64) for index in range(4)]
    planning = PlanningSpec(
        topology=machines(2),
        loads=tuple(load(t.name, 20, zipf_exponent=1.0) for t in tables),
        table_replicate=2,
        allowed={"t1": ("grid",), "t2": ("column_wise",), "t0": ("replicated",)},
    )
    found = explain_tables(tables, planning=planning)
    given_back = explain_tables(tables[::-1], planning=planning, plan=found.plan)
    assert given_back.solution.step.exchanges == found.solution.step.exchanges
    assert given_back.solution.step.ms == pytest.approx(found.solution.step.ms)
    assert given_back.solution.loads.held_bytes == found.solution.loads.held_bytes
    assert {line.reason for line in given_back.lines} == {"given"}
    worse = place_tables(
        tables, dict.fromkeys(["t0", "t1", "t2", "t3"], "table_wise"),
        table_shard=8, table_replicate=2, host_ranks=4,
    )  # fmt: skip
    assert explain_tables(tables, planning=planning, plan=worse).solution.step.ms > (
        found.solution.step.ms
    )
    with pytest.raises(ConfigError, match="must place the tables t0; got t0, t1, t2, t3"):
        explain_tables(tables[:1], planning=PlanningSpec(topology=machines(2)), plan=worse)


def test_a_large_table_is_cut_and_a_rare_one_is_not():
    tables = [table("giant", 50_000_000, 64), table("rare", 1000)]
    planning = PlanningSpec(
        topology=machines(2), loads=(load("giant", 50), load("rare", 0.01)), memory_gib=2
    )
    explained = explain_tables(tables, planning=planning)
    giant, rare = explained.plan.placements
    assert len(giant.shards) >= 8
    assert rare.sharding == "table_wise"
    # Whole, it would hold 50e6 rows of 64 fp32 and an accumulator on one rank.
    assert explained.lines[0].reason == "table_wise would hold 12.11 GiB on a rank" or re.search(
        r"would take [\d.]+ ms of a rank; mean [\d.]+", explained.lines[0].reason
    )
    assert explained.lines[1].reason.startswith("least time; ")


def test_copies_are_cut_only_where_memory_asks():
    # 64 MiB of weights and 4 of state over two ranks of a group: 34 MiB each.
    options = {"topology": machines(1), "table_shard": 2, "table_replicate": 4}
    tables = [table("item", 1 << 20, 16)]
    roomy = plan_tables(tables, planning=PlanningSpec(**options, memory_gib=35 / 1024))
    tight = plan_tables(tables, planning=PlanningSpec(**options, memory_gib=33 / 1024))
    assert not roomy.fully_sharded
    assert tight.fully_sharded
    assert tight.rank_bytes == 17 << 19
    with pytest.raises(ConfigError, match="gathered_gib"):
        plan_tables(
            tables,
            planning=PlanningSpec(**options, memory_gib=33 / 1024, gathered_gib=34 / 1024),
        )


def test_without_planning_every_table_is_replicated():
    plan = plan_tables([table("item", 10), table("user", 10)], ranks=4)
    assert (plan.table_shard, plan.table_replicate) == (4, 1)
    assert [placed.sharding for placed in plan.placements] == ["replicated"] * 2


def test_torchrec_vectors_are_pooled_where_rows_lie():
    # 40 ids an example: pooled, a vector an example comes back in place of one a row.
    options = {
        "topology": machines(1, 4),
        "loads": (load("item", 40),),
        "batch_per_rank": 10,
        "allowed": {"item": ("table_wise",)},
        "table_shard": 4,
    }
    tables = [table("item", 10_000_000)]
    sent = {
        engine: {
            e.name: e.rank_bytes
            for e in explain_tables(
                tables, planning=PlanningSpec(**options, engine=engine)
            ).solution.step.exchanges
        }
        for engine in ("torch", "torchrec")
    }
    assert sent["torchrec"]["vectors"] == 10 * 32 * 4
    assert sent["torch"]["vectors"] == pytest.approx(400 * 32 * 4, rel=1e-3)
    assert sent["torchrec"]["ids"] == 400 * 8


def test_a_plan_for_torchrec_holds_what_that_engine_has():
    tables = [
        table("bag", 10_000_000, 64),
        table("history", 10_000_000, 64, pooling="none"),
        table("tiny", 3),
    ]
    kinds = {
        kind: plan_tables(
            tables,
            optimizer=OptimizerSpec(kind=kind),
            planning=PlanningSpec(topology=machines(2), engine="torchrec", batch_per_rank=64),
        ).placements
        for kind in ("rowwise_adagrad", "adagrad")
    }
    for placements in kinds.values():
        assert placements[1].sharding not in ("table_row_wise", "grid")
        assert all(placed.sharding != "replicated" for placed in placements)
    assert {p.sharding for p in kinds["rowwise_adagrad"]} <= {
        "table_wise", "row_wise", "table_row_wise",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "dtype", "reason"),
    [(6, "fp32", "for rows of 6, no multiple of 4"), (64, "bf16", "for bf16 rows")],
)
def test_rows_that_torchrec_does_not_hold_are_not_planned_for_it(columns, dtype, reason):
    tables = [table("item", 100, columns, row_dtype=dtype)]
    planning = PlanningSpec(engine="torchrec", table_shard=2)
    with pytest.raises(UnsupportedError, match=f"table_wise, which it has not {reason}"):
        plan_tables(tables, ranks=2, planning=planning)
    alone = plan_tables(tables, ranks=1, planning=PlanningSpec(engine="torchrec"))
    assert alone.placements[0].sharding == "replicated"
    # Groups of two ranks have no kind for it, so each rank is a group.
    planning = PlanningSpec(engine="torchrec", topology=machines(1, 2))
    pair = plan_tables(tables, ranks=2, planning=planning)
    assert (pair.table_shard, pair.table_replicate) == (1, 2)
    assert pair.placements[0].sharding == "replicated"
    # That group would run but is too small: its memory is what is told.
    short = planning.model_copy(update={"memory_gib": 1e-6})
    with pytest.raises(ConfigError, match=r"table item must fit .* table_shard=1, table_rep"):
        plan_tables(tables, ranks=2, planning=short)


def test_4096_gpus_are_planned_in_seconds():
    family = TableFamily(
        name="item",
        tables=60,
        least_rows=1000,
        most_rows=400_000_000,
        embedding_dim=128,
        ids_per_example=10,
        zipf_exponent=1.05,
    )
    tables, loads = zip(*family.expand(), strict=True)
    planning = PlanningSpec(topology=machines(512), loads=loads, memory_gib=40)
    started = time.process_time()
    explained = explain_tables(tables, planning=planning)
    seconds = time.process_time() - started
    # About 2 s on an idle core.
    assert seconds < 20
    assert explained.plan.ranks == 4096
    assert explained.solution.step.balance_ms < 1.2
    assert explained.solution.step.held_bytes[0] <= 40 * GIB


def test_torchrec_has_no_exchange_of_gradients_between_groups():
    with pytest.raises(ValueError, match='replicas must be "weights" with engine "torchrec" and'):
        PlanningSpec(engine="torchrec", replicas="gradients")
    # Of one group there is nothing to exchange.
    PlanningSpec(engine="torchrec", replicas="gradients", table_replicate=1)


def test_refuses():
    tables = [table("item", 1000, 16), table("user", 10, 16)]
    # 1000 rows of 16 fp32 and an accumulator: 68,000 bytes; 2^20 / 2^10 bytes are allowed.
    tiny = PlanningSpec(memory_gib=2**-20, allowed={"item": ("table_wise",)})
    check_refuses(
        [
            (
                lambda: plan_tables(tables[:1], ranks=2, planning=tiny),
                ConfigError,
                f"table item must fit .* got {68_000 - 1024} bytes",
            ),
            (
                lambda: plan_tables(
                    tables, ranks=4, planning=PlanningSpec(table_shard=3, table_replicate=2)
                ),
                ConfigError,
                "got ranks=4, table_shard=3, table_replicate=2",
            ),
            (
                lambda: plan_tables(tables, ranks=4, planning=PlanningSpec(table_shard=3)),
                ConfigError,
                "got ranks=4, table_shard=3, table_replicate=None",
            ),
            (
                lambda: plan_tables(
                    tables, planning=PlanningSpec(topology=machines(3), table_replicate=3)
                ),
                ConfigError,
                "divide ranks_per_host=8 or be a multiple of it",
            ),
            (
                lambda: plan_tables(tables, ranks=16, planning=PlanningSpec(topology=machines(1))),
                ConfigError,
                r"got ranks=16, 1 \* 8 = 8 and",
            ),
            (
                lambda: plan_tables(tables, planning=PlanningSpec(allowed={"nobody": KINDS})),
                ConfigError,
                "allowed must name tables that are there; got nobody",
            ),
            (
                lambda: plan_tables(tables, planning=PlanningSpec(loads=(load("nobody", 1),))),
                ConfigError,
                "loads must name features that are there; got nobody_ids",
            ),
            (
                lambda: plan_tables(
                    tables,
                    [LookupSpec(feature_name="x", table_name="nobody")],
                    planning=PlanningSpec(),
                ),
                ConfigError,
                "lookups must name tables that are there; got nobody",
            ),
            (
                lambda: plan_tables([tables[0], tables[0]], planning=PlanningSpec()),
                ConfigError,
                "tables must have different names; got item",
            ),
            (
                lambda: plan_tables(
                    [table("item", 10, pooling="none")],
                    ranks=4,
                    planning=PlanningSpec(engine="torchrec", allowed={"item": ("grid",)}),
                ),
                UnsupportedError,
                'grid, which it has not under row-wise AdaGrad; .* or use engine="torch"',
            ),
        ]
    )

"""Forecasts of a model of two layers against numbers added up by hand."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import DEVICE, RATES, machines, work

from gem_opkit.cost import Cost
from gem_opkit.errors import ConfigError
from gem_parallel.contract import ParallelPlan
from gem_parallel.planning.forecast import forecast
from gem_parallel.planning.memory import held_elements, memory
from gem_parallel.planning.planner import dense_plans, divisors, search, table_plans
from gem_parallel.planning.rates import PassShare
from gem_parallel.planning.timeline import Queues, Segment, Transfer, end, run
from gem_parallel.planning.traffic import dense_traffic
from gem_parallel.planning.work import Expert, Operator, TableStep, TableTraffic, Unit, Work
from gem_parallel.topology import PRESETS

WEIGHT, BIAS = 10**6, 10
SHARDED = ParallelPlan(shard=4, table_shard=4)


def totals(found):
    sums = {}
    for each in found:
        key = (each.axis, each.collective)
        sums[key] = sums.get(key, 0) + each.given_bytes
    return sums


def test_one_rank_waits_for_nothing():
    found = forecast(work(), ParallelPlan(), machines(), rates=RATES)
    # Two layers of 1 + 2 ms; 8 passes, one of them for the norm, over 2 million parameters of 4
    # bytes at 1 GB/s.
    assert found.parts_ms["compute"] == pytest.approx(6.0)
    assert found.parts_ms["optimizer"] == pytest.approx(8 * 4 * 2 * (WEIGHT + BIAS) / 1e6)
    assert found.exposed_ms == 0
    assert found.exchanged == ()
    assert found.step_ms == pytest.approx(sum(found.parts_ms.values()))
    # 6e9 FLOPs at a peak of 2e12: 3 ms of 6.
    assert found.local_mfu == pytest.approx(0.5)
    assert found.e2e_mfu == pytest.approx(3.0 / found.step_ms)


def test_roofline_takes_the_larger_of_flops_and_bytes():
    slow = Operator("matmul", Cost(10**9, 3 * 10**6), Cost(10**9, 0))
    unit = Unit(name="layer", parameters=(), operators=(slow,))
    half = RATES.model_copy(update={"shares": {"matmul": PassShare(forward=0.5, backward=1.0)}})
    found = forecast(Work("one", (unit,), 1, 0.0), ParallelPlan(), machines(), rates=half)
    assert found.parts_ms["compute"] == pytest.approx(3.0 / 0.5 + 1.0)


def test_copies_reduce_everything_once():
    found = dense_traffic(work(), ParallelPlan.data_parallel(4))
    assert totals(found) == {("world", "all_reduce"): 4 * 2 * (WEIGHT + BIAS)}


def test_shards_gather_twice_and_scatter_once():
    assert totals(dense_traffic(work(), SHARDED)) == {
        ("shard_expert", "all_gather"): 2 * 2 * WEIGHT,  # a quarter of 4 bytes, twice, two layers
        ("shard_expert", "reduce_scatter"): 2 * 4 * WEIGHT,
        ("world", "all_reduce"): 2 * 4 * BIAS,
    }


def test_replicas_of_shards_reduce_the_shard_alone():
    plan = ParallelPlan(replicate=2, shard=2, table_shard=4)
    found = totals(dense_traffic(work(), plan))
    assert found["replicate", "all_reduce"] == 2 * 4 * WEIGHT // 2


def test_rows_that_do_not_divide_are_padded():
    # 10 rows over 4 ranks: three each, two of them empty.
    found = totals(dense_traffic(work(rows=10, columns=10**5), SHARDED))
    assert found["shard_expert", "reduce_scatter"] == 2 * 4 * 12 * 10**5


def test_experts_travel_as_activations():
    plan = ParallelPlan(shard=2, expert=2, table_shard=4)
    found = totals(dense_traffic(work(experts=2), plan))
    assert found["expert", "all_to_all"] == 2 * (2 * 400 + 2 * 400)  # inputs, then gradients
    assert found["expert", "reduce_scatter"] == 2 * 2 * 400
    assert found["expert", "all_gather"] == 2 * 400
    # Its own expert is cut over the shard axis; what all share, over both.
    assert found["shard", "reduce_scatter"] == 2 * 4 * WEIGHT
    assert found["shard_expert", "reduce_scatter"] == 2 * 4 * WEIGHT


def test_own_expert_sees_the_examples_of_all():
    alone = forecast(work(experts=2), ParallelPlan(), machines(), rates=RATES)
    plan = ParallelPlan(expert=2, table_shard=2)
    both = forecast(work(experts=2), plan, machines(ranks_per_host=2), rates=RATES)
    assert both.parts_ms["compute"] == pytest.approx(alone.parts_ms["compute"])


@given(
    st.sampled_from([(8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 8, 1), (1, 4, 2), (4, 1, 2)]),
    st.integers(1, 3000),
    st.sampled_from([0, 2]),
)
def test_all_plans_reduce_every_gradient(axes, rows, experts):
    # Whatever the plan, each rank's gradients of large parameters meet those of all others: bytes
    # given to the first reduction are those of what the rank computes gradients of.
    replicate, shard, expert = axes
    if expert > 1 and not experts:
        return
    plan = ParallelPlan(replicate=replicate, shard=shard, expert=expert, table_shard=8)
    model = work(rows=rows, columns=10**5, experts=experts)
    first = [
        each
        for each in dense_traffic(model, plan)
        if each.what == "gradients" and each.collective == "reduce_scatter"
    ]
    given_bytes = sum(each.given_bytes for each in first)
    ways = shard * expert

    def padded(parts):
        return 4 * parts * -(-rows // parts) * 10**5

    own = experts // expert
    dealt = shard if expert > 1 else ways
    wanted = 2 * (padded(ways) * (ways > 1) + own * padded(dealt) * (dealt > 1))
    assert given_bytes == wanted


def test_memory_of_two_layers():
    model = work(kept_bytes=1000)
    found = memory(model, SHARDED, TableStep(held_bytes=77, gathered_bytes=5, buffer_bytes=6))
    held = 2 * (WEIGHT // 4 + BIAS)
    # While the last layer runs backward: its gradients alone, but all that is kept.
    assert found.parameters == found.all_gradients == 4 * held
    assert found.gradients == 4 * held // 2
    assert found.optimizer == 8 * held
    # Two layers whole at once, and the gradients of one.
    assert found.gathered == 4 * 3 * WEIGHT
    assert found.activations == 2000
    assert (found.tables, found.table_buffers) == (77, 11)
    assert found.copies == 0
    assert found.total == 14 * held + 12 * WEIGHT + 2000 + 77
    # Copies are merged bucket by bucket, and the buckets stay.
    copies = memory(model, ParallelPlan.data_parallel(2), TableStep())
    assert copies.gradients == copies.parameters == 4 * 2 * (WEIGHT + BIAS)
    # Rows in motion take the place of activations, not more beside them.
    much = memory(model, SHARDED, TableStep(held_bytes=77, gathered_bytes=10**9))
    assert much.total == 16 * held + 10**9 + 77


def test_half_precision_keeps_copies_of_weights():
    half = Work("half", work().units, 4, 4.0, compute_bytes=2)
    assert memory(half, SHARDED, TableStep()).copies == 2 * 2 * (WEIGHT + BIAS)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]))
def test_more_ways_to_cut_never_hold_more(shard, expert):
    model = work(experts=2)
    plan = ParallelPlan(shard=shard, expert=expert, table_shard=shard * expert)
    finer = ParallelPlan(shard=2 * shard, expert=expert, table_shard=2 * shard * expert)
    assert held_elements(model, finer) <= held_elements(model, plan)


def test_what_does_not_fit_is_told():
    huge = work(kept_bytes=2**30)
    found = forecast(huge, ParallelPlan(), machines(), rates=RATES)
    assert not found.fits
    assert forecast(work(), ParallelPlan(), machines(), rates=RATES).fits


def test_slowest_rank_has_the_longest_histories():
    uneven = Work("uneven", work().units, 4, 4.0, spread=0.1)
    found = forecast(uneven, ParallelPlan.data_parallel(4), machines(ranks_per_host=4), rates=RATES)
    # 6 ms, and 10 % of it times the square root of 2 ln 4.
    assert found.parts_ms["imbalance"] == pytest.approx(0.6 * (2 * 1.3862944) ** 0.5)


def test_tables_are_added_with_their_exchange():
    tables = TableStep(
        local_ms=2.0,
        traffic=(
            TableTraffic("vectors", "table_shard", "all_to_all", 4e6),
            TableTraffic("ids", "table_shard", "all_to_all", 4e6, beside="model"),
            TableTraffic("weights", "table_shard", "all_gather", 1.0, ms=5.0),
        ),
    )
    topology = machines(ranks_per_host=4)
    found = forecast(work(), SHARDED, topology, tables=tables, rates=RATES)
    assert found.parts_ms["tables"] == 2.0
    # Two layers of a million elements: out of the gathers twice, into the reductions once.
    assert found.parts_ms["weight copies"] == pytest.approx(2 * 3 * 2 * 4 * WEIGHT / 1e6)
    # Three quarters of 4 MB at 10 GB/s; what is hidden counts nothing.
    assert found.parts_ms["exposed tables"] == pytest.approx(0.3 + 5.0)


def test_tables_travel_beside_the_optimizer_and_the_norms():
    def step(*, vectors_ms, gradients_ms):
        return TableStep(
            traffic=(
                TableTraffic("ids", "table_shard", "all_to_all", 1, ms=1.0, beside="optimizer"),
                TableTraffic(
                    "vectors", "table_shard", "all_to_all", 1, ms=vectors_ms, beside="optimizer"
                ),
                TableTraffic(
                    "gradients", "table_shard", "all_to_all", 1, ms=gradients_ms, beside="norms"
                ),
            )
        )

    plan, topology = ParallelPlan.data_parallel(2), machines(ranks_per_host=2)
    plan = plan.model_copy(update={"table_shard": 2, "table_replicate": 1})
    # Two million elements of 4 bytes at 1 GB/s: the norm reads them once, the optimizer takes seven
    # passes. Ids and vectors go one after the other beside these.
    norms, adam = (passes * 4 * 2 * (WEIGHT + BIAS) / 1e6 for passes in (1, 7))
    rates = RATES.model_copy(update={"contention": 0.5, "adapter_contention": 7.0})
    dense = forecast(work(), plan, topology, rates=rates).parts_ms
    for vectors_ms, gradients_ms in ((adam - 1, norms), (adam + 2, norms + 3), (0.0, 0.0)):
        tables = step(vectors_ms=vectors_ms, gradients_ms=gradients_ms)
        found = forecast(work(), plan, topology, tables=tables, rates=rates)
        over = max(0.0, vectors_ms + 1 - adam) + max(0.0, gradients_ms - norms)
        assert found.parts_ms["exposed tables"] == pytest.approx(over)
        hidden = 1 + vectors_ms + gradients_ms - over
        contention = found.parts_ms["contention"] - dense["contention"]
        assert contention == pytest.approx(0.5 * hidden)
        # The bytes are told all the same.
        assert len([each for each in found.exchanged if each.part == "tables"]) == 3


def test_collectives_between_hosts_slow_compute_by_their_own_rate():
    plan = ParallelPlan.data_parallel(2)
    for far, topology, slowed in (
        (0.25, machines(1, 2), 0.5),
        (0.25, machines(2, 1, 2), 0.25),
        (None, machines(2, 1, 2), 0.5),
    ):
        rates = RATES.model_copy(update={"contention": 0.5, "adapter_contention": far})
        found = forecast(work(flops=10**11), plan, topology, rates=rates)
        alone = sum(each.ms for each in found.exchanged)
        hidden = alone - found.parts_ms["exposed dense"]
        assert hidden > 0
        assert found.parts_ms["contention"] == pytest.approx(slowed * hidden)


def test_experts_beside_their_streams_exchange_meanwhile():
    plan, topology = ParallelPlan(expert=2, table_shard=2), machines(ranks_per_host=2)

    def parts(flops, input_bytes, beside):
        """A layer of ``flops`` forward and twice that backward, and its experts, of one matrix."""
        operators = (Operator("matmul", Cost(flops, 0), Cost(2 * flops, 0)),)
        experts = tuple(
            Expert(parameters=(), operators=operators, kept_bytes=0, input_bytes=input_bytes)
            for _ in range(2)
        )
        layer = Unit(name="layer", parameters=(), operators=operators)
        mixture = Unit(
            name="experts",
            parameters=(),
            operators=(),
            experts=experts,
            output_bytes=0,
            beside=beside,
        )
        model = Work("one layer", (layer, mixture), 4, 4.0)
        return forecast(model, plan, topology, rates=RATES).parts_ms

    # Inputs of two experts, half of them for the other rank, at 10 GB/s: 1 ms forward, and the
    # gradients likewise backward. Nothing else travels.
    bytes_ = 10**7
    for flops, exposed in ((10**10, 0.0), (10**8, 0.9 + 0.8)):
        behind, beside = (parts(flops, bytes_, name) for name in (None, "layer"))
        assert behind["exposed dense"] == pytest.approx(2.0)
        # All of it within 10 and 20 ms of streams; 0.1 and 0.2 of it within those of small ones.
        assert beside["exposed dense"] == pytest.approx(exposed)
        assert beside["compute"] == pytest.approx(behind["compute"])
    # A name of no unit before it changes nothing.
    assert parts(10**10, bytes_, "another") == parts(10**10, bytes_, None)


def test_gathers_in_bf16_move_half_and_leave_nothing_to_cast():
    half = SHARDED.model_copy(update={"gather_dtype": "bf16"})
    narrow = replace(work(), compute_bytes=2)
    wide, found = (dense_traffic(narrow, plan) for plan in (SHARDED, half))
    assert (
        totals(found)["shard_expert", "all_gather"] * 2
        == (totals(wide)["shard_expert", "all_gather"])
    )
    for axis, collective in (("shard_expert", "reduce_scatter"), ("world", "all_reduce")):
        assert totals(found)[axis, collective] == totals(wide)[axis, collective]
    topology = machines(ranks_per_host=4)
    # Two layers. In fp32: copies as above, and 6 bytes an element cast, forward and backward. In
    # bf16: 4 bytes out of each gather and 6 into the reduction. Biases are whole and have copies:
    # their gradients alone are cast.
    casts = 2 * 6 * BIAS
    before = 2 * 24 * WEIGHT + 2 * 2 * 6 * WEIGHT + casts
    after = 2 * (4 + 4 + 6) * WEIGHT + casts
    for plan, moved in ((SHARDED, before), (half, after)):
        spent = forecast(narrow, plan, topology, rates=RATES).parts_ms["weight copies"]
        assert spent == pytest.approx(moved / 1e6)
    # Whole weights and the gradients of one, narrow where they were gathered so; no copies.
    memories = [memory(narrow, plan, TableStep()) for plan in (SHARDED, half)]
    assert [m.gathered for m in memories] == [4 * 3 * WEIGHT, (2 * 2 + 4) * WEIGHT]
    assert [m.copies for m in memories] == [2 * 2 * (WEIGHT + BIAS), 2 * 2 * BIAS]


def test_what_is_kept_is_gathered_and_copied_once():
    kept = SHARDED.model_copy(update={"keep_gathered": True})
    once, twice = (totals(dense_traffic(work(), plan)) for plan in (kept, SHARDED))
    assert once.pop(("shard_expert", "all_gather")) * 2 == twice.pop(("shard_expert", "all_gather"))
    assert once == twice
    topology = machines(ranks_per_host=4)
    found = forecast(work(), kept, topology, rates=RATES)
    # Two layers: out of the gather once, into the reduction once; all layers whole in the end.
    assert found.parts_ms["weight copies"] == pytest.approx(2 * 2 * 2 * 4 * WEIGHT / 1e6)
    three = replace(work(), units=(*work().units, replace(work().units[0], name="layers.2")))
    gathered = [memory(three, plan, TableStep()).gathered for plan in (SHARDED, kept)]
    assert gathered == [4 * (2 + 1) * WEIGHT, 4 * (3 + 1) * WEIGHT]


def test_one_rank_works_on_narrow_copies_that_its_optimizer_writes():
    narrow = replace(work(), compute_bytes=2)
    found = forecast(narrow, ParallelPlan(), machines(), rates=RATES)
    assert found.parts_ms["weight copies"] == 0
    # Weight and two moments read and written, a narrow gradient read twice, its copy written.
    elements = 2 * (WEIGHT + BIAS)
    assert found.parts_ms["optimizer"] == pytest.approx((6 * 4 + 2 * 2 + 2) * elements / 1e6)
    assert found.memory.all_gradients == 2 * elements
    # In several parts gradients are added up, so that weights are cast in each of them.
    parts = forecast(replace(narrow, micro_batches=2), ParallelPlan(), machines(), rates=RATES)
    assert parts.parts_ms["weight copies"] > 0
    assert parts.memory.all_gradients == 4 * elements


def test_copies_on_several_ranks_are_written_by_the_optimizer_too():
    narrow, topology = replace(work(), compute_bytes=2), machines(ranks_per_host=2)
    elements = 2 * (WEIGHT + BIAS)
    plan = ParallelPlan.data_parallel(2)
    found = forecast(narrow, plan, topology, rates=RATES)
    # Gradients are widened into what is reduced; nothing else is cast.
    assert found.parts_ms["weight copies"] == pytest.approx(6 * elements / 1e6)
    # Weight and two moments read and written, a wide gradient read twice, the copy written.
    assert found.parts_ms["optimizer"] == pytest.approx((6 * 4 + 2 * 4 + 2) * elements / 1e6)
    assert found.memory.all_gradients == 4 * elements
    assert found.memory.copies == 2 * elements


def test_gradients_of_own_experts_stay_narrow():
    wide, narrow = work(experts=2), replace(work(experts=2), compute_bytes=2)
    own = sum(p.elements for unit in wide.units for p in unit.experts[0].parameters)
    for plan, saved in (
        (ParallelPlan(expert=2, table_shard=2), 2 * own),
        # A second set of ranks has the same experts: gradients are merged in full width.
        (ParallelPlan(replicate=2, expert=2, table_shard=4), 0),
    ):
        found = [memory(each, plan, TableStep()).all_gradients for each in (wide, narrow)]
        assert found[0] - found[1] == saved


def test_balancing_replaces_the_law_of_independent_examples():
    plan = ParallelPlan.data_parallel(4)
    spread = replace(work(), spread=0.1)
    balanced = replace(spread, slowest=lambda ranks: 1.0 + ranks / 100)
    topology = machines(ranks_per_host=4)
    found = [forecast(each, plan, topology, rates=RATES) for each in (spread, balanced)]
    assert found[0].parts_ms["imbalance"] == pytest.approx(6 * 0.1 * (2 * math.log(4)) ** 0.5)
    assert found[1].parts_ms["imbalance"] == pytest.approx(6 * 0.04)
    alone = forecast(balanced, ParallelPlan(), machines(), rates=RATES)
    assert alone.parts_ms["imbalance"] == 0


def test_gathers_run_ahead_and_reductions_behind():
    gather, reduce = Transfer("host", 3.0), Transfer("host", 4.0)
    queues = Queues()
    run([Segment(5.0, before=[gather]), Segment(5.0, before=[gather])], queues, prefetch=1)
    # The first gather is waited for, the second runs beside the first layer's compute.
    assert queues.compute == pytest.approx(13.0)
    run([Segment(1.0, after=[reduce]), Segment(1.0, after=[reduce])], queues, prefetch=1)
    assert queues.compute == pytest.approx(15.0)
    assert end(queues) == pytest.approx(14.0 + 8.0)


def test_without_prefetch_every_gather_is_waited_for():
    gather = Transfer("host", 3.0)
    queues = Queues()
    run([Segment(5.0, before=[gather])] * 2, queues, prefetch=0)
    assert queues.compute == pytest.approx(16.0)


def test_activations_share_links_with_a_running_gather():
    gather, swap = Transfer("host", 10.0), Transfer("host", 2.0)
    queues = Queues()
    segments = [Segment(1.0, within=[swap]), Segment(1.0, before=[gather])]
    run(segments, queues, prefetch=1)
    # The gather of the second layer begins with the first one's exchange, which then takes twice
    # as long; the gather ends later by what the exchange took.
    assert queues.compute == pytest.approx(max(4.0 + 1.0, 12.0) + 1.0)


def test_hidden_collectives_slow_the_compute_beside_them():
    rates = RATES.model_copy(update={"contention": 0.5})
    plan, topology = ParallelPlan.data_parallel(2), machines(ranks_per_host=2)
    model = work(flops=10**10)
    found = forecast(model, plan, topology, rates=rates)
    alone = sum(each.ms for each in found.exchanged)
    hidden = alone - found.parts_ms["exposed dense"]
    assert hidden > 0
    assert found.parts_ms["contention"] == pytest.approx(0.5 * hidden)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (
            ParallelPlan(shard=1, expert=4, table_shard=4),
            r"divide the 2 experts of layers.0; got replicate=1 \* shard=1 \* expert=4 = 4",
        ),
        (ParallelPlan.data_parallel(2), "world size 4; got 2"),
    ],
)
def test_plans_that_do_not_fit_are_told_with_every_factor(plan, told):
    with pytest.raises(ConfigError, match=told):
        forecast(work(experts=2), plan, machines(ranks_per_host=4), rates=RATES)


def test_experts_without_a_model_of_experts_are_refused():
    plan = ParallelPlan(expert=2, table_shard=2)
    with pytest.raises(ConfigError, match="must be 1 for a model without experts"):
        forecast(work(), plan, machines(ranks_per_host=2), rates=RATES)


def test_machines_without_rates_are_refused():
    bare = machines().model_copy(update={"accelerator": None})
    with pytest.raises(ConfigError, match=r"topology.accelerator must be given"):
        forecast(work(), ParallelPlan(), bare, rates=RATES)


@pytest.mark.parametrize(
    ("part", "update"),
    [
        ("host_tier", {"gbytes_per_s": 1e-308}),
        ("host_tier", {"latency_us": 1e308}),
        ("accelerator", {"matmul_tflops": 1e-300}),
        ("accelerator", {"peak_tflops": 1e308}),
        ("accelerator", {"memory_gbytes_per_s": 5e-324}),
    ],
)
def test_figures_that_give_no_step_time_are_refused(part, update):
    found = machines(1, 4)
    broken = found.model_copy(update={part: getattr(found, part).model_copy(update=update)})
    plan = ParallelPlan(replicate=4, table_shard=4)
    with pytest.raises(ConfigError, match=r"topology must have bandwidths.*check their units"):
        forecast(work(), plan, broken, rates=RATES)


def test_more_ranks_than_can_be_searched_are_refused_at_once():
    huge = machines(1, 10**6)
    with pytest.raises(
        ConfigError, match=r"at most 16384 ranks.*hosts=1 \* ranks_per_host=1000000"
    ):
        search(work(), huge, tables=lambda *_: TableStep(), rates=RATES)
    with pytest.raises(ConfigError, match=r"most must be at least 1; got 0"):
        search(work(), machines(), tables=lambda *_: TableStep(), rates=RATES, most=0)


def test_work_without_a_rate_is_refused():
    rates = RATES.model_copy(update={"shares": {}})
    with pytest.raises(ConfigError, match="must name the kind of work 'matmul'"):
        forecast(work(), ParallelPlan(), machines(), rates=rates)


@pytest.mark.parametrize("number", [1, 2, 12, 97, 4096])
def test_divisors(number):
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_every_dense_plan_is_tried_once():
    plans = list(dense_plans(work(experts=2), 8))
    keys = {(p.replicate, p.shard, p.expert) for p in plans}
    wanted = {(r, s, e) for r in range(1, 9) for s in range(1, 9) for e in (1, 2) if r * s * e == 8}
    assert keys == wanted
    assert len(plans) == len(keys)


def test_table_plans_keep_copies_on_hosts_or_groups_in_zones():
    plans = list(table_plans(machines(hosts=4, ranks_per_host=4, hosts_per_zone=2)))
    found = {
        (p.table_shard, p.table_replicate, p.table_copies, p.fully_sharded_tables) for p in plans
    }
    both = (False, True)
    assert len(found) == len(plans)
    assert found == {
        (16, 1, "near", False),
        *((16 // n, n, "near", fully) for n in (2, 4, 8, 16) for fully in both),
        # Groups that divide a host, or fill hosts of one zone.
        *((n, 16 // n, "far", fully) for n in (2, 4, 8) for fully in both),
    }
    on_one_host = list(table_plans(machines(ranks_per_host=4)))
    assert {p.table_copies for p in on_one_host} == {"near"}


def no_tables(plan, topology):
    return TableStep()


def test_best_plan_is_the_fastest_of_all_that_were_forecast():
    topology = machines(ranks_per_host=8)
    model = work(experts=2, flops=10**10)
    found = search(model, topology, tables=no_tables, rates=RATES, most=100)
    every = [forecast(model, plan, topology, rates=RATES) for plan in dense_plans(model, 8)]
    fitting = [one.step_ms for one in every if one.fits]
    assert found.best[0].forecast.step_ms == pytest.approx(min(fitting))
    times = [ranked.forecast.step_ms for ranked in found.best if ranked.forecast.fits]
    assert times == sorted(times)
    assert "longest: all_" in found.best[0].reason
    assert found.weak_scaling(found.single) == 1.0


def test_what_is_chosen_beside_the_axes_is_kept():
    like = ParallelPlan(gather_dtype="bf16", replicate_below=3)
    topology = machines(ranks_per_host=8)
    found = search(work(), topology, tables=no_tables, rates=RATES, like=like, most=100)
    chosen = {(each.plan.gather_dtype, each.plan.replicate_below) for each in found.best}
    assert chosen == {("bf16", 3)}


def test_fixed_axes_are_kept():
    topology = machines(ranks_per_host=8)
    fixed = {"shard": 4, "table_replicate": 2, "fully_sharded_tables": True}
    found = search(work(), topology, tables=no_tables, rates=RATES, fixed=fixed)
    assert {ranked.plan.shard for ranked in found.best} == {4}
    assert all(ranked.plan.fully_sharded_tables for ranked in found.best)
    several = machines(hosts=4, ranks_per_host=2, hosts_per_zone=2)
    found = search(work(), several, tables=no_tables, rates=RATES, fixed={"table_copies": "far"})
    assert {ranked.plan.table_copies for ranked in found.best} == {"far"}


@pytest.mark.parametrize(
    ("fixed", "told"),
    [
        ({"shard": 3}, r"hosts=1 \* ranks_per_host=8 = 8.*shard=3"),
        ({"expert": 4}, r"divides the experts \(2\).*expert=4"),
        ({"shards": 2}, r"fixed must name axes \(replicate, shard, expert"),
        ({"table_shard": 3}, r"table_shard=3 \* table_replicate=any"),
    ],
)
def test_axes_that_no_plan_has_are_told(fixed, told):
    topology = machines(ranks_per_host=8)
    with pytest.raises(ConfigError, match=told):
        search(work(experts=2), topology, tables=no_tables, rates=RATES, fixed=fixed)


def test_tables_that_fit_nowhere_are_told():
    def none_fit(plan, topology):
        raise ConfigError(
            f"tables: rows must fit into 1 GiB; got {plan.table_shard} parts; mend it"
        )

    with pytest.raises(ConfigError, match=r"3 plans: tables: rows must fit into 1 GiB"):
        search(work(), machines(ranks_per_host=2), tables=none_fit, rates=RATES)


def test_memory_decides_before_time():
    # The fastest plan holds all parameters on each rank, which the memory does not.
    tight = DEVICE.model_copy(update={"memory_gib": 0.028})
    topology = machines(ranks_per_host=8).model_copy(update={"accelerator": tight})
    found = search(work(), topology, tables=no_tables, rates=RATES, most=100)
    assert found.best[0].forecast.fits
    assert found.best[0].plan.shard > 1
    assert any("more memory than" in why for why in found.refused)


@given(st.sampled_from([16, 64, 512, 4096]))
def test_slower_spine_never_helps(ranks):
    topology = PRESETS["gem4096"].model_copy(update={"hosts": ranks // 8})
    slow = topology.model_copy(
        update={"cluster_tier": topology.cluster_tier.model_copy(update={"gbytes_per_s": 0.5})}
    )
    plan = ParallelPlan(replicate=ranks // 8, shard=8, table_shard=ranks)
    fast, slower = (forecast(work(), plan, t, rates=RATES).step_ms for t in (topology, slow))
    assert fast <= slower + 1e-9


def test_planning_imports_no_torch():
    code = (
        "import sys, gem_parallel.planning.planner\n"
        "raise SystemExit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

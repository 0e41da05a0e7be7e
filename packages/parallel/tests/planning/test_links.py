"""Times of collectives against times computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import RATES, machines

from gem_opkit.errors import ConfigError
from gem_parallel.contract import ParallelPlan
from gem_parallel.planning.links import axis_group, collective_ms, slowest_tier, wire_bytes
from gem_parallel.topology import PRESETS, axis_tiers

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def ms(kind, given_bytes, group, topology, rates=RATES):
    return collective_ms(kind, given_bytes, group, topology, rates)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        # Four ranks, 10 MB given, links of 10 GB/s: a millisecond for each 10 MB that is sent.
        ("all_gather", 3.0),
        ("reduce_scatter", 0.75),
        ("all_reduce", 1.5),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
    ],
)
def test_inside_a_host_bytes_over_bandwidth(kind, wanted):
    topology = machines(ranks_per_host=4)
    group = axis_group(ParallelPlan(shard=4, table_shard=4), "shard", topology)
    assert ms(kind, 10e6, group, topology) == pytest.approx(wanted)


def test_gather_over_hosts_shares_their_adapters():
    # Two hosts of four: each host takes in the four shards of the other through four adapters.
    topology = machines(hosts=2, ranks_per_host=4, hosts_per_zone=2)
    group = axis_group(ParallelPlan(shard=8, table_shard=8), "shard", topology)
    assert (group.on_host, group.in_zone, group.members) == (4, 8, 8)
    # 1 MB a rank: 4 MB over 4 adapters of 1 GB/s is 1 ms; 7 MB over 10 GB/s is less.
    assert ms("all_gather", 1e6, group, topology) == pytest.approx(1.0)


def test_exchange_over_hosts_shares_nothing():
    topology = machines(hosts=2, ranks_per_host=4, hosts_per_zone=2)
    group = axis_group(ParallelPlan(shard=8, table_shard=8), "table_shard", topology)
    # 8 MB in parts of 1 MB; four of them leave the host through the rank's own adapter.
    assert ms("all_to_all", 8e6, group, topology) == pytest.approx(4.0)


def test_strided_group_has_one_member_a_host():
    topology = machines(hosts=2, ranks_per_host=4, hosts_per_zone=2)
    plan = ParallelPlan(replicate=2, shard=4, table_shard=8)
    group = axis_group(plan, "replicate", topology)
    assert (group.members, group.on_host) == (2, 1)
    # Reduce-scatter and all-gather of half of 2 MB over an adapter of 1 GB/s.
    assert ms("all_reduce", 2e6, group, topology) == pytest.approx(2.0)


def test_zones_are_crossed_through_the_slowest_links():
    topology = machines(hosts=4, ranks_per_host=2, hosts_per_zone=2)
    group = axis_group(ParallelPlan(shard=8, table_shard=8), "shard", topology)
    assert (group.on_host, group.in_zone) == (2, 4)
    # Four shards of the other zone through four exits of 0.1 GB/s each.
    assert ms("all_gather", 1e5, group, topology) == pytest.approx(1.0)
    assert slowest_tier(group, topology).name == "farther"


def test_latency_grows_with_the_logarithm_of_the_members():
    topology = machines(ranks_per_host=8, latency_us=10.0)
    plan = ParallelPlan(shard=8, table_shard=8)
    group = axis_group(plan, "shard", topology)
    assert ms("reduce_scatter", 0, group, topology) == pytest.approx(0.030)
    assert ms("all_reduce", 0, group, topology) == pytest.approx(0.060)
    launched = RATES.model_copy(update={"launch_us": 100.0})
    assert collective_ms("reduce_scatter", 0, group, topology, launched, calls=3) == pytest.approx(
        3 * 0.130
    )


def test_group_of_one_costs_nothing():
    topology = machines(ranks_per_host=2)
    plan = ParallelPlan(replicate=2, table_replicate=2)
    group = axis_group(plan, "shard", topology)
    assert [ms(kind, 1e9, group, topology) for kind in KINDS] == [0.0] * 5
    assert slowest_tier(group, topology) is None


@pytest.mark.parametrize(
    ("copies", "group", "of_a_part"), [("near", (2, 4), (2, 2)), ("far", (4, 8), (1, 1))]
)
def test_far_copies_keep_a_sharding_group_in_its_zone(copies, group, of_a_part):
    """Ranks of a group, and copies of a part: how many are on one host, and in one zone."""
    topology = machines(hosts=4, ranks_per_host=4, hosts_per_zone=2)
    plan = ParallelPlan(replicate=16, table_shard=8, table_replicate=2, table_copies=copies)
    for axis, wanted in (("table_shard", group), ("table_replicate", of_a_part)):
        found = axis_group(plan, axis, topology)
        assert (found.on_host, found.in_zone) == wanted, axis


def test_unknown_axis_is_refused():
    with pytest.raises(ConfigError, match="axis must be one of replicate, shard, expert"):
        axis_group(ParallelPlan(), "rows", machines())


@given(
    st.sampled_from([1, 2, 4, 8, 32, 512]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["replicate", "shard", "expert", "table_shard", "table_replicate"]),
    st.sampled_from(["near", "far"]),
)
def test_outermost_tier_is_that_of_axis_tiers(hosts, inner, axis, copies):
    # The independent rule of gem_parallel.topology, on powers of two.
    topology = PRESETS["gem4096"].model_copy(update={"hosts": hosts})
    ranks = 8 * hosts
    plan = ParallelPlan(
        replicate=ranks // (8 * 1),
        shard=8 // inner,
        expert=inner,
        table_shard=ranks // inner,
        table_replicate=inner,
        table_copies=copies,
    )
    assert (
        slowest_tier(axis_group(plan, axis, topology), topology) == axis_tiers(plan, topology)[axis]
    )


@given(
    st.sampled_from(KINDS),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
    st.sampled_from([1, 2, 8, 64]),
    st.sampled_from([1, 2, 8]),
)
def test_more_bytes_and_slower_links_never_take_less(kind, few, more, hosts, on_host):
    topology = PRESETS["gem4096"].model_copy(update={"hosts": hosts, "ranks_per_host": on_host})
    ranks = hosts * on_host
    group = axis_group(ParallelPlan(shard=ranks, table_shard=ranks), "shard", topology)
    assert ms(kind, few, group, topology) <= ms(kind, few + more, group, topology) + 1e-12
    slow = topology.model_copy(
        update={
            name: getattr(topology, name).model_copy(update={"gbytes_per_s": 1.0})
            for name in ("host_tier", "zone_tier", "cluster_tier")
        }
    )
    assert ms(kind, few, group, topology) <= ms(kind, few, group, slow) + 1e-12


@given(st.floats(1, 1e9), st.integers(2, 4096))
def test_an_all_reduce_sends_what_its_two_halves_send(whole, members):
    halves = wire_bytes("reduce_scatter", whole, members)
    halves += wire_bytes("all_gather", whole / members, members)
    assert wire_bytes("all_reduce", whole, members) == pytest.approx(halves)

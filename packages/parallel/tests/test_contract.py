"""Plans and topologies accept what fits together and name every factor of what does not."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gem_opkit.contract import contract_json
from gem_opkit.errors import ConfigError
from gem_parallel import contract
from gem_parallel.contract import LinkTier, ParallelPlan, Topology
from gem_parallel.topology import PRESETS, axis_tiers, preset

NVLINK = LinkTier(name="nvlink", gbytes_per_s=450, latency_us=5)
ROCE = LinkTier(name="roce", gbytes_per_s=50, latency_us=20)
SPINE = LinkTier(name="spine", gbytes_per_s=12, latency_us=40)


def test_contract_is_the_committed_one():
    committed = (Path(__file__).parent / "contract.json").read_text(encoding="utf-8")
    assert contract_json(contract) == committed


def test_plan_names_every_factor_when_the_meshes_differ():
    with pytest.raises(ValidationError) as error:
        ParallelPlan(replicate=2, shard=4, expert=2, table_shard=4, table_replicate=2)
    message = str(error.value)
    for part in ("replicate=2", "shard=4", "expert=2", "= 16", "table_shard=4", "= 8"):
        assert part in message


def test_plan_refuses_another_world_size():
    with pytest.raises(ConfigError, match=r"world size 3; got 2 \* 1 \* 1 = 2"):
        ParallelPlan.data_parallel(2).check_world(3)


@given(st.integers(1, 4096))
def test_data_parallel_plan_fits_its_world(world_size):
    plan = ParallelPlan.data_parallel(world_size)
    plan.check_world(world_size)
    assert plan.table_replicate == world_size
    assert plan.shard == plan.expert == plan.table_shard == 1


@pytest.mark.parametrize(
    ("hosts", "hosts_per_zone", "zone", "missing"),
    [(2, 2, None, "zone_tier"), (4, 2, ROCE, "cluster_tier")],
)
def test_topology_asks_for_the_links_that_it_needs(hosts, hosts_per_zone, zone, missing):
    with pytest.raises(ValidationError, match=missing):
        Topology(hosts=hosts, hosts_per_zone=hosts_per_zone, host_tier=NVLINK, zone_tier=zone)


def test_unknown_key_is_refused():
    with pytest.raises(ValidationError, match="replicas"):
        ParallelPlan.model_validate({"replicas": 2})


def test_presets_hold_the_ranks_that_they_are_named_for():
    assert {name: PRESETS[name].world_size for name in PRESETS} == {
        "laptop": 1,
        "h200": 1,
        "h200x2": 2,
        "h200x8": 8,
        "gem4096": 4096,
    }
    with pytest.raises(ConfigError, match="h200x8, gem4096; got 'dgx'"):
        preset("dgx")


def test_innermost_axes_lie_on_the_fastest_links():
    topology = Topology(
        hosts=64,
        ranks_per_host=8,
        hosts_per_zone=32,
        host_tier=NVLINK,
        zone_tier=ROCE,
        cluster_tier=SPINE,
    )
    plan = ParallelPlan(replicate=2, shard=128, expert=2, table_shard=64, table_replicate=8)
    tiers = axis_tiers(plan, topology)
    assert tiers == {
        "expert": NVLINK,
        "shard": ROCE,
        "replicate": SPINE,
        "table_replicate": NVLINK,
        "table_shard": SPINE,
    }


def test_an_axis_that_straddles_hosts_uses_the_wider_link():
    # Three consecutive ranks do not divide a host of eight: some group crosses its edge.
    topology = Topology(
        hosts=3, ranks_per_host=8, hosts_per_zone=3, host_tier=NVLINK, zone_tier=ROCE
    )
    plan = ParallelPlan(replicate=8, expert=3, table_shard=3, table_replicate=8)
    tiers = axis_tiers(plan, topology)
    assert tiers["expert"] == ROCE
    assert tiers["shard"] is None
    assert tiers["table_replicate"] == NVLINK


def test_planning_imports_no_torch():
    code = (
        "import sys, gem_parallel.contract, gem_parallel.topology\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

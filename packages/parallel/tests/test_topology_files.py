"""Topologies in TOML files: what is read, and what every mistake is told by."""

import pytest

from gem_opkit.errors import ConfigError
from gem_parallel.topology import PRESETS, preset, read_topology, scaled_to

WHOLE = """
hosts = 4
ranks_per_host = 8
hosts_per_zone = 2

[accelerator]
name = "H200"
memory_gib = 139.0
peak_tflops = 989.0
matmul_tflops = 811.0
memory_gbytes_per_s = 4240.0

[host_tier]
name = "nvlink"
gbytes_per_s = 450.0
latency_us = 5.0

[zone_tier]
name = "roce"
gbytes_per_s = 50.0
latency_us = 15.0
collective_frac = 0.85

[cluster_tier]
name = "spine"
gbytes_per_s = 7.0
latency_us = 25.0
"""


def read(tmp_path, text):
    path = tmp_path / "machines.toml"
    path.write_text(text, encoding="utf-8")
    return read_topology(path)


def test_file_gives_what_it_says(tmp_path):
    found = read(tmp_path, WHOLE)
    assert (found.world_size, found.hosts_per_zone) == (32, 2)
    assert found.accelerator is not None
    assert found.accelerator.matmul_tflops == 811.0
    assert found.host_tier.collective_frac == 1.0
    assert found.zone_tier is not None
    assert found.zone_tier.collective_frac == 0.85


def test_name_of_a_preset_is_taken():
    assert read_topology("h200x8") is preset("h200x8")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("[zone_tier]", "[zone_teir]", r"zone_teir must be one of .*did you mean 'zone_tier'"),
        ("memory_gib = 139.0", "memory_gb = 139.0", r"accelerator.memory_gb must be one of name"),
        ("gbytes_per_s = 450.0\nlatency_us = 5.0", "gbytes_per_s = 450.0", "host_tier.latency_us"),
        ("hosts = 4", "hosts = 0", r"hosts must be valid; got 0; .*greater than or equal to 1"),
        ("hosts = 4", 'hosts = "four"', "hosts must be valid; got 'four'"),
        ("gbytes_per_s = 50.0", "gbytes_per_s = 0", "zone_tier.gbytes_per_s must be valid; got 0"),
        ("gbytes_per_s = 50.0", "gbytes_per_s = nan", "zone_tier.gbytes_per_s must be valid"),
        ("matmul_tflops = 811.0", "matmul_tflops = 1979.0", "must be at most peak_tflops"),
        ("hosts = 4", "hosts = = 4", "must be TOML in UTF-8"),
        ("hosts = 4", "hosts = " + "9" * 5000, "must be TOML in UTF-8"),
        ("hosts = 4", "hosts = " + "[" * 5000, "must be TOML in UTF-8"),
        ("collective_frac = 0.85", "collective_frac = 1.5", "zone_tier.collective_frac"),
        (WHOLE[WHOLE.index("[zone_tier]") :], "", "zone_tier must be given when hosts is 4"),
        (WHOLE[WHOLE.index("[cluster_tier]") :], "", "cluster_tier must be given when the hosts"),
    ],
)
def test_mistakes_are_told_by_their_key(tmp_path, old, new, told):
    assert old in WHOLE
    with pytest.raises(ConfigError, match=told):
        read(tmp_path, WHOLE.replace(old, new))


def test_neither_file_nor_preset():
    with pytest.raises(ConfigError, match=r"'h200x3' \(did you mean 'h200x"):
        read_topology("h200x3")


def test_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "machines.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="must be TOML in UTF-8"):
        read_topology(path)


def test_endless_file_is_refused(tmp_path):
    path = tmp_path / "machines.toml"
    path.write_text("#" * (1 << 21), encoding="utf-8")
    with pytest.raises(ConfigError, match="file must be at most 1048576 bytes"):
        read_topology(path)


def test_part_of_a_topology_keeps_its_tiers():
    large = PRESETS["gem4096"]
    assert [scaled_to(large, n).world_size for n in (1, 4, 8, 16, 4096)] == [1, 4, 8, 16, 4096]
    assert scaled_to(large, 16).hosts == 2
    assert scaled_to(large, 4).hosts == 1
    assert scaled_to(large, 2048).cluster_tier == large.cluster_tier


@pytest.mark.parametrize("ranks", [0, 12, 4104])
def test_part_that_is_not_there_is_refused(ranks):
    with pytest.raises(ConfigError, match=rf"512 \* 8 = 4096.*got {ranks}"):
        scaled_to(PRESETS["gem4096"], ranks)

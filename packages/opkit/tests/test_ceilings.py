"""Ceilings and peaks: an unknown device has no peak, and nothing is faster than one."""

import pytest
import torch

from gem_opkit.ceilings import (
    Ceilings,
    device_name,
    device_peak,
    measure_ceilings,
    share_of_ceiling,
    share_of_peak,
)
from gem_opkit.cost import Cost
from gem_opkit.errors import ConfigError, MeasurementError, UnsupportedError
from gem_opkit.testing import check_refuses


@pytest.mark.parametrize(
    ("name", "flops_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
    ],
)
def test_known_devices_have_the_dense_figure_and_its_source(name, flops_per_s):
    peak = device_peak(name)
    assert peak.flops_per_s == flops_per_s
    assert "data sheet" in peak.peak_source


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "",
        "NVIDIA H20",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA GB200",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA A10",
        "AMD Instinct MI300X",
    ],
)
def test_unknown_device_has_no_peak_and_no_utilisation(name):
    peak = device_peak(name)
    assert peak.flops_per_s is None
    assert repr(name) in peak.peak_source
    assert share_of_peak(1e15, 1.0, peak.flops_per_s) is None


def test_share_of_peak_has_its_units_right():
    assert share_of_peak(400e12, 1000.0, 800e12) == pytest.approx(0.5)
    assert share_of_peak(0, 1.0, 800e12) == 0


def test_share_of_ceiling_is_roofline_over_time():
    ceilings = Ceilings("toy", "bf16", copy_bytes_per_s=4e12, matmul_flops_per_s=800e12)
    assert share_of_ceiling(Cost(0, 4 * 10**9), 2.0, ceilings) == pytest.approx(0.5)


def test_work_that_mostly_reads_may_beat_a_copy_but_not_the_data_sheet():
    ceilings = Ceilings("NVIDIA H200", "bf16", copy_bytes_per_s=4e12, matmul_flops_per_s=700e12)
    assert share_of_ceiling(Cost(0, 4 * 10**9), 0.9, ceilings) == pytest.approx(1 / 0.9)
    assert share_of_ceiling(Cost(700 * 10**9, 0), 0.8, ceilings) == pytest.approx(1 / 0.8)
    for cost in (Cost(0, 4 * 10**9), Cost(700 * 10**9, 0)):
        with pytest.raises(MeasurementError, match="share must be at most 1"):
            share_of_ceiling(cost, 0.7, ceilings)


def test_more_than_all_is_an_error_not_a_result():
    ceilings = Ceilings("toy", "bf16", copy_bytes_per_s=4e12, matmul_flops_per_s=800e12)
    check_refuses(
        [
            (
                # seconds taken for milliseconds: 1785 % of the peak
                lambda: share_of_peak(17.85 * 989e12, 1000.0, 989e12),
                MeasurementError,
                r"share must be at most 1; got 17\.850",
            ),
            (
                lambda: share_of_ceiling(Cost(0, 8 * 10**9), 1.0, ceilings),
                MeasurementError,
                r"at most 1; got 2\.000 \(roofline 2 ms, measured 1 ms\)",
            ),
            (lambda: share_of_peak(1, 0.0, 1e12), ConfigError, "elapsed_ms must be above 0"),
            (lambda: share_of_peak(1, 1.0, 0.0), ConfigError, "peak_flops_per_s must be above 0"),
            (lambda: measure_ceilings("meta"), UnsupportedError, "must be cpu or cuda; got meta"),
        ]
    )


def test_cpu_is_measured_once():
    first = measure_ceilings("cpu")
    assert first is measure_ceilings(torch.device("cpu"))
    assert first.device == device_name("cpu") == "cpu"
    assert first.matmul_dtype == "fp32"
    # Between a very slow and an impossible machine: catches wrong units.
    assert 1e8 < first.copy_bytes_per_s < 1e13
    assert 1e8 < first.matmul_flops_per_s < 1e14


def test_measuring_again_keeps_the_better_of_each_rate(monkeypatch):
    results = iter([Ceilings("cpu", "fp32", 2.0, 5.0), Ceilings("cpu", "fp32", 3.0, 4.0)])
    monkeypatch.setattr("gem_opkit.ceilings._measured", {})
    monkeypatch.setattr("gem_opkit.ceilings._measure", lambda device, dtype: next(results))
    assert measure_ceilings("cpu") == Ceilings("cpu", "fp32", 2.0, 5.0)
    assert measure_ceilings("cpu", again=True) == Ceilings("cpu", "fp32", 3.0, 5.0)
    assert measure_ceilings("cpu") == Ceilings("cpu", "fp32", 3.0, 5.0)


@pytest.mark.gpu
def test_gpu_is_below_its_peak():
    measured = measure_ceilings("cuda")
    peak = device_peak(measured.device).flops_per_s
    assert measured.copy_bytes_per_s > 1e11
    if peak is not None:
        assert 0.3 * peak < measured.matmul_flops_per_s < peak

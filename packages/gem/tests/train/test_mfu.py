"""End-to-end MFU: the formula, devices without a known peak, and what is refused."""

import pytest

from gem.train.mfu import efficiency
from gem_opkit.errors import MeasurementError


def found(**changes):
    settings = {
        "flops_per_example": 1e9,
        "examples_per_step": 4096,
        "step_ms": 10.0,
        "device_name": "NVIDIA H200",
        "world_size": 1,
    }
    return efficiency(**{**settings, **changes})


def test_formula_by_hand():
    # 4.096e12 FLOPs in 10 ms are 4.096e14 FLOP/s, of 9.89e14 that one device can do.
    assert found()["e2e_mfu"] == pytest.approx(4.096e14 / 9.89e14)
    assert found(world_size=2)["e2e_mfu"] == pytest.approx(4.096e14 / 1.978e15)
    assert found()["peak_tflops"] == 989.0
    assert "BF16" in found()["peak_source"]


@pytest.mark.parametrize("name", ["cpu", "NVIDIA GeForce RTX 9090", "NVIDIA H200 NVL MIG 1g.18gb"])
def test_an_unknown_device_has_no_mfu_but_flops(name):
    unknown = found(device_name=name)
    assert [unknown[k] for k in ("e2e_mfu", "peak_tflops", "peak_source")] == [None] * 3
    assert unknown["flops_per_example"] == 1e9


def test_without_a_timed_step_there_is_none():
    assert found(step_ms=None)["e2e_mfu"] is None
    assert found(flops_per_example=None)["e2e_mfu"] is None


def test_more_than_the_peak_is_an_error():
    with pytest.raises(MeasurementError, match="share must be at most 1"):
        found(step_ms=1.0)


def test_what_training_does_not_measure_is_null():
    assert [found()[k] for k in ("local_mfu", "scaling_ratio", "weak_scaling")] == [None] * 3

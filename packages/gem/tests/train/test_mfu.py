"""MFU: the formula, the table of peaks, and what is refused."""

import pytest

from gem.train.mfu import e2e_mfu, efficiency, peak_tflops
from gem_opkit.errors import DeviceError


def test_formula_by_hand():
    # 4e12 FLOPs in 10 ms are 4e14 FLOP/s; two devices could do 1.978e15.
    assert e2e_mfu(4e12, 10.0, 2, 989.0) == pytest.approx(4e14 / (2 * 989e12))


def test_an_unknown_device_has_no_mfu():
    assert peak_tflops("cpu") == (None, None)
    assert peak_tflops("NVIDIA GeForce RTX 9090") == (None, None)
    assert peak_tflops("NVIDIA GB200") == (None, None)  # not a B200
    found = efficiency(
        flops_per_example=1e9, examples_per_step=512, step_ms=3.0, device_name="cpu", world_size=1
    )
    assert found["e2e_mfu"] is None
    assert found["peak_tflops"] is None
    assert found["flops_per_example"] == 1e9


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
    ],
)
def test_dense_peaks(name, tflops):
    peak, source = peak_tflops(name)
    assert peak == tflops
    assert "BF16 dense" in source


def test_more_than_the_peak_is_an_error():
    with pytest.raises(DeviceError, match=r"e2e_mfu must be at most 1; got 2\.0"):
        e2e_mfu(2 * 989e12 * 1e-2, 10.0, 1, 989.0)


def test_summary_holds_what_training_measures():
    found = efficiency(
        flops_per_example=1e9,
        examples_per_step=100,
        step_ms=1.0,
        device_name="NVIDIA H200",
        world_size=1,
    )
    assert found["e2e_mfu"] == pytest.approx(1e11 / (989e12 * 1e-3))
    assert [found[k] for k in ("local_mfu", "scaling_ratio", "weak_scaling")] == [None] * 3

"""The benchmark of the training step runs, and its row adds up."""

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from gem_opkit.errors import MeasurementError
from gem_parallel.launch import World

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "bench_step.py"


@pytest.fixture
def bench(monkeypatch):
    spec = importlib.util.spec_from_file_location("bench_step_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    before = torch.are_deterministic_algorithms_enabled()
    spec.loader.exec_module(module)
    yield module
    torch.use_deterministic_algorithms(before)


def given(*settings):
    return Namespace(
        recipe="synthetic-debug",
        set=list(settings),
        plan=[],
        examples=32,
        warmup=2,
        steps=3,
        kernels=0,
    )


def test_a_row_adds_up(bench):
    row = bench.measure(given(), World())
    assert (row["bench"], row["gpus"], row["steps"], row["parts"]) == ("step", 1, 3, 1)
    assert row["examples_a_rank"] == 32
    assert row["flops_a_step"] == pytest.approx(32 * row["flops_per_example"])
    assert row["examples_per_s"] == pytest.approx(32e3 / row["step_ms"])
    assert row["step_ms_fastest"] <= row["step_ms"] <= row["step_ms_slowest"]
    # Sections follow one another: together they are the time of the steps.
    whole = sum(row["sections_ms"].values())
    assert 0.5 * row["step_ms_fastest"] < whole < 2.0 * row["step_ms_slowest"]
    assert row["e2e_mfu"] is None  # no peak is known of a CPU
    assert row["loss_last"] < 2 * row["loss_first"]


def test_a_step_that_computes_something_else_is_not_timed(bench, monkeypatch):
    monkeypatch.setattr(bench, "LOSS_BAND", 1e-6)
    with pytest.raises(MeasurementError, match="loss must be finite and begin near"):
        bench.measure(given(), World())

"""The benchmark harness: correct first, then timed, never over 100 %."""

import dataclasses
import json
import subprocess
import time
from functools import partial

import pytest
import torch

from gem_opkit.bench import (
    BenchCase,
    backward_of,
    device_folder,
    provenance,
    run_bench,
)
from gem_opkit.ceilings import Ceilings
from gem_opkit.cost import Cost
from gem_opkit.errors import ConfigError, MeasurementError
from gem_opkit.testing import check_refuses
from gem_opkit.timing import Timing, time_call

# Generous ceilings of a machine that does not exist, so that no test measures this one.
CEILINGS = Ceilings("cpu", "fp32", copy_bytes_per_s=1e13, matmul_flops_per_s=1e15)


def pause():
    time.sleep(0.002)


def case(name="small", **changed):
    given = {
        "run": pause,
        "check": lambda: None,
        "cost": Cost(1000, 1000),
        "shapes": {"lengths": [1, 2]},
        **changed,
    }
    return BenchCase(name=name, **given)


def bench(cases, out, **options):
    return run_bench("toy", cases, out=out, calls=3, ceilings=CEILINGS, **options)


def rows_in(folder):
    path = folder / "cpu" / "toy.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def small_flush(monkeypatch):
    monkeypatch.setattr("gem_opkit.timing._FLUSH_BYTES", 2**20)


def test_row_holds_what_a_reader_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("GEM_COMMIT", "abc123")
    bench([case(peers={"other": lambda: time.sleep(0.004)}, dtype="bf16")], tmp_path)
    (row,) = rows_in(tmp_path)
    assert row["bench"] == "toy" and row["case"] == "small" and row["device"] == "cpu"
    assert row["shapes"] == {"lengths": [1, 2]} and row["dtype"] == "bf16"
    assert row["flops"] == 1000 and row["bytes"] == 1000
    assert row["commit"] == "abc123"
    assert row["versions"]["torch"] == torch.__version__
    assert row["versions"]["gem_opkit"] == "0.1.0"
    assert 2 <= row["p20_ms"] <= row["ms"] <= row["p80_ms"] < 1000
    assert row["calls"] == 3 and row["rounds"] == 2
    assert row["ceiling_frac"] == pytest.approx(1e-7 / row["ms"])
    assert row["peak_frac"] is None and "no peak known for 'cpu'" in row["peak_source"]
    assert row["peers"]["other"]["ms"] >= 4
    assert row["ceilings"]["copy_bytes_per_s"] == 1e13


def test_wrong_result_is_never_timed(tmp_path):
    timed = []

    def wrong():
        raise AssertionError("differs")

    cases = [case("right", run=lambda: timed.append(1)), case("wrong", check=wrong)]
    with pytest.raises(AssertionError, match="differs"):
        bench(cases, tmp_path)
    assert not timed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cost", [Cost(10**15, 0), Cost(0, 10**13)])
def test_faster_than_the_ceiling_is_an_error_and_not_written(tmp_path, cost):
    with pytest.raises(MeasurementError, match="share must be at most 1"):
        bench([case("right"), case("impossible", cost=cost)], tmp_path)
    assert not list(tmp_path.iterdir())


def test_faster_than_the_peak_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("gem_opkit.bench.device_name", lambda device: "NVIDIA H200")
    fast = Ceilings("toy", "bf16", copy_bytes_per_s=1e13, matmul_flops_per_s=1e30)
    with pytest.raises(MeasurementError, match="share_of_peak"):
        run_bench("toy", [case(cost=Cost(10**15, 0))], out=tmp_path, calls=3, ceilings=fast)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_each_part_counts_against_the_peak_of_its_format(tmp_path, monkeypatch, device):
    """2 of 3 equal products in 8 bits; a peer has none, and A100 has no such tensor cores."""
    monkeypatch.setattr("gem_opkit.bench.device_name", lambda _: device)
    peak = {"NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}[device]
    flops = int(0.3 * peak * 0.002)  # 0.3 of a call of 2 ms at the peak of bf16
    given = case(cost=Cost(3 * flops, 0), fp8_flops=2 * flops, run=lambda: time.sleep(0.004))
    given = dataclasses.replace(given, peers={"bf16": lambda: time.sleep(0.004)})
    fast = Ceilings(device, "bf16", copy_bytes_per_s=1e13, matmul_flops_per_s=peak / 2)
    (row,) = run_bench("toy", [given], out=None, calls=3, ceilings=fast)
    in_bf16_ms = 3 * flops / peak * 1e3
    own_ms = in_bf16_ms * (2 / 3 if device == "NVIDIA H200" else 1)
    assert row["flops"] == 3 * flops and row["fp8_flops"] == 2 * flops
    assert row["peak_frac"] == pytest.approx(own_ms / row["ms"])
    assert row["ceiling_frac"] == pytest.approx(2 * own_ms / row["ms"])
    peer = row["peers"]["bf16"]
    assert peer["peak_frac"] == pytest.approx(in_bf16_ms / peer["ms"])
    assert row["peak_source"].endswith("FP8 2 times that") == (device == "NVIDIA H200")


def test_faster_than_both_peaks_is_an_error(monkeypatch):
    """What bf16 could not do in the time but 8 bits could passes; twice that does not."""
    monkeypatch.setattr("gem_opkit.bench.device_name", lambda _: "NVIDIA H200")
    fast = Ceilings("NVIDIA H200", "bf16", copy_bytes_per_s=1e13, matmul_flops_per_s=9e14)
    timing = Timing(ms=1.0, p20_ms=1.0, p80_ms=1.0, calls=3, rounds=2)
    monkeypatch.setattr("gem_opkit.bench.time_in_turn", lambda *_, **__: {"": timing})
    flops = int(1.2 * 989e9)
    run = {"out": None, "calls": 3, "ceilings": fast}
    with pytest.raises(MeasurementError, match="share_of_peak"):
        run_bench("toy", [case(cost=Cost(flops, 0))], **run)
    (row,) = run_bench("toy", [case(cost=Cost(flops, 0), fp8_flops=flops)], **run)
    assert row["peak_frac"] == pytest.approx(0.6)
    with pytest.raises(MeasurementError, match="share_of_peak"):
        run_bench("toy", [case(cost=Cost(2 * flops, 0), fp8_flops=2 * flops)], **run)


def test_more_flops_in_8_bits_than_there_are_is_refused():
    for wrong in (-1, 1001):
        check_refuses([(partial(case, fp8_flops=wrong), ConfigError, "fp8_flops")])


def test_impossible_peer_is_an_error_too(tmp_path):
    with pytest.raises(MeasurementError):
        bench([case(cost=Cost(10**12, 0), peers={"lazy": lambda: None})], tmp_path)


def test_a_peer_that_fails_is_left_out_and_named(tmp_path):
    def broken():
        raise ImportError("no such kernel\nmore")

    steps = []
    peers = {"broken": broken, "other": pause}
    bench([case(peers=peers)], tmp_path, at=lambda step, who: steps.append((step, who)))
    (row,) = rows_in(tmp_path)
    assert row["failed_peers"] == {"broken": "ImportError: no such kernel"}
    assert list(row["peers"]) == ["other"]
    assert steps == [("check", "small"), ("peer", "broken"), ("peer", "other"), ("time", "small")]


def test_ceiling_is_the_better_of_before_and_after(tmp_path, monkeypatch):
    measured = iter([1e9, 1e13])  # a busy machine at first

    def measure(device, *, again=False):
        return Ceilings("cpu", "fp32", copy_bytes_per_s=next(measured), matmul_flops_per_s=1e15)

    monkeypatch.setattr("gem_opkit.bench.measure_ceilings", measure)
    (row,) = run_bench("toy", [case(cost=Cost(0, 10**8))], out=tmp_path, calls=3)
    assert row["ceiling_frac"] == pytest.approx(1e-2 / row["ms"])


def test_rows_are_replaced_by_case_and_others_kept(tmp_path):
    bench([case("a"), case("b")], tmp_path)
    bench([case("b", shapes={"lengths": [9]}), case("c")], tmp_path)
    assert [row["case"] for row in rows_in(tmp_path)] == ["a", "b", "c"]
    assert rows_in(tmp_path)[1]["shapes"] == {"lengths": [9]}


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEM_COMMIT", raising=False)
    rows = bench([case()], None)
    assert rows[0]["commit"] is None  # not a checkout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "gpus", "folder"),
    [
        ("cpu", 1, "cpu"),
        ("NVIDIA H200", 1, "h200"),
        ("NVIDIA H200", 2, "h200x2"),
        ("NVIDIA H100 80GB HBM3", 1, "h100-80gb-hbm3"),
    ],
)
def test_folder_of_a_device(name, gpus, folder):
    assert device_folder(name, gpus=gpus) == folder


def test_backward_alone_is_timed():
    calls = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            calls.append("forward")
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            calls.append("backward")
            return 2 * grad

    backward = backward_of(Double.apply, (torch.ones(3, requires_grad=True),))
    backward()
    (grad,) = backward()
    assert calls == ["forward", "backward", "backward"]
    assert grad.shape == (3,)


def test_refusals(tmp_path):
    check_refuses(
        [
            (lambda: bench([], tmp_path), ConfigError, "cases must be at least one"),
            (lambda: bench([case("a"), case("a")], tmp_path), ConfigError, "unique names"),
            (lambda: time_call(pause, calls=2), ConfigError, "calls must be at least 3; got 2"),
            (lambda: time_call(pause, warmup=0), ConfigError, "warmup must be at least 1"),
            (lambda: backward_of(lambda x: x, (torch.ones(1),)), ConfigError, "requires a grad"),
        ]
    )


@pytest.mark.gpu
def test_gpu_time_includes_the_work(tmp_path):
    side = 8192
    a = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
    # Half of the FLOPs: this product is the ceiling, and a moment in which the device is busier
    # while that is measured must not fail the test. A harness that does not wait for the device
    # would claim far more than the peak all the same.
    cost = Cost(side**3, 3 * 2 * side**2)
    (row,) = run_bench("toy", [case(run=lambda: a @ a, cost=cost)], device="cuda", out=tmp_path)
    assert 0.15 < row["ceiling_frac"] < 0.75


def test_changed_files_spoil_a_commit_and_rows_of_results_do_not(tmp_path, monkeypatch):
    monkeypatch.delenv("GEM_COMMIT", raising=False)
    monkeypatch.chdir(tmp_path)
    files = [tmp_path / "code.py", tmp_path / "results" / "cpu" / "toy.jsonl"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("old")
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.com"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], check=True)
    files[1].write_text("new")
    commit = provenance()["commit"]
    assert len(commit) == 40
    files[0].write_text("new")
    assert provenance()["commit"] == commit + "+dirty"

"""Signals: noted once, then at once. A time limit is kept; the clock on the wall is not read."""

import os
import signal
import subprocess
import sys
import time

import pytest

from gem.train import interrupt, saving
from gem.train.checkpoint import latest_complete
from gem.train.interrupt import TIME_IS_UP, Interrupted, StopRequest
from gem.train.loop import train
from gem.train.run_folder import CHECKPOINTS
from gem_opkit.errors import ConfigError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.reason() == 0
        os.kill(os.getpid(), number)
        assert stop.signal_number == stop.reason() == number
    assert signal.getsignal(number) is before


def test_only_a_second_keypress_ends_at_once(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    with StopRequest() as stop:
        for now[0] in (10.0, 10.4):  # the same Ctrl-C, from the terminal and from torchrun
            signal.raise_signal(signal.SIGINT)
            assert stop.signal_number == signal.SIGINT
        now[0] = 12.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


# Sends itself signals with pauses; says so if it is still there.
TWICE = """
import os, signal, time
from gem.train.interrupt import StopRequest
with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print(stop.reason(), flush=True)
    time.sleep({pause})
    os.kill(os.getpid(), signal.SIGTERM)
    print("alive", flush=True)
"""


@pytest.mark.parametrize(
    ("pause", "launched", "code"), [(0.0, False, 143), (0.0, True, 0), (1.1, True, 143)]
)
def test_a_second_termination_ends_the_process(pause, launched, code):
    """Under torchrun, which passes signals on, the second within a second is the first again."""
    env = {k: v for k, v in os.environ.items() if k != "TORCHELASTIC_RUN_ID"}
    env |= {"TORCHELASTIC_RUN_ID": "1"} if launched else {}
    done = subprocess.run(
        [sys.executable, "-c", TWICE.format(pause=pause)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    assert done.stdout == "15\n" + ("alive\n" if code == 0 else "")
    assert done.stderr == ("" if code == 0 else "terminated at once; continue with --resume\n")


def test_the_limit_leaves_time_for_a_step_and_a_checkpoint(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    stop = StopRequest(60.0)
    stop.write_s = 10.0
    for now[0] in (102.0, 104.0, 110.0, 117.0, 124.0, 131.0):
        assert stop.reason() == 0
    now[0] = 133.0  # 33 s gone; a step takes 7, twice the write 20: 60
    assert stop.reason() == TIME_IS_UP
    stop.signal_number = signal.SIGTERM
    assert stop.reason() == signal.SIGTERM
    now[0] = 1e9
    assert StopRequest().reason() == 0


def test_a_share_of_the_limit_is_kept_back(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    stop = StopRequest(100.0)
    reasons = []
    for step in range(1, 99):
        now[0] = float(step)
        reasons.append(stop.reason())
    assert reasons == [0] * 97 + [TIME_IS_UP]  # a step takes 1 s, and 2 s are left


def test_to_begin_is_no_step(monkeypatch):
    """However long the data took to be read, and the model to be built."""
    now = [0.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    stop = StopRequest(100.0)
    now[0] = 60.0
    with stop:
        now[0] = 61.0
        assert stop.reason() == 0
        now[0] = 99.5
        assert stop.reason() == TIME_IS_UP


def test_a_run_ends_before_its_limit_and_goes_on(tiny, unbroken, data_root, tmp_path):
    part = tmp_path / "part"
    with pytest.raises(Interrupted, match=r"stopped by the time limit after step 1$"):
        train(tiny("train.wall_limit_s=0.001"), part, data_root=data_root)
    assert latest_complete(part / CHECKPOINTS).name == "step-1"
    assert not (part / "summary.json").exists()
    again = train(tiny("train.wall_limit_s=1e6"), part, resume=True, data_root=data_root)
    for period in ("progressive", "valid", "test"):
        assert again[period] == unbroken[1][period]


def test_a_limit_in_which_nothing_can_be_done_is_refused(tiny, data_root, tmp_path):
    """A script that goes on until the run is done would go on for ever."""
    config = tiny("train.wall_limit_s=0.001", "data.max_rows=32")
    with pytest.raises(Interrupted, match="after step 1"):
        train(config, tmp_path, data_root=data_root)
    with pytest.raises(ConfigError, match=r"wall_limit_s must leave time for a whole eval.* 0.001"):
        train(config, tmp_path, resume=True, data_root=data_root)


def test_there_is_time_for_the_first_checkpoint_too(tiny, data_root, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_SLOW_DISK_BYTES_PER_S", 1.0)
    with pytest.raises(Interrupted, match="after step 1"):
        train(tiny("train.wall_limit_s=1000"), tmp_path, data_root=data_root)


def test_a_clock_that_jumps_changes_nothing(tiny, unbroken, data_root, tmp_path, monkeypatch):
    """Back by a year and forth again, from second to second."""
    real, calls = time.time, [0]

    def jumping():
        calls[0] += 1
        return real() + (-1) ** calls[0] * 3e7

    monkeypatch.setattr(time, "time", jumping)
    config = tiny("train.wall_limit_s=600")
    jumped = train(config, tmp_path / "jumped", data_root=data_root)
    assert calls[0] > 0
    for period in ("progressive", "valid", "test"):
        assert jumped[period] == unbroken[1][period]
    assert 0 < jumped["throughput"]["step_ms_median"] < 60_000
    assert 0 <= jumped["throughput"]["data_wait_frac"] <= 1

"""The clock: every moment of the loop is in exactly one section."""

import pytest
import torch

from gem.train import clock as clock_module
from gem.train.clock import SECTIONS, StepClock


def test_sections_and_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[0])
    clock = StepClock(torch.device("cpu"))
    assert clock.median_ms() is None
    assert set(clock.fractions().values()) == {None}
    for other_s in (0.0, 5.0):  # a checkpoint after the second step
        clock.begin_step()
        for section, elapsed_s in (("forward", 1.0), ("tables", 2.0), ("optimizer", 4.0)):
            now[0] += elapsed_s / 2
            clock.mark(section)
            now[0] += elapsed_s / 2
        clock.end_step()
        now[0] += other_s
    clock.begin_step()
    # Half of each amount passed in the section before the mark.
    assert clock.seconds == {
        **{"data": 1.0, "forward": 3.0, "backward": 0.0, "tables": 6.0, "optimizer": 4.0},
        **{"checkpoint": 0.0, "evaluation": 0.0, "other": 5.0},
    }
    assert list(clock.step_ms) == [7000.0, 7000.0]
    assert sum(clock.fractions().values()) == pytest.approx(1.0)


@pytest.mark.gpu
def test_cuda_sections_are_device_time():
    device = torch.device("cuda")
    # The first kernel and the first event load their modules, which is not the time of a step.
    torch.cuda._sleep(1000)
    torch.cuda.Event(enable_timing=True).record()
    torch.cuda.synchronize()
    clock = StepClock(device)
    for _ in range(3):
        clock.begin_step()
        clock.mark("forward")
        torch.cuda._sleep(20_000_000)
        clock.mark("optimizer")
        clock.end_step()
        clock.settle()
    assert len(clock.step_ms) == 3
    assert clock.seconds["forward"] > 10 * clock.seconds["optimizer"]
    assert 1e-3 * sum(clock.step_ms) == pytest.approx(
        sum(clock.seconds[name] for name in SECTIONS if name != "other"), rel=0.2
    )

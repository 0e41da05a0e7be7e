"""Learning rates over a run."""

import pytest

from gem.train.spec import ScheduleSpec, TrainSpec, schedule_factor


def factors(spec, steps):
    return [schedule_factor(spec, step, steps) for step in range(steps)]


def test_linear_rise_and_fall():
    spec = ScheduleSpec(warmup_steps=3, decay="linear", final_frac=0.0)
    assert factors(spec, 8) == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine_ends_at_the_final_share():
    spec = ScheduleSpec(decay="cosine", final_frac=0.2)
    assert factors(spec, 5) == pytest.approx([1.0, 0.8828427, 0.6, 0.3171573, 0.2])


def test_constant_after_the_rise():
    assert factors(ScheduleSpec(warmup_steps=1, decay="constant"), 3) == [0.5, 1.0, 1.0]


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_short_runs_have_factors_between_0_and_1(steps, decay):
    spec = ScheduleSpec(warmup_steps=2, decay=decay)
    assert all(0.0 < factor <= 1.0 for factor in factors(spec, steps))


def test_window_must_be_whole_blocks():
    with pytest.raises(ValueError, match="window_steps must be a multiple of log_every_steps=20"):
        TrainSpec(log_every_steps=20, window_steps=30)

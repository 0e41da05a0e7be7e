"""A slow rank is named for being slow, not for having more work, and not for a moment."""

import numpy as np
import pytest

from gem_opkit.errors import ConfigError
from gem_parallel.balance.stragglers import StragglerWatch, _median_of_others

EVEN = [1.0] * 4
NO_WAIT = [0.0] * 4


def test_a_slow_rank_is_named_after_as_many_rows_and_told_once():
    watch = StragglerWatch(1.25, 3)
    slow = [100.0, 101.0, 150.0, 99.0]
    assert watch.judge(slow, EVEN, NO_WAIT, 400.0) == []
    assert watch.judge(slow, EVEN, NO_WAIT, 400.0) == []
    for rows in (3, 4):
        (one,) = watch.judge(slow, EVEN, NO_WAIT, 400.0)
        assert (one.rank, one.cause, one.rows) == (2, "compute", rows)
        assert one.ratio == pytest.approx(1.5)
        assert watch.is_new(one.rows) == (rows == 3)
    # One good row, and it counts from the beginning.
    assert watch.judge([100.0] * 4, EVEN, NO_WAIT, 400.0) == []
    assert watch.judge(slow, EVEN, NO_WAIT, 400.0) == []


def test_more_work_is_not_slowness():
    watch = StragglerWatch(1.25, 1)
    assert watch.judge([100, 100, 150, 100], [1, 1, 1.5, 1], NO_WAIT, 400.0) == []
    (one,) = watch.judge([100, 100, 180, 100], [1, 1, 1.2, 1], NO_WAIT, 400.0)
    assert one.ratio == pytest.approx(1.5)
    # Nor is a rank slow for its work that has less of it and needs as long as the others.
    assert watch.judge([100, 100, 100, 100], [1, 1, 0.1, 1], NO_WAIT, 400.0) == []
    assert watch.judge([100, 100, 900, 100], [1, 1, 0, 1], NO_WAIT, 400.0) == []


def test_waiting_for_data_is_told_by_itself_slowest_first():
    watch = StragglerWatch(1.25, 1)
    found = watch.judge([100, 100, 100, 150], EVEN, [2.0, 242.0, 0.0, 2.0], 400.0)
    assert [(one.rank, one.cause) for one in found] == [(1, "data"), (3, "compute")]
    assert {one.cause: one.ratio for one in found} == pytest.approx({"data": 1.6, "compute": 1.5})


def test_two_ranks_are_compared_with_each_other():
    (one,) = StragglerWatch(1.5, 1).judge([10, 20], [1, 1], [0, 0], 60.0)
    assert (one.rank, one.ratio) == (1, 2.0)


def test_fractions_of_a_millisecond_are_noise():
    watch = StragglerWatch(1.25, 1)
    assert watch.judge([1.0, 1.0, 1.9, 1.0], EVEN, NO_WAIT, 10.0) == []
    assert watch.judge([1.0, 1.0, 9.0, 1.0], EVEN, NO_WAIT, 90.0, steps=9) == []
    assert len(watch.judge([1.0, 1.0, 9.0, 1.0], EVEN, NO_WAIT, 10.0)) == 1


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_median_of_others(count, rng):
    values = rng.integers(0, 5, count).astype(float)
    wanted = [np.median(np.delete(values, rank)) for rank in range(count)]
    assert _median_of_others(values).tolist() == wanted


@pytest.mark.parametrize(("ratio", "rows"), [(1.0, 3), (0.5, 3), (1.2, 0), (float("nan"), 1)])
def test_numbers_without_sense_are_refused(ratio, rows):
    with pytest.raises(ConfigError, match="must be above 1 and above 0"):
        StragglerWatch(ratio, rows)

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem.data.join import EventIndex, first_at_or_after, packed_ranges


def slow_history(users, times, user, time, max_events):
    """Positions in the files of what an example may see, by the words of the definition."""
    own = [i for i in range(len(users)) if users[i] == user and times[i] < time]
    return sorted(own, key=lambda i: times[i])[-max_events:]


def in_files(index, events):
    return events if index.order is None else index.order[events]


ids = st.integers(min_value=-(2**63), max_value=2**63 - 1)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=40),
    st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 14)), max_size=12),
    st.integers(1, 6),
)
def test_join_equals_its_definition(events, queries, max_events):
    users = np.array([u for u, _ in events], np.int64)
    times = np.array([t for _, t in events], np.int64)
    index = EventIndex(users, times)
    asked = np.array(queries, np.int64).reshape(-1, 2)
    history = index.history(asked[:, 0], asked[:, 1], max_events)
    assert len(history.offsets) == len(queries) + 1
    for row, (user, time) in enumerate(queries):
        got = in_files(index, history.events[history.offsets[row] : history.offsets[row + 1]])
        assert got.tolist() == slow_history(users, times, user, time, max_events)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=20))
def test_any_64_bit_user_and_time(events):
    users = np.array([u for u, _ in events], np.int64)
    times = np.array([t for _, t in events], np.int64)
    index = EventIndex(users, times)
    history = index.history(users, times, 100)
    for row in range(len(users)):
        got = in_files(index, history.events[history.offsets[row] : history.offsets[row + 1]])
        assert got.tolist() == slow_history(users, times, users[row], times[row], 100)


def test_events_at_the_time_of_the_example_are_not_seen():
    index = EventIndex(np.array([1, 1, 1]), np.array([5, 6, 7]))
    assert index.history(np.array([1]), np.array([6]), 9).events.tolist() == [0]


def test_equal_times_keep_file_order():
    users, times = np.array([2, 1, 2, 1, 2]), np.array([3, 3, 3, 3, 1])
    index = EventIndex(users, times)
    history = index.history(np.array([2, 1]), np.array([4, 4]), 9)
    assert in_files(index, history.events).tolist() == [4, 0, 2, 1, 3]


def test_sorted_log_is_not_copied():
    times = np.array([1, 2, 1])
    index = EventIndex(np.array([1, 1, 2]), times)
    assert index.order is None
    assert index.times is times


def test_log_without_events():
    index = EventIndex(np.empty(0, np.int64), np.empty(0, np.int64))
    history = index.history(np.array([1, 2]), np.array([1, 2]), 3)
    assert history.lengths.tolist() == [0, 0]


def test_no_examples():
    index = EventIndex(np.array([1]), np.array([1]))
    history = index.history(np.empty(0, np.int64), np.empty(0, np.int64), 3)
    assert history.offsets.tolist() == [0]
    assert len(history.events) == 0


@pytest.mark.parametrize("when", range(-1, 6))
def test_bisection_of_many_ranges(when):
    times = np.array([0, 2, 2, 4, 1, 3])
    first, end = np.array([0, 4, 2, 6]), np.array([4, 6, 2, 6])
    got = first_at_or_after(times, first, end, np.full(4, when))
    expected = [
        next((p for p in range(a, b) if times[p] >= when), b)
        for a, b in zip(first, end, strict=True)
    ]
    assert got.tolist() == expected


def test_packed_ranges():
    assert packed_ranges(np.array([5, 9, 0]), np.array([0, 2, 2, 5])).tolist() == [5, 6, 0, 1, 2]

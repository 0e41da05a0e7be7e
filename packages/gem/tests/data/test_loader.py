import threading
import time

import pytest

from gem.data.loader import Prefetcher
from gem_opkit.errors import ConfigError


def test_order_and_content_are_kept():
    with Prefetcher(range(50), depth=3) as batches:
        assert list(batches) == list(range(50))
        assert list(batches) == []


def test_nothing_to_read():
    with Prefetcher([]) as batches:
        assert list(batches) == []


def test_error_arrives_after_the_batches_before_it():
    def broken():
        yield 1
        yield 2
        raise ValueError("row 3 is broken")

    seen = []
    with Prefetcher(broken()) as batches, pytest.raises(ValueError, match="row 3 is broken"):
        for batch in batches:
            seen.append(batch)
    assert seen == [1, 2]


def test_reads_no_further_ahead_than_its_depth():
    made = []

    def counted():
        for i in range(100):
            made.append(i)
            yield i

    with Prefetcher(counted(), depth=4) as batches:
        assert next(batches) == 0
        time.sleep(0.05)
        # One given, four ready; the thread stands still inside the generator after the last.
        assert len(made) <= 6


def test_leaving_early_ends_the_thread_and_closes_the_generator():
    closed = threading.Event()

    def endless():
        try:
            while True:
                yield 0
        finally:
            closed.set()

    before = threading.active_count()
    with Prefetcher(endless(), depth=2) as batches:
        next(batches)
    assert closed.is_set()
    assert threading.active_count() == before
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)


def test_error_after_the_loop_has_left_is_not_raised():
    started = threading.Event()

    def broken():
        yield 0
        started.set()
        raise ValueError("too late")

    with Prefetcher(broken()) as batches:
        next(batches)
        started.wait(5)


def test_waiting_is_measured():
    def slow():
        time.sleep(0.05)
        yield 0

    with Prefetcher(slow()) as batches:
        assert list(batches) == [0]
    assert 0.03 < batches.waited_s < 5


def test_refuses_no_depth():
    with pytest.raises(ConfigError, match="depth must be > 0; got 0"):
        Prefetcher([], depth=0)

"""The line before a ranker: bounded, together where that pays, and answered to the last."""

import threading
from concurrent.futures import wait

import pytest

from gem.serving.limits import QueueLimits, limits_named
from gem.serving.queue import Overloaded, ScoreQueue
from gem.serving.request import RequestError, ScoreAnswer, ScoreRequest
from gem_opkit.errors import ConfigError


def ask(user: int) -> ScoreRequest:
    return ScoreRequest(user=user, candidates={"item": [1]})


class Scores:
    """Scores that wait until they may go on; remembers what was scored together."""

    def __init__(self) -> None:
        self.go, self.began, self.batches = threading.Event(), threading.Event(), []

    def __call__(self, requests):
        self.began.set()
        self.batches.append([request.user for request in requests])
        assert self.go.wait(20)
        return [
            RequestError("no") if r.user < 0 else ScoreAnswer(scores={}, fingerprint=str(r.user))
            for r in requests
        ]


def test_a_full_line_refuses_at_once_and_serves_who_waits():
    scores = Scores()
    with ScoreQueue(scores, QueueLimits(max_waiting=3, max_batch=2)) as line:
        first = line.put(ask(0))
        assert scores.began.wait(20)
        waiting = [line.put(ask(user)) for user in (1, 2, 3)]
        # Nothing is scored before `go`: a refusal that waited for it would not come.
        with pytest.raises(Overloaded, match="3 requests are waiting"):
            line.put(ask(4))
        scores.go.set()
        wait([first, *waiting], timeout=20)
        assert [future.result().fingerprint for future in (first, *waiting)] == list("0123")
    assert scores.batches == [[0], [1, 2], [3]]
    assert (line.scored, line.refused, line.waiting) == (4, 1, 0)


def test_an_end_answers_who_waits_and_takes_nobody_else():
    scores = Scores()
    line = ScoreQueue(scores, QueueLimits())
    with line:
        futures = [line.put(ask(user)) for user in range(5)]
        scores.go.set()
    assert all(future.done() for future in futures)
    with pytest.raises(Overloaded, match="it is ending"):
        line.put(ask(9))


def test_a_bad_request_is_told_to_who_asked_it_alone():
    scores = Scores()
    scores.go.set()
    with ScoreQueue(scores, QueueLimits(max_wait_ms=200.0)) as line:
        good, bad = line.put(ask(1)), line.put(ask(-1))
        assert good.result(20).fingerprint == "1"
        with pytest.raises(RequestError, match="no"):
            bad.result(20)
    assert scores.batches == [[1, -1]]
    assert line.scored == 1


def test_answers_that_are_missing_are_told_and_the_line_goes_on():
    answer = ScoreAnswer(scores={}, fingerprint="1")
    with ScoreQueue(lambda requests: [answer] * (requests[0].user != 0), QueueLimits()) as line:
        with pytest.raises(RuntimeError, match="must answer each request; got 0 answers for 1"):
            line.put(ask(0)).result(20)
        assert line.put(ask(1)).result(20).fingerprint == "1"
        assert (line.scored, line.failed, line.state) == (1, 1, "ok")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_the_thread_ends_by_a_fault_nobody_waits_and_nobody_joins():
    began, go = threading.Event(), threading.Event()

    def ends(_):
        began.set()
        assert go.wait(20)
        raise KeyboardInterrupt  # beyond what a fault of one request can be

    with ScoreQueue(ends, QueueLimits(max_batch=1)) as line:
        asked = [line.put(ask(0))]
        assert began.wait(20)
        asked += [line.put(ask(user)) for user in (1, 2)]
        gone = line.put(ask(3))
        assert gone.cancel()
        go.set()
        for future in asked:
            with pytest.raises(Overloaded, match="no scoring any more, since a KeyboardInterrupt"):
                future.result(20)
        with pytest.raises(Overloaded, match="no scoring any more"):
            line.put(ask(4))
        assert (line.state, line.is_open, line.failed, line.waiting) == ("failed", False, 3, 0)


def test_a_fault_is_told_and_the_line_goes_on():
    calls = []

    def once(requests):
        calls.append(len(requests))
        if len(calls) == 1:
            raise MemoryError("too much")
        return [ScoreAnswer(scores={}, fingerprint="x") for _ in requests]

    with ScoreQueue(once, QueueLimits()) as line:
        with pytest.raises(MemoryError):
            line.put(ask(1)).result(20)
        assert line.put(ask(2)).result(20).fingerprint == "x"


def test_who_has_gone_is_not_scored_for():
    scores = Scores()
    with ScoreQueue(scores, QueueLimits(max_batch=1)) as line:
        first = line.put(ask(0))
        assert scores.began.wait(20)
        gone, stays = line.put(ask(1)), line.put(ask(2))
        assert gone.cancel()
        scores.go.set()
        assert stays.result(20).fingerprint == "2"
        assert first.done()
    assert scores.batches == [[0], [2]]


def test_limits_are_read_by_name():
    sizes, spec = limits_named(
        ["max_candidates=5", "max_wait_ms=1.5", "max_body_bytes=99"], host="h", port=1
    )
    assert (sizes.max_candidates, spec.queue.max_wait_ms, spec.max_body_bytes) == (5, 1.5, 99)
    for word, said in (
        ("max_candidate=5", "did you mean 'max_candidates'?"),
        ("max_batch", "must be NAME=VALUE"),
        ("max_batch=0", "--limit max_batch must be a number in its range; got '0'"),
        ("max_events=many", "--limit max_events must be"),
    ):
        with pytest.raises(ConfigError, match="--limit") as fault:
            limits_named([word], host="h", port=1)
        assert said in str(fault.value)

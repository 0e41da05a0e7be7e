"""Requests that wait to be scored together, in a line of bounded length.

One thread scores. It takes what waits, up to a number of requests, and waits a moment for more
where there are few: a pass over two requests costs less than two passes. A line that is full
refuses at once: who comes later than can be answered learns so while it can still ask elsewhere.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

from gem.serving.limits import QueueLimits
from gem.serving.request import RequestError, ScoreAnswer, ScoreRequest
from gem_opkit.errors import GemError


class Overloaded(GemError):
    """The line is full, or takes nobody any more."""


_Scores = Callable[[Sequence[ScoreRequest]], Sequence[ScoreAnswer | Exception]]
_Waiting = tuple[ScoreRequest, "Future[ScoreAnswer]"]


class ScoreQueue:
    """A line before a function that scores several requests at once. Use it in a ``with`` block.

    Args:
        score: gives each request its answer, or why there is none; called by one thread.
        limits: of the line.

    Attributes:
        scored: requests answered with scores.
        refused: requests that found no room.
        failed: requests without an answer by a fault that is not theirs.
    """

    def __init__(self, score: _Scores, limits: QueueLimits) -> None:
        self._score, self._limits = score, limits
        self._line: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._open, self._ended_by = True, ""
        self._thread = threading.Thread(target=self._work, name="gem-score", daemon=True)
        self.scored = self.refused = self.failed = 0

    def __enter__(self) -> "ScoreQueue":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether requests may join the line, if it has room."""
        return self._open

    @property
    def state(self) -> Literal["ok", "ending", "failed"]:
        """ok; ending, once closed; failed, once the thread that scores has ended by a fault."""
        return "failed" if self._ended_by else "ok" if self._open else "ending"

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    def put(self, request: ScoreRequest) -> "Future[ScoreAnswer]":
        """Join the line.

        Args:
            request: of a size that is allowed.

        Returns:
            its answer, once there is one; or what says why not: a `RequestError`, a fault of the
            ranker, or `Overloaded` where scoring ends before its turn.

        Raises:
            Overloaded: the line is full, or closed.
        """
        future: Future[ScoreAnswer] = Future()
        with self._changed:
            if not self._open or len(self._line) >= self._limits.max_waiting:
                self.refused += 1
                raise self._overloaded()
            self._line.append((request, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Take no more requests, answer those in line, and end."""
        with self._changed:
            self._open = False
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _overloaded(self) -> Overloaded:
        why = "it is ending" if not self._open else f"{len(self._line)} requests are waiting"
        if self._ended_by:
            why = f"no scoring any more, since a {self._ended_by}"
        return Overloaded(
            f"gem serve: the line must have room; got {why}; try again later, or elsewhere"
        )

    def _work(self) -> None:
        taken: list[_Waiting] = []
        try:
            while taken := self._next():
                self._answer(taken)
        except BaseException as fault:
            # The thread ends: nobody may wait for it, nobody may join, and whoever asks learns.
            with self._changed:
                self._open, self._ended_by = False, type(fault).__name__
                left = [future for _, future in (*taken, *self._line) if not future.done()]
                self._line.clear()
            self.failed += len(left)
            for future in left:
                if future.running() or future.set_running_or_notify_cancel():
                    future.set_exception(self._overloaded())
            raise

    def _answer(self, taken: Sequence[_Waiting]) -> None:
        # Who has gone meanwhile is not scored for.
        alive = [(r, f) for r, f in taken if f.set_running_or_notify_cancel()]
        answers: Sequence[ScoreAnswer | Exception]
        try:
            answers = self._score([request for request, _ in alive]) if alive else []
            if len(answers) != len(alive):
                raise RuntimeError(
                    f"the ranker must answer each request; got {len(answers)} answers for "
                    f"{len(alive)} requests; report it"
                )
        except Exception as fault:  # noqa: BLE001 - told to each that waits, who re-raises it
            answers = [fault] * len(alive)
        for (_, future), answer in zip(alive, answers, strict=True):
            if isinstance(answer, Exception):
                self.failed += not isinstance(answer, RequestError)
                future.set_exception(answer)
            else:
                self.scored += 1
                future.set_result(answer)

    def _next(self) -> list[_Waiting]:
        """The next requests to score together; none once the line is closed and empty."""
        limits = self._limits
        with self._changed:
            self._changed.wait_for(lambda: self._line or not self._open)
            until = time.monotonic() + limits.max_wait_ms / 1000.0
            while self._open and len(self._line) < limits.max_batch:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            count = min(len(self._line), limits.max_batch)
            return [self._line.popleft() for _ in range(count)]

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

from gem.serving.limits import QueueLimits
from gem.serving.request import RequestError, ScoreAnswer, ScoreRequest
from gem_opkit.errors import GemError


class Overloaded(GemError):
    """The line is full, or ends."""


_Scores = Callable[[Sequence[ScoreRequest]], Sequence[ScoreAnswer | RequestError]]


class ScoreQueue:
    """A line before a function that scores several requests at once. Use it in a ``with`` block.

    Args:
        score: gives each request its answer, or why there is none; called by one thread.
        limits: of the line.

    Attributes:
        scored: requests answered with scores.
        refused: requests that found no room.
    """

    def __init__(self, score: _Scores, limits: QueueLimits) -> None:
        self._score, self._limits = score, limits
        self._line: deque[tuple[ScoreRequest, Future[ScoreAnswer]]] = deque()
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._work, name="gem-score", daemon=True)
        self.scored = self.refused = 0

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
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    def put(self, request: ScoreRequest) -> "Future[ScoreAnswer]":
        """Join the line.

        Args:
            request: of a size that is allowed.

        Returns:
            its answer, once there is one; or the `RequestError` that says why not.

        Raises:
            Overloaded: the line is full, or closed.
        """
        future: Future[ScoreAnswer] = Future()
        with self._changed:
            if not self._open or len(self._line) >= self._limits.max_waiting:
                self.refused += 1
                why = f"{len(self._line)} requests are waiting" if self._open else "it is ending"
                raise Overloaded(
                    f"gem serve: the line must have room; got {why}; try again later, or elsewhere"
                )
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

    def _work(self) -> None:
        while taken := self._next():
            # Who has gone meanwhile is not scored for.
            alive = [(r, f) for r, f in taken if f.set_running_or_notify_cancel()]
            try:
                answers = self._score([request for request, _ in alive]) if alive else []
                answered = list(zip(alive, answers, strict=True))
            except Exception as fault:  # noqa: BLE001 - told to each that waits, who re-raises it
                for _, future in alive:
                    future.set_exception(fault)
                continue
            for (_, future), answer in answered:
                if isinstance(answer, RequestError):
                    future.set_exception(answer)
                else:
                    self.scored += 1
                    future.set_result(answer)

    def _next(self) -> "list[tuple[ScoreRequest, Future[ScoreAnswer]]]":
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

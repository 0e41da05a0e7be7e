"""Batches made ahead of time by a background thread."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from gem_opkit.errors import ConfigError, refusal

Batch = TypeVar("Batch")


class Prefetcher(Generic[Batch]):
    """Iterates over batches that a thread makes ahead of time.

    Order and content are those of the iterable. An error in it is raised in the loop that reads,
    after the batches before it. Leaving the `with` block, or `close`, ends the thread, wherever
    it is, and closes the iterable if it is a generator.

    Attributes:
        waited_s: seconds that the reading loop has waited for batches so far.

    Args:
        batches: what is read ahead; used by the thread alone from now on.
        depth: how many batches may lie ready, > 0.

    Raises:
        ConfigError: a depth below 1.
    """

    def __init__(self, batches: Iterable[Batch], *, depth: int = 8) -> None:
        if depth < 1:
            raise ConfigError(
                refusal("Prefetcher", "depth", must="be > 0", got=depth, fix="raise it")
            )
        self.waited_s = 0.0
        self._depth = depth
        self._ready: deque[Batch] = deque()
        self._fault: BaseException | None = None
        self._ended = self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._work, args=(batches,), name="gem-prefetch", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> "Prefetcher[Batch]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._stopped)
            self.waited_s += time.perf_counter() - started
            if self._ready and not self._stopped:
                batch = self._ready.popleft()
                self._changed.notify_all()
                return batch
        self._thread.join()
        fault, self._fault = self._fault, None
        if fault is not None and not self._stopped:
            raise fault
        raise StopIteration

    def close(self) -> None:
        """End the thread and drop what lies ready. May be called twice."""
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _work(self, batches: Iterable[Batch]) -> None:
        iterator = iter(batches)
        try:
            for batch in iterator:
                with self._changed:
                    self._ready.append(batch)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: len(self._ready) < self._depth or self._stopped)
                    if self._stopped:
                        break
        except BaseException as fault:  # noqa: BLE001 - raised again in the loop that reads
            self._fault = fault
        finally:
            self._finish(iterator)

    def _finish(self, iterator: Iterator[Batch]) -> None:
        try:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

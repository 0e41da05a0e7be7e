"""Runs beside each other, each in a process of its own, that end with the command that began them.

A SIGTERM reaches the command alone, and its processes would train on, on a GPU that somebody else
has by then. So they are told as well: a training run then writes a checkpoint and ends. Imports no
torch.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol


class Child(Protocol):
    """A process, of `subprocess` or of `multiprocessing`."""

    def terminate(self) -> None:
        """Send SIGTERM."""


class Children:
    """The processes of a command, each waited for by a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Child] = set()
        self._ended = False

    @contextmanager
    def running(self, child: Child) -> Iterator[None]:
        """Know a process for the length of a ``with`` block.

        Args:
            child: started; its end is waited for in the block.
        """
        with self._lock:
            self._running.add(child)
            too_late = self._ended
        if too_late:
            child.terminate()
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(child)

    def terminate(self) -> None:
        """Send SIGTERM to all that run, and to each that starts from now on."""
        with self._lock:
            self._ended = True
            running = list(self._running)
        for child in running:
            child.terminate()


@contextmanager
def threads_of(children: Children, jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that each wait for a process, for the length of a ``with`` block.

    At its end all of them are waited for. Where the command is stopped, by Ctrl-C or SIGTERM, the
    processes are stopped first, and what has not begun does not begin.

    Args:
        children: that the threads tell of their processes.
        jobs: how many threads.
    """
    pool = ThreadPoolExecutor(jobs)
    try:
        yield pool
    except Exception:
        pool.shutdown()
        raise
    except BaseException:
        children.terminate()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()

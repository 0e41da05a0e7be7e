"""Ctrl-C while nothing is at stake: the process ends on the spot. Imports next to nothing."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import NoReturn


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal by one word on stderr and the end of the process.

    Args:
        number: the signal.
        frame: where it came; not looked at.
    """
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, b"interrupted\n")
    os._exit(128 + number)


class NotedInterrupt:
    """Ctrl-C raises KeyboardInterrupt, as usual, and is remembered, for the length of a block.

    In the middle of an import, or of somebody's blind ``except``, it can come out as another error.

    Attributes:
        came: whether there was one.
    """

    def __init__(self) -> None:
        self.came = False

    def __enter__(self) -> "NotedInterrupt":
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> NoReturn:
        self.came = True
        raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process on the spot for the length of a ``with`` block.

    Meant for imports: an exception in the middle of one can be swallowed, or come out as another.
    A signal that is ignored stays so, as in a job that a shell put into the background; and outside
    the main thread nothing is changed, as Python allows it only there.
    """
    before = signal.getsignal(signal.SIGINT)
    main_thread = threading.current_thread() is threading.main_thread()
    if before in (signal.SIG_IGN, None) or not main_thread:
        yield
        return
    signal.signal(signal.SIGINT, end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""A polite stop: a signal asks the run to end after its step, with a checkpoint."""

import signal
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A run ended early on a signal, after writing a checkpoint: no error, it can go on.

    Args:
        signal_number: the signal.
        step: steps done.
    """

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by signal {signal_number} after step {step}")
        self.signal_number = signal_number
        self.step = step


class StopRequest:
    """Catches SIGINT and SIGTERM for the length of a ``with`` block.

    The first signal is only noted. A second SIGINT interrupts at once, as usual. Outside the main
    thread nothing is caught, as Python allows it only there.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type] - what signal() returned

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number

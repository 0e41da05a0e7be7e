"""A polite stop: a signal asks the run to end after its step, with a checkpoint."""

import signal
import threading
import time
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_KEYPRESS_S = 1.0


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

    The first signal is only noted. A SIGINT more than a second after it interrupts at once, as
    usual; an earlier one is the same Ctrl-C, which a terminal sends to every process and
    ``torchrun`` passes on once more. Outside the main thread nothing is caught, as Python allows
    it only there.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._noted_s = 0.0
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
        now = time.monotonic()
        if not self.signal_number:
            self.signal_number, self._noted_s = number, now
        elif number == signal.SIGINT and now - self._noted_s > _SAME_KEYPRESS_S:
            raise KeyboardInterrupt

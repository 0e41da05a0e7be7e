"""A polite stop: a signal or the time limit asks a run to end after its step, with a checkpoint.

Times are monotonic: setting the clock of the machine changes nothing.
"""

import contextlib
import os
import signal
import threading
import time
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_KEYPRESS_S = 1.0
# In place of the number of a signal.
TIME_IS_UP = 1000
# Share of the limit that is kept back at least.
_LEAST_RESERVE = 0.02


class Interrupted(Exception):
    """A run ended early, with a checkpoint of all that it has done: no error, it can go on.

    Args:
        reason: number of the signal, or ``TIME_IS_UP``.
        step: steps done.
    """

    def __init__(self, reason: int, step: int) -> None:
        why = "the time limit" if reason == TIME_IS_UP else f"signal {reason}"
        super().__init__(f"stopped by {why} after step {step}")
        self.reason = reason
        self.step = step


class StopRequest:
    """Catches SIGINT and SIGTERM for the length of a ``with`` block, and watches a time limit.

    The first signal is only noted. A second SIGTERM ends the process at once, and a second SIGINT
    interrupts, as usual. Within a second of the first one it is the same Ctrl-C, which a terminal
    sends to every process and ``torchrun`` passes on once more; under ``torchrun`` that holds for
    SIGTERM as well. Outside the main thread nothing is caught, as Python allows it only there.

    Args:
        wall_limit_s: seconds from now on after which the run shall have ended; None: no limit.

    Attributes:
        signal_number: the signal that came; 0 before.
        write_s: seconds that a checkpoint takes; kept up to date by the loop.
    """

    def __init__(self, wall_limit_s: float | None = None) -> None:
        self.signal_number = 0
        self.write_s = 0.0
        self._limit_s = wall_limit_s
        self._began_s = self._asked_s = time.monotonic()
        self._longest_s = self._noted_s = 0.0
        self._before: dict[int, object] = {}

    def reason(self) -> int:
        """Why the run has to end now; to be asked after every step.

        Returns:
            The number of the signal, ``TIME_IS_UP``, or 0 to go on. Time is up when another step
            as long as the longest so far, and then a checkpoint of twice the time of the slowest
            one, would not end before the limit.
        """
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self._asked_s)
        self._asked_s = now
        if self.signal_number or self._limit_s is None:
            return self.signal_number
        reserve_s = max(self._longest_s + 2.0 * self.write_s, _LEAST_RESERVE * self._limit_s)
        return TIME_IS_UP if now - self._began_s + reserve_s >= self._limit_s else 0

    def __enter__(self) -> "StopRequest":
        # What came before is no step: to read the data of a large log takes longer than any.
        self._asked_s = time.monotonic()
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
            return
        same = now - self._noted_s <= _SAME_KEYPRESS_S
        if number == signal.SIGINT and not same:
            raise KeyboardInterrupt
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        if number == signal.SIGTERM and not (same and launched):
            with contextlib.suppress(OSError):
                os.write(2, b"terminated at once; continue with --resume\n")
            os._exit(128 + signal.SIGTERM)

"""Where the time of a training loop goes, by sections that follow one another.

On a CPU a mark reads the clock. On CUDA a mark records an event and never waits; `settle` reads
the events once the device has passed them. Waiting for data is host time in both cases.
"""

import time
from collections import deque
from statistics import median

import torch

# tables: lookups, exchange of their gradients, their optimizer. checkpoint: copying the state and
# waiting for a write that is under way. evaluation: while training. other: metrics and logs.
SECTIONS = (
    *("data", "forward", "backward", "tables", "optimizer"),
    *("checkpoint", "evaluation", "other"),
)
# Newest steps whose times the median is of.
_STEPS_KEPT = 100_000


class StepClock:
    """Accumulates the seconds of each section, and the time of each step.

    Args:
        device: where the steps run.

    Attributes:
        seconds: section -> seconds so far.
        step_ms: times of the newest steps.
        named_in_trace: whether sections are ranges in a profiler's trace; costs some time.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(SECTIONS, 0.0)
        self.step_ms: deque[float] = deque(maxlen=_STEPS_KEPT)
        self.named_in_trace = False
        self._range: torch.profiler.record_function | None = None
        self._cuda = device.type == "cuda"
        self._section: str | None = None
        self._since = self._step_since = 0.0
        # Section that begins, whether a step ends there, and when.
        self._events: list[tuple[str, bool, torch.cuda.Event]] = []

    def mark(self, section: str, *, step_ends: bool = False) -> None:
        """End the section that runs, if any, and begin another one.

        Args:
            section: one of ``SECTIONS``.
            step_ends: whether this is the end of a step.
        """
        now = time.perf_counter()
        if self._section is not None and (not self._cuda or self._section == "data"):
            self.seconds[self._section] += now - self._since
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((section, step_ends, event))
        self._section, self._since = section, now
        if self.named_in_trace or self._range is not None:
            self._name_range(section)

    def _name_range(self, section: str) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self.named_in_trace:
            self._range = torch.profiler.record_function(f"gem: {section}")
            self._range.__enter__()

    def begin_step(self) -> None:
        """Begin a step with its wait for data."""
        self.mark("data")
        self._step_since = self._since

    def end_step(self) -> None:
        """End a step. What follows until the next one, such as a checkpoint, is other time."""
        self.mark("other", step_ends=True)
        if not self._cuda:
            self.step_ms.append(1e3 * (self._since - self._step_since))

    def settle(self) -> None:
        """Read the events of the CUDA steps since the last call. Waits for the device."""
        if not self._events:
            return
        self._events[-1][2].synchronize()
        step_begins = None
        for (section, _, begin), (_, step_ends, end) in zip(
            self._events, self._events[1:], strict=False
        ):
            if section == "data":
                step_begins = begin
            else:
                self.seconds[section] += 1e-3 * begin.elapsed_time(end)
            if step_ends and step_begins is not None:
                self.step_ms.append(step_begins.elapsed_time(end))
        del self._events[:-1]

    def median_ms(self) -> float | None:
        """Median time of a step, milliseconds; None before the first."""
        return median(self.step_ms) if self.step_ms else None

    def fractions(self) -> dict[str, float | None]:
        """Share of the time that each section took; None before the first step."""
        total = sum(self.seconds.values())
        return {name: s / total if total else None for name, s in self.seconds.items()}

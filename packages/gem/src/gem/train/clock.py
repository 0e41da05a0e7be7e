"""Where the time of a step goes, by sections that follow one another.

On a CPU a mark reads the clock. On CUDA a mark records an event and never waits; `settle` reads
the events once the device has passed them. Waiting for data is host time in both cases.
"""

import time
from collections import deque
from statistics import median

import torch

SECTIONS = ("data", "model", "tables", "optimizer", "other")
# Newest steps whose times the median is of.
_STEPS_KEPT = 100_000


class StepClock:
    """Accumulates the seconds of each section and of each step.

    Args:
        device: where the steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(SECTIONS, 0.0)
        self.step_ms: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._cuda = device.type == "cuda"
        self._section: str | None = None
        self._since = 0.0
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._step_since = 0.0

    def mark(self, section: str) -> None:
        """End the section that runs, if any, and begin another one.

        Args:
            section: one of ``SECTIONS``.
        """
        now = time.perf_counter()
        if self._section is not None and (not self._cuda or self._section == "data"):
            self.seconds[self._section] += now - self._since
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((section, event))
        self._section, self._since = section, now

    def begin_step(self) -> None:
        """Begin a step with its wait for data."""
        self.mark("data")
        self._step_since = time.perf_counter()

    def cancel_step(self) -> None:
        """Undo `begin_step` where no batch came."""
        self._section = None
        if self._cuda:
            self._events.pop()

    def end_step(self) -> None:
        """End a step; what follows, such as a checkpoint, belongs to none."""
        self.mark("other")
        self._section = None
        if self._cuda:
            self._events.append(("", self._events.pop()[1]))
        else:
            self.step_ms.append(1e3 * (time.perf_counter() - self._step_since))

    def settle(self) -> None:
        """Read the events of finished CUDA steps. Call it where the device is waited for anyway."""
        if not self._events:
            return
        self._events[-1][1].synchronize()
        step_ms = 0.0
        for (section, begin), (_, end) in zip(self._events, self._events[1:], strict=False):
            if not section:  # between steps
                continue
            elapsed_ms = begin.elapsed_time(end)
            step_ms += elapsed_ms
            if section != "data":
                self.seconds[section] += 1e-3 * elapsed_ms
        steps = sum(1 for section, _ in self._events if not section)
        if steps:
            # The steps between two settlings are alike; their mean is what is known of each.
            self.step_ms.extend([step_ms / steps] * steps)
        self._events.clear()

    def median_ms(self) -> float | None:
        """Median time of a step, milliseconds; None before the first."""
        return median(self.step_ms) if self.step_ms else None

    def fractions(self) -> dict[str, float | None]:
        """Share of the time of all steps that each section took; None before the first step."""
        total = sum(self.seconds.values())
        return {name: s / total if total else None for name, s in self.seconds.items()}

"""A trace of a few steps for chrome://tracing or Perfetto, of `gem train --profile`."""

import json
import logging
from pathlib import Path
from types import TracebackType

import torch

from gem.train.run import Run

_log = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"
# The first steps load kernels and fill caches.
_BEFORE, _STEPS = 3, 3


class Trace:
    """Records a few steps of this process. To be used in a ``with`` block around the steps.

    The file is ``profile/trace-rank-R.json`` in the run's folder. Sections of a step are ranges in
    it, by the names of the log's ``time_frac``.

    Args:
        run: whose steps they are.
        wanted: False: nothing is recorded.
    """

    def __init__(self, run: Run, *, wanted: bool) -> None:
        self._run = run
        self._left = _BEFORE + _STEPS if wanted else 0
        self._profile: torch.profiler.profile | None = None
        self.path: Path = run.folder / PROFILE_FOLDER / f"trace-rank-{run.world.rank}.json"

    def step(self) -> None:
        """Begin or end the recording where it is time. To be called after each step."""
        if not self._left:
            return
        self._left -= 1
        if self._left == _STEPS:
            self._begin()
        elif self._left == 0:
            self._end()

    def _begin(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._run.world.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=kinds)
        self._profile.start()
        self._run.clock.named_in_trace = True

    def _end(self) -> None:
        self._run.clock.named_in_trace = False
        self._run.clock.mark("other")  # ends the range that is open
        if self._profile is None:
            self._run.display.stage("no trace: the run was too short")
            return
        profile, self._profile = self._profile, None
        partial = self.path.with_name(f".{self.path.name}")
        try:
            profile.stop()
            self.path.parent.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(partial))
            # torch says nothing of a full disk: what is there tells.
            json.loads(partial.read_text(encoding="utf-8"))
            partial.rename(self.path)
        except (OSError, RuntimeError, ValueError) as fault:  # no reason to lose the run
            for left in self.path.parent.glob(f"{partial.name}*"):
                left.unlink()
            _log.warning("%s cannot be written (%s): the run goes on", self.path, fault)
            return
        self._run.display.stage(f"trace of {_STEPS} steps: {self.path}")

    def __enter__(self) -> "Trace":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._left and (kind is None or self._profile is not None):
            self._left = 0
            self._end()

"""The checkpoints that a run has kept, each with the time from which it may be asked.

A checkpoint has learned from the labels of the rows before it, which are known a while after them.
Asked at that time or later, it tells nothing that was not known then.
"""

from dataclasses import dataclass
from pathlib import Path

from gem.train.checkpoint import load_checkpoint, newest_first
from gem.train.checkpoint_manifest import read_manifest
from gem.train.run import Run
from gem.train.run_folder import CHECKPOINTS
from gem_opkit.errors import DataError, UnsupportedError, refusal


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checkpoint in time.

    Attributes:
        step: steps done.
        from_ms: every label that it has learned from is known by then.
        folder: where it lies.
    """

    step: int
    from_ms: int
    folder: Path


def snapshots(run: Run, command: str) -> list[Snapshot]:
    """List the complete checkpoints of a run, the oldest first.

    Args:
        run: opened.
        command: who asks, for messages.

    Returns:
        at least one.

    Raises:
        UnsupportedError: the run read its rows more than once, so that every checkpoint of a later
            pass has seen them all.
        DataError: no complete checkpoint.
    """
    if run.spec.passes > 1:
        raise UnsupportedError(
            refusal(
                command,
                "train.passes",
                must="be 1, so that a checkpoint knows nothing of later rows",
                got=run.spec.passes,
                fix="train the run in one pass",
            )
        )
    times = run.reader.times_ms("train")
    delay_ms = max(label.visible_after_ms for label in run.reader.dataset.examples.labels)
    found = []
    for folder, whole in newest_first(run.folder / CHECKPOINTS):
        step = read_manifest(folder)["step"] if whole else 0
        if step:
            last = min(step * run.spec.batch_examples, len(times)) - 1
            found.append(Snapshot(step, int(times[last]) + delay_ms, folder))
    if not found:
        raise DataError(
            refusal(
                command,
                "RUN",
                must="have a complete checkpoint",
                got=run.folder,
                fix="train it first",
            )
        )
    return sorted(found, key=lambda each: each.step)


class Loaded:
    """The weights of one snapshot at a time.

    Args:
        run: whose model they are put into.
        step: the step that it holds now.
    """

    def __init__(self, run: Run, step: int) -> None:
        self._run, self._step = run, step

    def put(self, snapshot: Snapshot) -> None:
        """Load a snapshot, unless the model holds it.

        Args:
            snapshot: of the same run.

        Raises:
            DataError: it is damaged.
        """
        if snapshot.step != self._step:
            load_checkpoint(snapshot.folder, self._run.state, self._run.world)
            self._step = snapshot.step


def newest_before(found: list[Snapshot], time_ms: int) -> Snapshot:
    """Pick the newest snapshot that may be asked at a time.

    Args:
        found: the oldest first; the first of them may be asked.
        time_ms: when.
    """
    return max((each for each in found if each.from_ms <= time_ms), key=lambda each: each.step)

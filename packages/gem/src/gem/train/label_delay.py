"""Training that waits for labels: a row is scored at its time and trained on once it is answered.

A click is known a minute after the impression, a purchase days later. A log that is replayed holds
both at once, so that a run would learn from answers that nobody has yet, and its progressive
metrics would be those of a model that cannot be had. With ``train.label_delay = "wait"`` a batch is
trained on once the longest ``visible_after_ms`` of the labels has passed since its last row, and
every batch that begins before that moment has been scored by then, by the weights of that moment:

    time    ──  b0  b1  b2  b3  b4 ...
    scored      b0  b1  b2  b3  b4          a label takes as long as three batches
    trained                 b0  b1 ...

What would be answered only after the first row behind the training rows is never trained on. Rows
keep their order, and each is trained on once, so a step's work is as without the wait; scoring is a
forward pass of its own.

Left out: several passes, in which a row waits for nothing any more; and labels that are believed to
be negative until they come, whose loss would have to be put right afterwards.
"""

from dataclasses import dataclass

import numpy as np

from gem.data.reader import Reader
from gem.train.spec import TrainSpec
from gem_opkit.errors import DataError, refusal


@dataclass(frozen=True, slots=True)
class Wait:
    """When the batches of a pass are trained on.

    Attributes:
        scored_S: how many batches have been scored before each step, int64; one element a step.
        batches: of the whole pass, all of which are scored.
        delay_ms: after which a row's labels are known.
    """

    scored_S: np.ndarray
    batches: int
    delay_ms: int

    @property
    def steps(self) -> int:
        """Batches that are trained on."""
        return len(self.scored_S)


def waits(times_N: np.ndarray, batch_size: int, delay_ms: int, behind_ms: int | None) -> Wait:
    """Say what is scored before each step.

    Args:
        times_N: of the training rows, milliseconds, int64, not falling.
        batch_size: rows of a batch.
        delay_ms: from a row to its labels; 0 and 1 both mean: known to rows strictly later.
        behind_ms: time of the first row behind them; None where there is none.

    Returns:
        the plan. A batch that begins when another one's labels have come is scored after that one
        has been trained on.
    """
    begins = np.arange(0, len(times_N), batch_size)
    ends = np.minimum(begins + batch_size, len(times_N)) - 1
    # A label that comes at once is known to rows of a later time alone, as in statistics.
    known_S = times_N[ends] + max(delay_ms, 1)
    scored_S = np.searchsorted(times_N[begins], known_S, side="left")
    scored_S = np.maximum(scored_S, np.arange(1, len(begins) + 1))  # its own rows at the least
    steps = (
        len(begins) if behind_ms is None else int(np.searchsorted(known_S, behind_ms, side="right"))
    )
    return Wait(scored_S[:steps], len(begins), delay_ms)


def wait_of(reader: Reader, spec: TrainSpec) -> Wait | None:
    """Make the plan of a run.

    Args:
        reader: of the data set, whose labels say how late they are.
        spec: the recipe's ``[train]``.

    Returns:
        the plan; None where the recipe does not wait.

    Raises:
        DataError: no batch is answered before the rows behind the training rows begin.
    """
    if spec.label_delay == "none":
        return None
    dataset, times_N = reader.dataset, reader.times_ms("train")
    delay_ms = max(label.visible_after_ms for label in dataset.examples.labels)
    stop = dataset.split("train").stop
    behind = [s for s in dataset.splits if s.start >= stop and reader.rows(s.name)]
    behind_ms = min((int(reader.times_ms(s.name)[0]) for s in behind), default=None)
    found = waits(times_N, spec.batch_examples, delay_ms, behind_ms)
    if not found.steps:
        raise DataError(
            refusal(
                "gem train",
                "train.label_delay",
                must="leave rows whose labels are known before the rows behind the training rows",
                got=f"none: labels of {dataset.name} come {delay_ms / 1e3:,g} s after their rows, "
                f"and its training rows span {int(times_N[-1] - times_N[0]) / 1e3:,g} s",
                fix='take more rows, or set train.label_delay="none"',
            )
        )
    return found


def told(wait: Wait) -> str:
    """The plan in a line."""
    left = wait.batches - wait.steps
    last = (
        f"; {left} of {wait.batches} batches are never trained on, whose labels come after the "
        "first row behind the training rows"
        if left
        else ""
    )
    most = int((wait.scored_S - np.arange(wait.steps)).max())
    return (
        f"labels are known {wait.delay_ms / 1e3:,g} s after their rows: up to {most} batches are "
        f"scored before one is trained on{last}"
    )


def scored_before(wait: Wait, step: int) -> int:
    """Batches that have been scored when a checkpoint of a step is written.

    Args:
        wait: the plan.
        step: steps that have been taken.
    """
    if step == wait.steps:
        return wait.batches
    return int(wait.scored_S[step - 1]) if step else 0

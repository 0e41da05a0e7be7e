"""Progressive metrics of a run that waits for labels: rows are scored at their time.

When that is, and when they are trained on, says `gem.train.label_delay`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import torch

from gem.data.batch import ExampleBatch
from gem.model.heads import probabilities
from gem.train.interim import untouched
from gem.train.label_delay import Wait, scored_before
from gem.train.local_tensors import put_parameters_back
from gem.train.log_rows import add_scores
from gem.train.run import Run, read_ahead


class ScoredInTime:
    """Scores batches at their time, and adds that to the progressive metrics.

    Args:
        run: at the step at which this process begins.
        wait: the plan.
        batches: of the pass, from the first one that is not scored yet.
    """

    def __init__(self, run: Run, wait: Wait, batches: Iterator[ExampleBatch]) -> None:
        self._run, self._wait, self._batches = run, wait, batches
        self._done = scored_so_far(run, wait)

    def before_step(self) -> None:
        """Score what begins before the labels of the next step's rows are known."""
        self._score(int(self._wait.scored_S[self._run.state.step]))

    def after_step(self) -> None:
        """Behind the last step, score all that is left."""
        if self._run.state.step == self._wait.steps:
            self._score(self._wait.batches)

    def _score(self, upto: int) -> None:
        run, step = self._run, self._run.step
        if upto == self._done:
            return
        run.clock.mark("evaluation")
        step.model.eval()
        try:
            with untouched(step.model, run.world.device), torch.no_grad():
                for batch in islice(self._batches, upto - self._done):
                    with step.precision():
                        logits_BA = step.model(batch.to(run.world.device))
                    add_scores(run, batch, probabilities(logits_BA).cpu().numpy())
        finally:
            step.model.train()
            put_parameters_back(step.model)
        self._done = run.state.loop.scored_batches = upto
        run.clock.mark("other")


@contextmanager
def scored_in_time(run: Run) -> Iterator[ScoredInTime | None]:
    """Read the batches that are scored, beside those that are trained on.

    Args:
        run: at the step at which this process begins.

    Yields:
        what scores; None where the recipe does not wait.
    """
    wait = run.wait
    if wait is None:
        yield None
        return
    source = run.reader.batches("train", start_step=scored_so_far(run, wait))
    with read_ahead(source, run.spec) as batches:
        yield ScoredInTime(run, wait, batches)


def scored_so_far(run: Run, wait: Wait) -> int:
    """Batches whose scores are in the metrics of a run.

    A run that a faulty step has stopped has scored what begins before that step's labels are known.

    Args:
        run: at the step at which this process begins.
        wait: the plan.
    """
    counted = run.state.loop.scored_batches
    return counted if counted >= 0 else scored_before(wait, run.state.step)

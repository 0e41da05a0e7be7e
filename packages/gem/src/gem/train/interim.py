"""Evaluation while training, and the early stop that it may lead to.

It touches nothing of the training: random states and buffers are as before, weights too. So a run
with evaluations has the weights of one without, to the last bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn

from gem.data.batch import ExampleBatch
from gem.data.names import suggestion
from gem.train.averages import averaged_weights
from gem.train.evaluate import evaluate as score
from gem.train.run import Run, asked_to_stop, read_ahead
from gem.train.run_log import RunLog
from gem_opkit.errors import ConfigError, DataError, refusal


class _Stopped(Exception):
    """Somebody asked the run to end: the evaluation is done again when it goes on."""


def check_interim(run: Run) -> None:
    """Check that what is to be evaluated while training is there.

    Args:
        run: freshly built.

    Raises:
        ConfigError: no such split or task.
        DataError: the split has no rows.
    """
    spec, tasks = run.spec.interim, run.reader.schema.labels
    if spec.every_steps is None:
        return
    if not run.reader.steps(spec.split):
        raise DataError(
            refusal(
                "gem train",
                "train.interim.split",
                must="have rows to evaluate",
                got=f"none in {spec.split!r} of {run.reader.dataset.name}",
                fix="take another split, or leave train.interim.every_steps out",
            )
        )
    if spec.task is not None and spec.task not in tasks:
        raise ConfigError(
            refusal(
                "gem train",
                "train.interim.task",
                must=f"be one of {', '.join(tasks)}",
                got=repr(spec.task) + suggestion(spec.task, tasks),
                fix="correct the name",
            )
        )


def is_due(run: Run) -> bool:
    """Whether the run is to be evaluated after this step, and has not been.

    Args:
        run: between two steps.
    """
    every, step = run.spec.interim.every_steps, run.state.step
    if every is None or not step or step % every:
        return False
    return run.state.loop.evaluated_step != step


def evaluate(run: Run, log: RunLog) -> bool:
    """Evaluate the run amid its training. Every rank has to call this.

    An evaluation that a signal breaks off leaves no trace, and stays due.

    Args:
        run: between two steps, where an evaluation is due.
        log: gets a row.

    Returns:
        Whether this is the best one so far, of a run that may stop early: its checkpoint is kept.
    """
    spec, loop, step = run.spec.interim, run.state.loop, run.state.step
    run.clock.mark("evaluation")
    try:
        metrics = _measure(run)
    except _Stopped:
        return False
    finally:
        run.clock.mark("other")
    log.write({"step": step, "interim": True, "split": spec.split, "metrics": metrics})
    loop.evaluated_step = step
    task = spec.task or run.reader.schema.labels[0]
    ne = metrics[task]["ne"]
    if ne is None:  # one class alone: nothing can be said
        return False
    better = loop.best_ne is None or ne < loop.best_ne - spec.min_gain
    if better:
        loop.best_ne, loop.best_step, loop.evaluations_since_best = ne, step, 0
    else:
        loop.evaluations_since_best += 1
        enough = spec.stop_after is not None and loop.evaluations_since_best >= spec.stop_after
        loop.stopped_early = enough and step < run.total_steps  # after the last step it is no stop
    known = "the best so far" if better else f"the best is {loop.best_ne:.4f} of {loop.best_step}"
    run.display.stage(f"{spec.split} after step {step}: NE of {task} {ne:.4f}, {known}")
    return better and spec.stop_after is not None


def _measure(run: Run) -> dict[str, Any]:
    spec = run.spec.interim

    def check(_: int) -> None:
        if asked_to_stop(run):
            raise _Stopped

    source = _first(run.reader.batches(spec.split), spec.max_batches)
    with (
        untouched(run.step.model, run.world.device),
        averaged_weights(run.step.model, run.step.ema),
        read_ahead(source, run.spec) as batches,
    ):
        block = score(
            run.step.model,
            batches,
            run.reader.schema,
            run.world,
            precision=run.step.precision,
            on_batch=check,
        )
    return block.report()


def _first(batches: Iterator[ExampleBatch], most: int | None) -> Iterator[ExampleBatch]:
    try:
        yield from islice(batches, most)
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put random states and buffers back at the end of a ``with`` block.

    Args:
        model: whose buffers.
        device: whose random state, beside that of the CPU.
    """
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in model.named_buffers():
                    value.copy_(buffers[name])

"""Predictions of the training rows by checkpoints that had not learned from them yet.

What a run logs while it trains, made again from the checkpoints that it has kept: the more of
them, the fresher the predictions.
"""

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from gem.train.averages import averaged_weights
from gem.train.evaluate import Predictions, evaluate
from gem.train.metrics import MetricBlock
from gem.train.run import Run, read_ahead
from gem.train.snapshots import Loaded, snapshots
from gem_opkit.errors import UnsupportedError, refusal

_COMMAND = "gem predict --progressive"


def predict_progressively(
    run: Run, sink: Callable[[str, Predictions], None], *, embeddings: bool = False
) -> dict[str, Any]:
    """Predict the training rows, each batch by the newest checkpoint that may be asked by then.

    Args:
        run: opened at its newest checkpoint, which it holds again in the end.
        sink: gets ``train`` and the predictions of each batch.
        embeddings: give it what the heads read as well.

    Returns:
        task -> metrics of these rows.

    Raises:
        UnsupportedError: several ranks, or a run of several passes.
        DataError: no complete checkpoint, or a damaged one.
    """
    if run.world.size > 1:
        raise UnsupportedError(
            refusal(
                _COMMAND,
                "ranks",
                must="be one process",
                got=run.world.size,
                fix="leave torchrun out",
            )
        )
    found = snapshots(run, _COMMAND)
    batch = run.spec.batch_examples
    times, steps = run.reader.times_ms("train"), run.reader.steps("train")
    firsts = times[np.arange(steps) * batch]  # of each batch
    # The first batch whose rows are all strictly later than what a checkpoint knows.
    begins = [int(np.searchsorted(firsts, each.from_ms, side="right")) for each in found]
    ends = [*begins[1:], steps]
    loaded, schema = Loaded(run, run.state.step), run.reader.schema
    total = MetricBlock(schema.labels, schema.domains)
    bar = run.display.bar("train", steps - begins[0])
    with bar:
        for snapshot, begin, end in zip(found, begins, ends, strict=True):
            if begin >= end:
                continue
            loaded.put(snapshot)
            source = run.reader.batches("train", start_step=begin)
            with (
                averaged_weights(run.step.model, run.step.ema),
                read_ahead(islice(source, end - begin), run.spec) as batches,
            ):
                block = evaluate(
                    run.step.model,
                    batches,
                    schema,
                    run.world,
                    precision=run.step.precision,
                    sink=partial(sink, "train"),
                    embeddings=embeddings,
                )
            total.merge(block)
            bar.update(end - begins[0])
    loaded.put(found[-1])
    return total.report()

"""The end of a run: held-out metrics and `summary.json`; and the evaluation of a finished one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gem.data.reader import Reader
from gem.train.averages import averaged_weights
from gem.train.checkpoint import step_folder
from gem.train.evaluate import Predictions, PredictionsFile, evaluate
from gem.train.guard import FAULTY_FOLDER
from gem.train.interrupt import Interrupted
from gem.train.mfu import efficiency
from gem.train.progress import Display, StepBar
from gem.train.run import (
    DATA_ROOT,
    PREDICTIONS_FILE,
    Run,
    asked_to_stop,
    read_ahead,
    reduced_counters,
)
from gem.train.run_folder import CHECKPOINTS
from gem.train.run_log import RunLog
from gem.train.saved_run import saved_run
from gem.train.summary import (
    SUMMARY_FILE,
    costs_of_training,
    peak_memory_bytes,
    throughput,
    write_json,
)
from gem_opkit.ceilings import device_name
from gem_parallel.collectives import all_gather_rows

HELD_OUT = ("valid", "test")


def finish(run: Run, log: RunLog) -> dict[str, Any]:
    """Evaluate a trained model and write what the run reached.

    Args:
        run: after its last step.
        log: gets a row for each split.

    Returns:
        The content of ``summary.json``.
    """
    with predictions_sink(run, run.folder, wanted=run.spec.predictions) as sink:
        held_out = evaluate_splits(run, HELD_OUT, sink=sink)
    for split, found in held_out.items():
        log.write({"step": run.state.step, "split": split, "metrics": found})
    summary = _summarise(run, held_out)
    if not run.examples_here:
        summary |= costs_of_training(run.folder, summary)
    if run.world.is_first:
        write_json(run.folder / SUMMARY_FILE, summary)
    run.display.results(
        summary, domains=f"{run.folder / SUMMARY_FILE}, or gem eval {run.folder} --domains"
    )
    run.display.costs(summary, run.clock.fractions())
    loop = run.state.loop
    if loop.stopped_early:
        best = step_folder(run.folder / CHECKPOINTS, loop.best_step or 0)
        where = f"is of {best}, which gem eval takes as well"
        if not best.exists():  # it could not be written, and the run was to go on
            where = f"was after step {loop.best_step}, of which there is no checkpoint"
        run.display.stage(
            f"stopped early, after step {run.state.step} of {run.total_steps}; the best evaluation "
            f"(NE {loop.best_ne:.4f}) {where}"
        )
    if loop.skipped_steps:
        run.display.stage(f"{loop.skipped_steps} steps were skipped: {run.folder / FAULTY_FOLDER}")
    run.display.stage(f"done: {run.folder}")
    return summary


def evaluate_splits(
    run: Run,
    splits: Sequence[str],
    *,
    sink: Callable[[str, Predictions], None] | None = None,
    embeddings: bool = False,
) -> dict[str, Any]:
    """Score splits with the weights that evaluation uses.

    Args:
        run: the model and the reader.
        splits: their names; one that the data set does not have is an empty one.
        sink: gets the split and the predictions of each batch.
        embeddings: give it what the heads read as well.

    Returns:
        split -> task -> metrics.

    Raises:
        Interrupted: the run was asked to end.
    """
    found: dict[str, Any] = {}
    with averaged_weights(run.step.model, run.step.ema):
        for split in splits:
            steps = _steps_if_there(run.reader, split)
            run.display.stage(f"evaluate {split}: {steps} batches")
            source = run.reader.batches(split) if steps else iter(())
            bar = run.display.bar(split, steps)
            with bar, read_ahead(source, run.spec) as batches:
                block = evaluate(
                    run.step.model,
                    batches,
                    run.reader.schema,
                    run.world,
                    precision=run.step.precision,
                    on_batch=partial(_batch_done, run, bar),
                    sink=None if sink is None else partial(sink, split),
                    embeddings=embeddings,
                )
            found[split] = block.report()
            run.held_out[split] = block
    return found


def _batch_done(run: Run, bar: StepBar, done: int) -> None:
    bar.update(done)
    if reason := asked_to_stop(run):
        raise Interrupted(reason, run.state.step)


@contextmanager
def predictions_sink(
    run: Run, folder: Path, *, wanted: bool
) -> Iterator[Callable[[str, Predictions], None] | None]:
    """Collect predictions in ``predictions.parquet`` of a folder, on the first rank.

    Args:
        run: names tasks and domains.
        folder: where the file goes.
        wanted: whether there shall be one.

    Yields:
        What takes them; None where none are wanted. Every rank has one, as all of them have to
        gather the rows.
    """
    if not wanted:
        yield None
    elif not run.world.is_first:
        yield lambda split, found: None
    else:
        with PredictionsFile(folder / PREDICTIONS_FILE, run.reader.schema) as file:
            yield file.write


def _steps_if_there(reader: Reader, split: str) -> int:
    there = any(s.name == split for s in reader.dataset.splits)
    return reader.steps(split) if there else 0


def _summarise(run: Run, held_out: dict[str, Any]) -> dict[str, Any]:
    world, state = run.world, run.state
    counters = reduced_counters(state.counters, world)
    step_ms = run.clock.median_ms()
    name = device_name(world.device)
    peak = torch.tensor([peak_memory_bytes(world.device)], device=world.device)
    per_example = counters["flops"] / state.examples if state.examples else None
    return {
        "dataset": run.reader.dataset.name,
        "recipe": run.config.name,
        "seed": run.config.seed,
        "steps": state.step,
        "examples": state.examples,
        "world_size": world.size,
        "device": name,
        "training": {
            "skipped_steps": state.loop.skipped_steps,
            "skipped_examples": state.loop.skipped_examples,
            "stopped_early": state.loop.stopped_early,
            "best_step": state.loop.best_step,
            "best_ne": state.loop.best_ne,
        },
        "progressive": state.metrics.lifetime.report(),
        **held_out,
        "throughput": throughput(
            examples=run.examples_here,
            tokens=run.tokens_here,
            seconds=sum(run.clock.seconds.values()),
            step_ms=step_ms,
            data_wait_s=run.clock.seconds["data"],
        ),
        "efficiency": efficiency(
            flops_per_example=per_example,
            examples_per_step=state.examples / max(state.step, 1),
            step_ms=step_ms,
            device_name=name,
            world_size=world.size,
        ),
        "memory": {"peak_bytes": int(all_gather_rows(peak, world).max())},
        **_embedding_facts(run),
    }


def _embedding_facts(run: Run) -> dict[str, Any]:
    """Of cached embeddings, which share of the rows has one and how old they are, by split."""
    if not run.reader.schema.vectors:
        return {}
    splits = ("train", *(s for s in HELD_OUT if _steps_if_there(run.reader, s)))
    return {"user_embeddings": {split: run.reader.embedding_facts(split) for split in splits}}


def evaluate_folder(
    folder: Path,
    *,
    display: Display | None = None,
    keep_predictions: bool = False,
    show_domains: bool = False,
    data_root: Path = DATA_ROOT,
) -> dict[str, Any]:
    """Evaluate a run on the held-out rows, at its newest complete checkpoint.

    Args:
        folder: the run's folder, or one of its checkpoints.
        display: shows the progress; none: silent.
        keep_predictions: also write ``predictions.parquet`` into the folder.
        show_domains: display the metrics of each domain too; they are returned in any case.
        data_root: as in `train`.

    Returns:
        ``{dataset, recipe, seed, steps, valid, test}`` as in ``summary.json``, ``checkpoint``,
        and ``total_steps``: those of the whole run, more than ``steps`` where it is not finished.

    Raises:
        ConfigError: the folder holds no run.
        DataError: it has no complete checkpoint, or the data set is missing or malformed.
    """
    with saved_run(folder, command="gem eval", display=display, data_root=data_root) as saved:
        run = saved.run
        with predictions_sink(run, run.folder, wanted=keep_predictions) as sink:
            held_out = evaluate_splits(run, HELD_OUT, sink=sink)
        found = {
            "dataset": run.reader.dataset.name,
            "recipe": run.config.name,
            "seed": run.config.seed,
            "steps": run.state.step,
            "total_steps": run.total_steps,
            "checkpoint": str(saved.checkpoint),
            **held_out,
        }
        run.display.results(found, domains=None if show_domains else "add --domains")
        return found

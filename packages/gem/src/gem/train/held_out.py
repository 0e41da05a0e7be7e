"""The end of a run: held-out metrics and `summary.json`; and the evaluation of a finished one."""

from pathlib import Path
from typing import Any

import torch

from gem.data.reader import Reader
from gem.train.checkpoint import (
    check_continues,
    latest_complete,
    load_checkpoint,
    read_manifest,
)
from gem.train.evaluate import Predictions, evaluate, write_predictions
from gem.train.mfu import efficiency
from gem.train.progress import Display
from gem.train.run import (
    CHECKPOINTS,
    DATA_ROOT,
    PREDICTIONS_FILE,
    Run,
    build_run,
    read_ahead,
    read_run_config,
    reduced_counters,
    torch_settings,
)
from gem.train.run_log import RunLog
from gem.train.step import averaged_weights
from gem.train.summary import (
    SUMMARY_FILE,
    costs_of_training,
    peak_memory_bytes,
    throughput,
    write_json,
)
from gem_opkit.ceilings import device_name
from gem_opkit.errors import DataError, refusal
from gem_parallel.collectives import all_gather_rows
from gem_parallel.launch import process_group

HELD_OUT = ("valid", "test")


def finish(run: Run, log: RunLog) -> dict[str, Any]:
    """Evaluate a trained model and write what the run reached.

    Args:
        run: after its last step.
        log: gets a row for each split.

    Returns:
        The content of ``summary.json``.
    """
    held_out, predictions = evaluate_held_out(run, keep_predictions=run.spec.predictions)
    for split, found in held_out.items():
        log.write({"step": run.state.step, "split": split, "metrics": found})
    summary = _summarise(run, held_out)
    if not run.examples_here:
        summary |= costs_of_training(run.folder, summary)
    if run.world.is_first:
        if predictions:
            write_predictions(run.folder / PREDICTIONS_FILE, predictions, run.reader.schema)
        write_json(run.folder / SUMMARY_FILE, summary)
    run.display.results(
        summary, domains=f"{run.folder / SUMMARY_FILE}, or gem eval {run.folder} --domains"
    )
    run.display.costs(summary, run.clock.fractions())
    run.display.stage(f"done: {run.folder}")
    return summary


def evaluate_held_out(
    run: Run, *, keep_predictions: bool
) -> tuple[dict[str, Any], dict[str, Predictions]]:
    """Score the held-out splits with the weights that evaluation uses.

    Args:
        run: the model and the reader.
        keep_predictions: also return every row's probabilities.

    Returns:
        split -> task -> metrics, and split -> predictions where they are wanted.
    """
    held_out: dict[str, Any] = {}
    predictions: dict[str, Predictions] = {}
    with averaged_weights(run.step.model, run.step.ema):
        for split in HELD_OUT:
            steps = _steps_if_there(run.reader, split)
            run.display.stage(f"evaluate {split}: {steps} batches")
            source = run.reader.batches(split) if steps else iter(())
            bar = run.display.bar(split, steps)
            with bar, read_ahead(source, run.spec) as batches:
                block, found = evaluate(
                    run.step.model,
                    batches,
                    run.reader.schema,
                    run.world,
                    precision=run.step.precision,
                    on_batch=bar.update,
                    keep_predictions=keep_predictions,
                )
            held_out[split] = block.report()
            if found is not None:
                predictions[split] = found
    return held_out, predictions


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
    }


def evaluate_folder(
    folder: Path,
    *,
    display: Display | None = None,
    keep_predictions: bool = False,
    show_domains: bool = False,
    data_root: Path = DATA_ROOT,
) -> dict[str, Any]:
    """Evaluate the newest complete checkpoint of a run on the held-out rows.

    Args:
        folder: the run's folder.
        display: shows the progress; none: silent.
        keep_predictions: also write ``predictions.parquet`` into the folder.
        show_domains: display the metrics of each domain too; they are returned in any case.
        data_root: as in `train`.

    Returns:
        ``{dataset, recipe, seed, steps, valid, test}``, as in ``summary.json``.

    Raises:
        ConfigError: the folder holds no run.
        DataError: it has no complete checkpoint, or the data set is missing or malformed.
    """
    config = read_run_config(folder)
    with process_group(config.train.device) as world, torch_settings(config.train):
        display = display if display is not None and world.is_first else Display(None)
        newest = latest_complete(folder / CHECKPOINTS)
        if newest is None:
            raise DataError(
                refusal(
                    "gem eval",
                    "RUN",
                    must="have a complete checkpoint",
                    got=str(folder),
                    fix="train it first, or continue it with --resume",
                )
            )
        run = build_run(config, folder, world, display, data_root)
        check_continues(read_manifest(newest), config, run.dataset)
        load_checkpoint(newest, run.state, world)
        display.stage(f"checkpoint {newest}")
        held_out, predictions = evaluate_held_out(run, keep_predictions=keep_predictions)
        if predictions and world.is_first:
            write_predictions(folder / PREDICTIONS_FILE, predictions, run.reader.schema)
        found = {
            "dataset": run.reader.dataset.name,
            "recipe": config.name,
            "seed": config.seed,
            "steps": run.state.step,
            **held_out,
        }
        display.results(found, domains=None if show_domains else "add --domains")
        return found

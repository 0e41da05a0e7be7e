"""A training run from end to end: one pass in time order, evaluation, summary."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from gem.config import RunConfig
from gem.data.batch import ExampleBatch
from gem.model.flops import batch_flops
from gem.report.page import write_report
from gem.train.checkpoint import save_checkpoint
from gem.train.clock import StepClock
from gem.train.diagnostics import Diagnostics
from gem.train.evaluate import merge_ranks
from gem.train.held_out import finish
from gem.train.interrupt import Interrupted, StopRequest
from gem.train.progress import Display, StepBar
from gem.train.run import (
    CHECKPOINTS,
    DATA_ROOT,
    Run,
    build_run,
    check_folder,
    continue_run,
    held_folder,
    read_ahead,
    record_config,
    reduced_counters,
    torch_settings,
)
from gem.train.run_log import RunLog
from gem_embeddings.tables import EmbeddingTables
from gem_opkit.ceilings import device_name
from gem_opkit.errors import DataError, refusal
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.launch import process_group


def train(
    config: RunConfig,
    folder: Path,
    *,
    resume: bool = False,
    display: Display | None = None,
    data_root: Path = DATA_ROOT,
) -> dict[str, Any]:
    """Train a model and evaluate it, in this process and its peers under ``torchrun``.

    Args:
        config: the run.
        folder: the run's folder; missing or empty, unless ``resume``.
        resume: continue from the newest complete checkpoint, or begin where there is none.
        display: shows the progress on the first rank; none: silent.
        data_root: where data sets lie that the config names no folder for.

    Returns:
        The content of ``summary.json``, the same on every rank.

    Raises:
        ConfigError: the folder is in use, or the config is not that of the run to continue.
        DataError: the data set is missing, malformed or changed, or the loss is not finite.
        UnsupportedError: the config asks for what is not built.
        Interrupted: a signal came; the newest checkpoint holds everything up to it.
    """
    with (
        process_group(config.train.device) as world,
        torch_settings(config.train),
        held_folder(folder, world),
    ):
        display = display if display is not None and world.is_first else Display(None)
        check_folder(config, folder, resume=resume)
        run = build_run(config, folder, world, display, data_root)
        record_config(config, folder, world)
        if resume:
            continue_run(run)
            if not world.is_first:  # a checkpoint holds the sum over ranks
                _out_of_range(run).zero_()
        diagnostics = Diagnostics(run)
        diagnostics.write(run)
        with RunLog(folder, run.state.step, enabled=world.is_first) as log:
            _train_steps(run, log, diagnostics)
            summary = finish(run, log)
        diagnostics.write(run, run.held_out)
        if world.is_first:
            display.stage(f"report: {write_report([folder])}")
        return summary


def _train_steps(run: Run, log: RunLog, diagnostics: Diagnostics) -> None:
    state, spec = run.state, run.spec
    steps_a_pass = run.reader.steps("train")
    run.display.stage(
        f"train {run.total_steps - state.step} steps of {spec.batch_examples} examples in time "
        f"order on {run.world.size} x {device_name(run.world.device)}"
    )
    tasks = run.reader.schema.labels
    if state.step < run.total_steps:
        count = len(tasks)
        loss = "loss" if count == 1 else f"loss, weighted and summed over {count} tasks"
        run.display.stage(
            f"shown: {loss}; NE of {tasks[0]} in the newest {spec.window_steps} steps, scored "
            f"before they are trained on (below 1 beats predicting the mean rate)"
        )
    bar = run.display.bar("train", run.total_steps, state.step)
    run.step.model.train()
    with StopRequest() as stop, bar:
        while state.step < run.total_steps:
            source = run.reader.batches("train", start_step=state.step % steps_a_pass)
            with read_ahead(source, spec) as batches:
                for batch in _timed(batches, run.clock):
                    _one_step(run, batch)
                    if state.step % spec.log_every_steps == 0 or state.step == run.total_steps:
                        _log_row(run, log, bar)
                    bar.update(state.step)
                    _save_or_stop(run, stop, diagnostics)
        # A signal that came while the last checkpoint was written.
        if signal_number := _agreed(run, stop):
            raise Interrupted(signal_number, state.step)


def _save_or_stop(run: Run, stop: StopRequest, diagnostics: Diagnostics) -> None:
    """Write the checkpoint that is due; end the run where a signal asked for it."""
    step, every = run.state.step, run.spec.checkpoint_every_steps
    signal_number = _agreed(run, stop)
    if signal_number or step == run.total_steps or (every and step % every == 0):
        _save(run)
        diagnostics.write(run)
    if signal_number:
        raise Interrupted(signal_number, step)


def _timed(batches: Iterator[ExampleBatch], clock: StepClock) -> Iterator[ExampleBatch]:
    """The same batches, with the wait for each booked under data."""
    iterator = iter(batches)
    while True:
        clock.begin_step()
        batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def _one_step(run: Run, batch: ExampleBatch) -> None:
    state, device = run.state, run.world.device
    # On a CPU it is there already, and every look at a tensor gives the thread that reads ahead
    # the chance to keep the interpreter for a while.
    there = batch.labels_BA.device == device
    scored = run.step(batch if there else batch.to(device, non_blocking=True), state.step)
    state.step += 1
    run.pending.append((state.step, batch, scored))
    run.clock.end_step()


def _agreed(run: Run, stop: StopRequest) -> int:
    """The signal that some rank got, after the same step on every rank; 0 to go on."""
    world = run.world
    if world.size == 1:
        return stop.signal_number
    if world.device.type == "cuda" and run.state.step % run.spec.log_every_steps:
        return 0  # asking would make the host wait for the device
    flags = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    flags[world.rank] = stop.signal_number
    return int(all_reduce_sum(flags, world).max())


def _flush(run: Run) -> None:
    """Bring what the steps left behind into the metrics. Waits for the device."""
    state, block = run.state, run.state.metrics.current
    steps_a_pass = run.reader.steps("train")
    examples = tokens = 0
    for step, batch, scored in run.pending:
        examples += batch.examples
        tokens += batch.event_tokens
        loss = float(scored.loss)
        _check_finite(loss, step)
        flops = batch_flops(run.config.model, run.reader.schema, batch).total
        _add(state.counters, loss=loss, loss_steps=1, flops=flops)
        if step <= steps_a_pass:  # later passes have seen the labels
            state.histories.add(batch)
            mask_BA = batch.label_mask_BA.numpy()
            p_BA = scored.p_BA.cpu().numpy()
            block.update(
                p_BA,
                batch.labels_BA.numpy(),
                mask_BA,
                batch.domains_B.numpy(),
                batch.user_B.numpy(),
            )
    run.pending.clear()
    run.clock.settle()
    counts = torch.tensor([examples, tokens], dtype=torch.int64, device=run.world.device)
    examples, tokens = all_reduce_sum(counts, run.world).tolist()
    state.examples += examples
    run.examples_here += examples
    run.tokens_here += tokens


def _check_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise DataError(
            refusal(
                "gem train",
                "loss",
                must="be finite",
                got=f"{loss} in step {step}",
                fix="lower train.dense.lr or set train.clip_norm; check the continuous inputs",
            )
        )


def _log_row(run: Run, log: RunLog, bar: StepBar) -> None:
    _flush(run)
    state, metrics = run.state, run.state.metrics
    counters = reduced_counters(state.counters, run.world)
    metrics.close(merge_ranks(metrics.current, run.world))
    steps = counters["loss_steps"] / run.world.size
    window = metrics.window().report(gauc=False)
    speed = run.examples_here / _total_s(run)
    times = run.reader.times_ms("train")
    seen = ((state.step - 1) % run.reader.steps("train") + 1) * run.spec.batch_examples
    row = {
        "step": state.step,
        "examples": state.examples,
        "time_ms": int(times[min(seen, len(times)) - 1]),
        "loss": counters["loss"] / steps,
        "lr": run.step.optimizers["dense"].param_groups[0]["lr"],
        "window": window,
        "lifetime": metrics.lifetime.report(gauc=False),
        "examples_per_s": speed,
        "time_frac": run.clock.fractions(),
    }
    _add(state.counters, loss=-state.counters["loss"], loss_steps=-state.counters["loss_steps"])
    log.write(row)
    bar.update(
        state.step,
        loss=row["loss"],
        NE=next(iter(window.values()))["ne"],
        examples_per_s=speed,
    )


def _save(run: Run) -> None:
    _flush(run)
    state = run.state
    counters, histories, outside = state.counters, state.histories, _out_of_range(run)
    outside_here = outside.clone()
    state.counters = reduced_counters(counters, run.world)
    state.histories = histories.merged(run.world)
    all_reduce_sum(outside, run.world)
    save_checkpoint(
        run.folder / CHECKPOINTS,
        state,
        run.config,
        run.world,
        current=merge_ranks(state.metrics.current, run.world),
        dataset=run.dataset,
        keep=run.spec.keep_checkpoints,
    )
    state.counters, state.histories = counters, histories
    outside.copy_(outside_here)


def _out_of_range(run: Run) -> torch.Tensor:
    """Counts by table of ids outside it, of this rank; a buffer of the model."""
    return cast(EmbeddingTables, run.state.model.get_submodule("tables")).out_of_range


def _add(counters: dict[str, float], **amounts: float) -> None:
    for name, amount in amounts.items():
        counters[name] = counters.get(name, 0.0) + amount


def _total_s(run: Run) -> float:
    return max(sum(run.clock.seconds.values()), 1e-9)

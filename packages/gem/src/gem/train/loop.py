"""A training run from end to end: one pass in time order, evaluation, summary."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gem.config import RunConfig
from gem.data.batch import ExampleBatch
from gem.report.page import write_report
from gem.train.checkpoint import newest_first
from gem.train.clock import StepClock
from gem.train.diagnostics import Diagnostics
from gem.train.given_versions import with_versions
from gem.train.held_out import finish
from gem.train.inputs_ahead import Arrived, copied_ahead, pinned
from gem.train.interim import check_interim, evaluate, is_due
from gem.train.interrupt import TIME_IS_UP, Interrupted, StopRequest
from gem.train.later_passes import begin_pass
from gem.train.log_rows import LogRows, flush, keep_batch, row_is_due, row_stays, stopped_by
from gem.train.progress import Display, StepBar
from gem.train.run import (
    DATA_ROOT,
    Run,
    agree,
    build_run,
    continue_run,
    read_ahead,
    torch_settings,
)
from gem.train.run_folder import CHECKPOINTS, check_folder, held_folder, record_config
from gem.train.run_log import RunLog
from gem.train.saving import Saver, out_of_range, state_is_finite
from gem.train.scored_in_time import ScoredInTime, scored_in_time
from gem.train.start_tables import start_tables
from gem.train.step import Scored
from gem.train.trace import Trace
from gem_opkit.ceilings import device_name
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.launch import process_group


def train(
    config: RunConfig,
    folder: Path,
    *,
    resume: bool = False,
    profile: bool = False,
    display: Display | None = None,
    data_root: Path = DATA_ROOT,
) -> dict[str, Any]:
    """Train a model and evaluate it, in this process and its peers under ``torchrun``.

    Args:
        config: the run.
        folder: the run's folder; missing or empty, unless ``resume``.
        resume: continue from the newest complete checkpoint, or begin where there is none.
        profile: write a trace of a few steps into the folder.
        display: shows the progress on the first rank; none: silent.
        data_root: where data sets lie that the config names no folder for.

    Returns:
        The content of ``summary.json``, the same on every rank.

    Raises:
        ConfigError: the folder is in use, the config is not that of the run to continue, or the
            time limit is too short to get on.
        DataError: the data set is missing, malformed or changed, a step was not finite, or a
            checkpoint could not be written.
        UnsupportedError: the config asks for what is not built.
        Interrupted: a signal came, or the time was up; the newest checkpoint holds everything.
    """
    stop = StopRequest(config.train.wall_limit_s)
    config = with_versions(config)
    with (
        process_group(config.train.device) as world,
        torch_settings(config.train),
        held_folder(folder, world),
    ):
        display = display if display is not None and world.is_first else Display(None)
        check_folder(config, folder, resume=resume)
        run = build_run(config, folder, world, display, data_root, fresh=not resume)
        check_interim(run)
        if next(newest_first(folder / CHECKPOINTS), None) is None:  # else its rows are in there
            start_tables(run, data_root)
        record_config(config, folder, world)
        if resume:
            continue_run(run)
            if not world.is_first:  # a checkpoint holds the sum over ranks
                out_of_range(run).zero_()
        diagnostics = Diagnostics(run)
        diagnostics.write(run)
        run.stop = stop
        log = RunLog(
            folder,
            run.state.step,
            stays=partial(row_stays, run),
            config=config,
            enabled=world.is_first,
        )
        with stop, log, Saver(run, diagnostics) as saver, _getting_on(run):
            with Trace(run, wanted=profile) as trace:
                _train_steps(run, LogRows(run, log), saver, trace)
            summary = finish(run, log)
        diagnostics.write(run, run.held_out)
        if world.is_first:
            display.stage(f"report: {write_report([folder])}")
        return summary


@contextmanager
def _getting_on(run: Run) -> Iterator[None]:
    """Refuse a time limit that leaves no time to get on: a script would start the run for ever."""
    began = run.state.step, run.state.loop.evaluated_step
    try:
        yield
    except Interrupted as stop:
        now = run.state.step, run.state.loop.evaluated_step
        if stop.reason != TIME_IS_UP or now != began:
            raise
        raise ConfigError(
            refusal(
                "gem train",
                "train.wall_limit_s",
                must="leave time for a whole evaluation",
                got=f"{run.spec.wall_limit_s:g}, which was up amid one at step {stop.step}, where "
                "this process had begun",
                fix="raise it, or evaluate fewer batches",
            )
        ) from None


def _train_steps(run: Run, rows: LogRows, saver: Saver, trace: Trace) -> None:
    state, spec = run.state, run.spec
    steps_a_pass = run.reader.steps("train")
    to_take = 0 if run.trained else run.total_steps - state.step
    run.display.stage(
        f"train {to_take} steps of {spec.batch_examples} examples in time order on "
        f"{run.world.size} x {device_name(run.world.device)}"
    )
    tasks, device = run.reader.schema.labels, run.world.device
    if not run.trained:
        count = len(tasks)
        loss = "loss" if count == 1 else f"loss, weighted and summed over {count} tasks"
        run.display.stage(
            f"shown: {loss}; NE of {tasks[0]} in the newest {spec.window_steps} steps, scored "
            f"before they are trained on (below 1 beats predicting the mean rate)"
        )
    bar = run.display.bar("train", run.total_steps, state.step)
    run.step.model.train()
    with bar, scored_in_time(run) as scorer:
        if is_due(run):  # the run was stopped amid it
            _evaluate_and_save(run, rows, saver, bar)
        while not run.trained:
            begin_pass(run)
            source = run.reader.batches("train", start_step=state.step % steps_a_pass)
            with read_ahead(pinned(source, device), spec) as batches:
                arriving = copied_ahead(batches, device, run.step.ahead.stream)
                for batch in _timed(arriving, run.clock):
                    _one_step(run, batch, saver, scorer)
                    trace.step()
                    _after_step(run, rows, saver, bar)
                    if run.trained:
                        break
        # A signal that came while the last checkpoint was written.
        if reason := _agreed(run, saver):
            raise Interrupted(reason, state.step)


def _after_step(run: Run, rows: LogRows, saver: Saver, bar: StepBar) -> None:
    """Log, evaluate and save what is due; end the run where somebody asked for it."""
    if row_is_due(run):
        rows.write(run, bar)
    bar.update(run.state.step)
    _evaluate_and_save(run, rows, saver, bar)


def _evaluate_and_save(run: Run, rows: LogRows, saver: Saver, bar: StepBar) -> None:
    step, every = run.state.step, run.spec.checkpoint_every_steps
    best = is_due(run) and _evaluate(run, rows, bar)
    reason = _agreed(run, saver)
    at_once = bool(reason) or run.trained
    if at_once or best or (every and step % every == 0):
        saver.save(run, wait=at_once)
    if reason:
        raise Interrupted(reason, step)


def _evaluate(run: Run, rows: LogRows, bar: StepBar) -> bool:
    """Evaluate; where that ends the training, log the steps that no row is of yet."""
    flush(run)  # a step that nobody judged yet is told by its own name
    best = evaluate(run, rows.log)
    if run.state.loop.stopped_early and not row_is_due(run):
        rows.write(run, bar)
    return best


def _timed(batches: Iterator[Arrived], clock: StepClock) -> Iterator[Arrived]:
    """The same batches, with the wait for each booked under data."""
    iterator = iter(batches)
    while True:
        clock.begin_step()
        batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def _one_step(run: Run, arrived: Arrived, saver: Saver, scorer: ScoredInTime | None) -> None:
    state, batch = run.state, arrived.host
    if scorer is not None:
        scorer.before_step()
    if arrived.following is not None:
        run.step.expect(arrived.following)
    scored = run.step(arrived.there, state.step)
    if news := run.step.memory.news():
        run.display.stage(news)
    if scored.fault is not None:
        _not_taken(run, batch, scored, saver)
    state.step += 1
    run.pending.append((state.step, batch, scored))
    if scorer is not None:
        scorer.after_step()
    run.clock.end_step()


def _not_taken(run: Run, batch: ExampleBatch, scored: Scored, saver: Saver) -> None:
    """Keep the batch of a step that moved nothing; save what is before it where the run ends."""
    fault, step = scored.fault, run.state.step + 1
    if fault is None:
        return
    where = keep_batch(run, step, batch, fault)
    if not fault.stops:
        why = f"{fault.name} must {fault.must}; got {fault.got}"
        run.display.stage(f"warning: skipped step {step}: {why}; {where}")
        return
    if run.state.step and state_is_finite(run):
        saver.save(run, wait=True)
    raise stopped_by(fault, f"in step {step}; {where}")


def _agreed(run: Run, saver: Saver) -> int:
    """Why the run has to end after this step, the same on every rank; 0 to go on."""
    world = run.world
    on_gpus = world.device.type == "cuda" and world.size > 1
    # An evaluation that is still due has been broken off.
    ending = run.trained or is_due(run)
    if on_gpus and run.state.step % run.spec.log_every_steps and not ending:
        return 0  # asking would make the host wait for the device
    fault = saver.take_fault()
    own = 0 if run.stop is None else run.stop.reason()
    reason, failed = agree(world, own, int(fault is not None))
    if failed:
        saver.react(run, fault)
    return reason

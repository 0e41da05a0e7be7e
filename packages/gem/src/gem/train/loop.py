"""A training run from end to end: data, model, one pass in time order, evaluation, summary."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem.config import RunConfig, parse_recipe
from gem.data.batch import ExampleBatch
from gem.data.loader import Prefetcher
from gem.data.prepare import default_folder, prepare
from gem.data.reader import Reader, open_reader
from gem.model.build import build_model
from gem.model.flops import batch_flops
from gem.train.checkpoint import (
    TrainState,
    check_continues,
    latest_complete,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)
from gem.train.clock import StepClock
from gem.train.evaluate import Predictions, evaluate, merge_ranks, write_predictions
from gem.train.fingerprint import dataset_fingerprint
from gem.train.interrupt import Interrupted, StopRequest
from gem.train.metrics import MetricStream
from gem.train.mfu import efficiency
from gem.train.progress import Display, StepBar
from gem.train.run_log import RunLog
from gem.train.spec import RESUMABLE_KEYS, TrainSpec
from gem.train.step import Scored, TrainStep, averaged_weights
from gem.train.summary import (
    SUMMARY_FILE,
    device_name,
    peak_memory_bytes,
    throughput,
    write_json,
)
from gem_opkit.errors import ConfigError, DataError, refusal
from gem_parallel.collectives import all_gather_rows, all_reduce_sum, barrier
from gem_parallel.launch import World, process_group

CONFIG_FILE = "config.toml"
CHECKPOINTS = "checkpoints"
PREDICTIONS_FILE = "predictions.parquet"
DATA_ROOT = Path("runs/data")
HELD_OUT = ("valid", "test")


@dataclass
class _Run:
    """What the parts of a run share."""

    config: RunConfig
    folder: Path
    world: World
    display: Display
    reader: Reader
    dataset: str
    step: TrainStep
    state: TrainState
    clock: StepClock
    total_steps: int
    pending: list[tuple[int, ExampleBatch, Scored]] = field(default_factory=list)
    # Of this process and its peers since they started, for the throughput.
    examples_here: int = 0
    tokens_here: int = 0

    @property
    def spec(self) -> TrainSpec:
        return self.config.train


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
    with process_group(config.train.device) as world, _torch_settings(config.train):
        display = display if display is not None and world.is_first else Display(None)
        _claim_folder(config, folder, world, resume=resume)
        run = _build(config, folder, world, display, data_root)
        if resume:
            _continue(run)
        with RunLog(folder, run.state.step, enabled=world.is_first) as log:
            _train_steps(run, log)
            return _finish(run, log)


# ---------------------------------------------------------------- setting up


@contextmanager
def _torch_settings(spec: TrainSpec) -> Iterator[None]:
    """Threads and determinism for the length of a run, then as they were."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    torch.use_deterministic_algorithms(spec.deterministic)
    # Filling is for finding bugs and costs a write of every buffer; nothing here reads unwritten
    # memory, which the tests of the operators show.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)
        torch.utils.deterministic.fill_uninitialized_memory = filling


def _claim_folder(config: RunConfig, folder: Path, world: World, *, resume: bool) -> None:
    """Make the run's folder, or check that it is of an equal run."""
    path = folder / CONFIG_FILE
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            refusal(
                "gem train",
                "--out",
                must="be a new or an empty folder",
                got=f"{folder}, which is not empty",
                fix="continue that run with --resume, or choose another --out",
            )
        )
    if resume and path.exists():
        before = parse_recipe(path.read_text(encoding="utf-8"), name="run", origin=str(path))
        keys = config.differences(before, ignored=RESUMABLE_KEYS)
        if keys:
            raise ConfigError(
                refusal(
                    "gem train --resume",
                    "config",
                    must=f"equal {path}",
                    got="; ".join(keys),
                    fix="use the same recipe and settings, or another --out",
                )
            )
    barrier(world)  # every rank has looked before the first one writes
    if world.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(config.to_toml(), encoding="utf-8")


def data_folder(config: RunConfig, world: World, display: Display, data_root: Path) -> Path:
    """Where the run's data set lies; makes it first if it is not there.

    Args:
        config: the run.
        world: the ranks; the first one makes the data set, the others wait.
        display: says so.
        data_root: folder of all data sets.

    Raises:
        DataError: the config names a folder without a data set, or its raw files are wrong.
    """
    folder = default_folder(config.data, data_root)
    if world.is_first:
        there = folder.exists()
        display.stage(f"{'read' if there else 'prepare'} data set {config.data.dataset}: {folder}")
        spec = prepare(
            config.data.dataset,
            folder,
            source=config.data.source,
            options=config.data.synthetic,
        )
        if spec.terms and not there:
            display.stage(spec.terms)
        if spec.citation and not there:
            display.stage(spec.citation)
    barrier(world)
    return folder


def _build(
    config: RunConfig, folder: Path, world: World, display: Display, data_root: Path
) -> _Run:
    spec = config.train
    source = data_folder(config, world, display, data_root)
    reader = open_reader(
        source,
        config.data,
        batch_size=spec.batch_examples,
        rank=world.rank,
        world_size=world.size,
    )
    schema = reader.schema
    torch.manual_seed(config.seed)
    model = build_model(config.model, schema).to(world.device)
    # Ranks start from equal weights and then draw dropout masks of their own.
    torch.manual_seed((config.seed + 0x9E3779B97F4A7C15 * (world.rank + 1)) % 2**63)
    clock = StepClock(world.device)
    total_steps = reader.steps("train") * spec.passes
    step = TrainStep(config, model, schema, world, total_steps=total_steps, clock=clock)
    dense = sum(p.numel() for p in step.dense.values())
    rows = sum(p.numel() for p in step.table_parameters)
    display.stage(
        f"build model {config.model.kind}: {dense:,} dense parameters, {rows:,} in tables, "
        f"{len(schema.ids) + len(schema.numbers)} inputs, {len(schema.streams)} streams"
    )
    window = MetricStream(schema.labels, schema.domains, spec.window_steps // spec.log_every_steps)
    state = TrainState(model, step.optimizers, step.ema, window)
    return _Run(
        config,
        folder,
        world,
        display,
        reader,
        dataset_fingerprint(source),
        step,
        state,
        clock,
        total_steps,
    )


def _continue(run: _Run) -> None:
    newest = latest_complete(run.folder / CHECKPOINTS)
    if newest is None:
        run.display.stage("no complete checkpoint to continue from: begin at the first step")
        return
    check_continues(read_manifest(newest), run.config, run.dataset)
    load_checkpoint(newest, run.state, run.world)
    run.display.stage(f"continue from {newest}: step {run.state.step} of {run.total_steps}")


# ---------------------------------------------------------------- training


def _train_steps(run: _Run, log: RunLog) -> None:
    state, spec = run.state, run.spec
    steps_a_pass = run.reader.steps("train")
    run.display.stage(
        f"train {run.total_steps - state.step} steps of {spec.batch_examples} examples in time "
        f"order on {run.world.size} x {device_name(run.world.device)}"
    )
    bar = run.display.bar("train", run.total_steps, state.step)
    run.step.model.train()
    with StopRequest() as stop, bar:
        while state.step < run.total_steps:
            source = run.reader.batches("train", start_step=state.step % steps_a_pass)
            with _read_ahead(source, spec) as batches:
                for batch in _timed(batches, run.clock):
                    _one_step(run, batch)
                    if state.step % spec.log_every_steps == 0 or state.step == run.total_steps:
                        _log_row(run, log, bar)
                    _save_or_stop(run, stop)


def _save_or_stop(run: _Run, stop: StopRequest) -> None:
    """Write the checkpoint that is due; end the run where a signal asked for it."""
    step, every = run.state.step, run.spec.checkpoint_every_steps
    signal_number = _agreed(run, stop)
    if signal_number or step == run.total_steps or (every and step % every == 0):
        _save(run)
    if signal_number:
        raise Interrupted(signal_number, step)


@contextmanager
def _read_ahead(
    batches: Iterator[ExampleBatch], spec: TrainSpec
) -> Iterator[Iterator[ExampleBatch]]:
    """The same batches, made ahead of time by a thread where the recipe wants one."""
    if spec.prefetch_batches == 0:
        yield batches
        return
    with Prefetcher(batches, depth=spec.prefetch_batches) as ahead:
        yield ahead


def _timed(batches: Iterator[ExampleBatch], clock: StepClock) -> Iterator[ExampleBatch]:
    """The same batches, with the wait for each booked under data."""
    iterator = iter(batches)
    while True:
        clock.begin_step()
        batch = next(iterator, None)
        if batch is None:
            clock.cancel_step()
            return
        yield batch


def _one_step(run: _Run, batch: ExampleBatch) -> None:
    state = run.state
    scored = run.step(batch.to(run.world.device, non_blocking=True), state.step)
    state.step += 1
    run.pending.append((state.step, batch, scored))
    run.clock.end_step()


def _agreed(run: _Run, stop: StopRequest) -> int:
    """The signal that some rank got, after the same step on every rank; 0 to go on."""
    world = run.world
    if world.size == 1:
        return stop.signal_number
    if world.device.type == "cuda" and run.state.step % run.spec.log_every_steps:
        return 0  # asking would make the host wait for the device
    flags = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    flags[world.rank] = stop.signal_number
    return int(all_reduce_sum(flags, world).max())


def _flush(run: _Run) -> None:
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


def _log_row(run: _Run, log: RunLog, bar: StepBar) -> None:
    _flush(run)
    state, metrics = run.state, run.state.metrics
    counters = _reduced(state.counters, run.world)
    metrics.close(merge_ranks(metrics.current, run.world))
    steps = counters["loss_steps"] / run.world.size
    window = metrics.window().report(gauc=False)
    speed = run.examples_here / _total_s(run)
    row = {
        "step": state.step,
        "examples": state.examples,
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


def _save(run: _Run) -> None:
    _flush(run)
    state = run.state
    mine = state.counters
    state.counters = _reduced(mine, run.world)
    save_checkpoint(
        run.folder / CHECKPOINTS,
        state,
        run.config,
        run.world,
        current=merge_ranks(state.metrics.current, run.world),
        dataset=run.dataset,
        keep=run.spec.keep_checkpoints,
    )
    state.counters = mine


def _add(counters: dict[str, float], **amounts: float) -> None:
    for name, amount in amounts.items():
        counters[name] = counters.get(name, 0.0) + amount


def _reduced(counters: Mapping[str, float], world: World) -> dict[str, float]:
    """The counters of all ranks, summed."""
    names = ("flops", "loss", "loss_steps")
    values: Tensor = torch.tensor(
        [counters.get(name, 0.0) for name in names], dtype=torch.float64, device=world.device
    )
    return dict(zip(names, all_reduce_sum(values, world).tolist(), strict=True))


def _total_s(run: _Run) -> float:
    return max(sum(run.clock.seconds.values()), 1e-9)


# ---------------------------------------------------------------- evaluation and summary


def _finish(run: _Run, log: RunLog) -> dict[str, Any]:
    held_out, predictions = _evaluate_held_out(run, keep_predictions=run.spec.predictions)
    for split, found in held_out.items():
        log.write({"step": run.state.step, "split": split, "metrics": found})
    summary = _summarise(run, held_out)
    if run.world.is_first:
        if predictions:
            write_predictions(run.folder / PREDICTIONS_FILE, predictions, run.reader.schema)
        write_json(run.folder / SUMMARY_FILE, summary)
    run.display.results(summary)
    run.display.costs(summary, run.clock.fractions())
    run.display.stage(f"done: {run.folder}")
    return summary


def _evaluate_held_out(
    run: _Run, *, keep_predictions: bool
) -> tuple[dict[str, Any], dict[str, Predictions]]:
    """Metrics of each held-out split, and its predictions where they are wanted."""
    held_out: dict[str, Any] = {}
    predictions: dict[str, Predictions] = {}
    with averaged_weights(run.step.model, run.step.ema):
        for split in HELD_OUT:
            steps = _steps_if_there(run.reader, split)
            run.display.stage(f"evaluate {split}: {steps} batches")
            source = run.reader.batches(split) if steps else iter(())
            bar = run.display.bar(split, steps)
            with bar, _read_ahead(source, run.spec) as batches:
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


def _summarise(run: _Run, held_out: dict[str, Any]) -> dict[str, Any]:
    world, state = run.world, run.state
    counters = _reduced(state.counters, world)
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
    data_root: Path = DATA_ROOT,
) -> dict[str, Any]:
    """Evaluate the newest complete checkpoint of a run on the held-out rows.

    Args:
        folder: the run's folder.
        display: shows the progress; none: silent.
        keep_predictions: also write ``predictions.parquet`` into the folder.
        data_root: as in `train`.

    Returns:
        ``{dataset, recipe, seed, steps, valid, test}``, as in ``summary.json``.

    Raises:
        ConfigError: the folder holds no run.
        DataError: it has no complete checkpoint, or the data set is missing or malformed.
    """
    config = read_run_config(folder)
    with process_group(config.train.device) as world, _torch_settings(config.train):
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
        run = _build(config, folder, world, display, data_root)
        check_continues(read_manifest(newest), config, run.dataset)
        load_checkpoint(newest, run.state, world)
        display.stage(f"checkpoint {newest}")
        held_out, predictions = _evaluate_held_out(run, keep_predictions=keep_predictions)
        if predictions and world.is_first:
            write_predictions(folder / PREDICTIONS_FILE, predictions, run.reader.schema)
        found = {
            "dataset": run.reader.dataset.name,
            "recipe": config.name,
            "seed": config.seed,
            "steps": run.state.step,
            **held_out,
        }
        display.results(found)
        return found


def read_run_config(folder: Path) -> RunConfig:
    """The resolved config of a run.

    Args:
        folder: the run's folder.

    Raises:
        ConfigError: the folder holds no run.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(
            refusal(
                "gem",
                "RUN",
                must=f"be the folder of a run, with its {CONFIG_FILE}",
                got=str(folder),
                fix="give the folder that gem train wrote",
            )
        )
    return parse_recipe(path.read_text(encoding="utf-8"), name=folder.name, origin=str(path))

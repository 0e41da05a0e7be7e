"""What the parts of a run share, and how it is set up: folder, data, model, checkpoint."""

import fcntl
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gem.config import RunConfig, check_built, parse_recipe, recipe_text
from gem.data.batch import ExampleBatch
from gem.data.loader import Prefetcher
from gem.data.prepare import default_folder, notice, provide
from gem.data.reader import Reader, open_reader
from gem.model.build import build_model
from gem.train.checkpoint import (
    TrainState,
    check_continues,
    latest_complete,
    load_checkpoint,
    read_manifest,
)
from gem.train.clock import StepClock
from gem.train.fingerprint import dataset_fingerprint
from gem.train.history_counts import HistoryCounts
from gem.train.metrics import MetricBlock, MetricStream
from gem.train.progress import Display
from gem.train.spec import RESUMABLE_KEYS, TrainSpec
from gem.train.step import Scored, TrainStep
from gem_opkit.errors import ConfigError, DataError, UnsupportedError, refusal
from gem_parallel.collectives import all_reduce_sum, barrier
from gem_parallel.launch import World
from gem_precision.contract import NumberFormat, PrecisionRecipe
from gem_precision.layers import apply_recipe

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.toml"
CHECKPOINTS = "checkpoints"
PREDICTIONS_FILE = "predictions.parquet"
DATA_ROOT = Path("runs/data")
_determinism: Any = torch.utils.deterministic  # its setting is a property that no checker sees


@dataclass
class Run:
    """What the parts of a run share.

    Attributes:
        config: all settings.
        folder: where its files go.
        world: the ranks.
        display: shows the progress, on the first rank.
        reader: of the data set.
        dataset: fingerprint of the data set.
        step: the model with its optimizers.
        state: what a checkpoint holds.
        clock: where the time goes.
        total_steps: steps of the whole run.
        pending: number, batch and outcome of the steps that the metrics do not hold yet.
        examples_here: examples trained on by this process and its peers since they started.
        tokens_here: their history events.
        held_out: split -> metric state, once it has been evaluated.
    """

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
    examples_here: int = 0
    tokens_here: int = 0
    held_out: dict[str, MetricBlock] = field(default_factory=dict)

    @property
    def spec(self) -> TrainSpec:
        """The recipe's ``[train]`` section."""
        return self.config.train


@contextmanager
def torch_settings(spec: TrainSpec) -> Iterator[None]:
    """Set threads and determinism for the length of a run; afterwards they are as they were.

    Args:
        spec: the recipe's ``[train]`` section.
    """
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filling = _determinism.fill_uninitialized_memory
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    torch.use_deterministic_algorithms(spec.deterministic)
    # Filling is for finding bugs and costs a write of every buffer; nothing here reads unwritten
    # memory, which the tests of the operators show.
    _determinism.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)
        _determinism.fill_uninitialized_memory = filling


@contextmanager
def held_folder(folder: Path, world: World) -> Iterator[None]:
    """Make a run's folder and keep other processes from training in it at the same time.

    The first rank holds a lock on the folder itself. The system drops it when the process ends,
    however it ends, so a killed run leaves nothing to be removed by hand.

    Args:
        folder: the run's folder.
        world: the ranks.

    Raises:
        ConfigError: it is no folder, or another process trains in it.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            refusal(
                "gem train",
                "--out",
                must="be a folder",
                got=f"{folder}, which is none",
                fix="choose another --out",
            )
        )
    handle, taken = -1, 0
    if world.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        taken = int(not _locked(handle, folder))
    try:
        if all_reduce_sum(torch.tensor([taken], device=world.device), world).item():
            raise ConfigError(
                refusal(
                    "gem train",
                    "--out",
                    must="be a folder in which no other process trains",
                    got=str(folder),
                    fix="wait for that run to end, or choose another --out",
                )
            )
        yield
    finally:
        if handle >= 0:
            os.close(handle)


def _locked(handle: int, folder: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as fault:  # some network file systems have no locks
        _log.warning("%s cannot be locked (%s): start no second run in it", folder, fault)
    return True


def check_folder(config: RunConfig, folder: Path, *, resume: bool) -> None:
    """Check that a run's folder is empty, or of an equal run that is to go on.

    Args:
        config: the run.
        folder: its folder.
        resume: whether the folder may hold that run already.

    Raises:
        ConfigError: the folder is in use, or the run in it has other settings; names each key.
    """
    path = folder / CONFIG_FILE
    # A process that was killed while it wrote its config has done nothing else.
    used = folder.is_dir() and any(entry.name != _partial(path).name for entry in folder.iterdir())
    if used and not (resume and path.exists()):
        raise ConfigError(
            refusal(
                "gem train --resume" if resume else "gem train",
                "--out",
                must=f"be new, empty or a run with its {CONFIG_FILE}"
                if resume
                else "be a new or an empty folder",
                got=f"{folder}, which holds something else"
                if resume
                else f"{folder}, which is not empty",
                fix="choose another --out"
                if resume
                else "continue that run with --resume, or choose another --out",
            )
        )
    if resume and path.exists():
        before = parse_recipe(recipe_text(path), name="run", origin=str(path))
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


def record_config(config: RunConfig, folder: Path, world: World) -> None:
    """Write the resolved config into the run's folder, whole or not at all.

    Args:
        config: the run. Its data and model are open by now, so a config with a fault leaves the
            folder empty, and the mended one can use it.
        folder: its folder.
        world: the ranks; the first one writes, once every rank has looked at the folder.
    """
    barrier(world)
    if world.is_first:
        path = folder / CONFIG_FILE
        partial = _partial(path)
        partial.write_text(config.to_toml(), encoding="utf-8")
        partial.rename(path)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


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
        there = folder.exists() or config.data.folder is not None
        display.stage(f"{'read' if there else 'prepare'} data set {config.data.dataset}: {folder}")
        spec = provide(config.data, data_root)
        for line in [] if there else notice(spec).splitlines():
            display.stage(line)
    barrier(world)
    return folder


def build_run(
    config: RunConfig, folder: Path, world: World, display: Display, data_root: Path
) -> Run:
    """Open the data and build the model with its optimizers, all at their first step.

    Args:
        config: the run.
        folder: its folder.
        world: the ranks.
        display: shows the progress.
        data_root: where data sets lie that the config names no folder for.

    Raises:
        ConfigError, DataError, UnsupportedError: as `gem.train.loop.train`.
    """
    spec = config.train
    _check_built(config, world)  # before data is prepared
    source = data_folder(config, world, display, data_root)
    reader = open_reader(
        source,
        config.data,
        batch_size=spec.batch_examples,
        rank=world.rank,
        world_size=world.size,
    )
    if not reader.steps("train"):
        raise DataError(
            refusal(
                "gem train",
                f"data set {reader.dataset.name}",
                must="have rows in its split 'train'",
                got=f"none of {reader.dataset.examples.rows} in {source}",
                fix="declare the split in dataset.toml, or make the data set again",
            )
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
        f"{len(schema.ids) + len(schema.numbers)} inputs, "
        f"{len(schema.streams)} stream{'' if len(schema.streams) == 1 else 's'}"
    )
    window = MetricStream(schema.labels, schema.domains, spec.window_steps // spec.log_every_steps)
    histories = HistoryCounts(schema.streams)
    state = TrainState(model, step.optimizers, step.ema, window, histories=histories)
    return Run(
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


def _check_built(config: RunConfig, world: World) -> None:
    """Refuse what is not built, by the names of the recipe's keys."""
    if config.parallel is not None:
        check_built(config.parallel.model_dump())
    kinds = config.precision.layer_formats
    keys: dict[str, NumberFormat] = {"default": config.precision.default}
    keys |= {f"layer_formats.{kind}": wanted for kind, wanted in kinds.items()}
    for key, number_format in keys.items():
        try:
            apply_recipe(PrecisionRecipe(default=number_format), world.device.type)
        except UnsupportedError:
            raise UnsupportedError(
                refusal(
                    "gem train",
                    f"precision.{key}",
                    must="be a format that is built (fp32, bf16_autocast)",
                    got=number_format,
                    fix='take "bf16_autocast" instead',
                )
            ) from None
    apply_recipe(config.precision, world.device.type)


def continue_run(run: Run) -> None:
    """Load the newest complete checkpoint of a run, if it has one.

    Args:
        run: freshly built; its state is overwritten.

    Raises:
        ConfigError, DataError: the checkpoint is of other settings or other data, or all that
            there are have been damaged.
    """
    newest = latest_complete(run.folder / CHECKPOINTS)
    if newest is None:
        run.display.stage("no checkpoint to continue from: begin at the first step")
        return
    check_continues(read_manifest(newest), run.config, run.dataset)
    load_checkpoint(newest, run.state, run.world)
    run.display.stage(f"continue from {newest}: step {run.state.step} of {run.total_steps}")


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
    return parse_recipe(recipe_text(path), name="run", origin=str(path))


@contextmanager
def read_ahead(
    batches: Iterator[ExampleBatch], spec: TrainSpec
) -> Iterator[Iterator[ExampleBatch]]:
    """Have batches made ahead of time by a thread, where the recipe wants one.

    Args:
        batches: what to read.
        spec: says how far ahead.

    Yields:
        The same batches in the same order.
    """
    if spec.prefetch_batches == 0:
        yield batches
        return
    with Prefetcher(batches, depth=spec.prefetch_batches) as ahead:
        yield ahead


def reduced_counters(counters: Mapping[str, float], world: World) -> dict[str, float]:
    """Sum the counters over ranks. Every rank has to call this.

    Args:
        counters: of this rank.
        world: the ranks.

    Returns:
        The sums, under fixed names.
    """
    names = ("flops", "loss", "loss_steps")
    values = torch.tensor(
        [counters.get(name, 0.0) for name in names], dtype=torch.float64, device=world.device
    )
    return dict(zip(names, all_reduce_sum(values, world).tolist(), strict=True))

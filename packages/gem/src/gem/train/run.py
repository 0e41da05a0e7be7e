"""What the parts of a run share, and how it is set up: folder, data, model, checkpoint."""

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gem.config import RunConfig, check_built
from gem.data.batch import ExampleBatch
from gem.data.loader import Prefetcher
from gem.data.prepare import default_folder, notice, provide
from gem.data.reader import Reader, open_reader
from gem.model.build import build_model, model_tables
from gem.train.balance import step_balance
from gem.train.balance_check import check_balance
from gem.train.checkpoint import (
    DAMAGED,
    TrainState,
    check_continues,
    load_checkpoint,
    newest_first,
    none_is_whole,
    read_manifest,
)
from gem.train.checkpoint_manifest import DamagedCheckpoint
from gem.train.clock import StepClock
from gem.train.fingerprint import dataset_fingerprint
from gem.train.guard import Guard
from gem.train.history_counts import HistoryCounts
from gem.train.idle_keys import idle_keys, refuse_copies
from gem.train.interrupt import StopRequest
from gem.train.label_delay import Wait, told, wait_of
from gem.train.loop_state import LoopState
from gem.train.metrics import MetricBlock, MetricStream
from gem.train.parallel_spec import ParallelSpec
from gem.train.progress import Display
from gem.train.rank_group import RankGroup
from gem.train.rank_times import StepWorks
from gem.train.run_folder import CHECKPOINTS
from gem.train.run_plan import plan_of
from gem.train.spec import TrainSpec
from gem.train.step import Scored, TrainStep
from gem.train.table_engine import shard_tables
from gem.train.wandb_log import check_wandb
from gem_opkit.errors import DataError, UnsupportedError, refusal
from gem_parallel.collectives import all_reduce_sum, barrier
from gem_parallel.contract import DENSE_AXES
from gem_parallel.launch import World
from gem_precision.contract import NumberFormat, PrecisionRecipe
from gem_precision.layers import apply_recipe

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
        stop: what asks for an early end; None where nothing does.
        works: of this rank in the steps that the log has no row of yet.
        wait: when rows are trained on; None where that is at once.
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
    stop: StopRequest | None = None
    works: StepWorks = field(default_factory=StepWorks)
    wait: Wait | None = None

    @property
    def spec(self) -> TrainSpec:
        """The recipe's ``[train]`` section."""
        return self.config.train

    @property
    def trained(self) -> bool:
        """Whether there is no step to take any more."""
        return self.state.step >= self.total_steps or self.state.loop.stopped_early


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


def data_folder(
    config: RunConfig, world: World, display: Display, data_root: Path, *, fresh: bool
) -> Path:
    """Where the run's data set lies; makes it first if it is not there.

    Args:
        config: the run.
        world: the ranks; the first one makes the data set, the others wait.
        display: says so.
        data_root: folder of all data sets.
        fresh: the run begins, so its data set has to be that of the raw files as they are now.

    Raises:
        DataError: the config names a folder without a data set, or its raw files are wrong.
    """
    folder = default_folder(config.data, data_root)
    if world.is_first:
        there = folder.exists() or config.data.folder is not None
        display.stage(f"{'read' if there else 'prepare'} data set {config.data.dataset}: {folder}")
        spec = provide(config.data, data_root, fresh=fresh)
        for line in [] if there else notice(spec).splitlines():
            display.stage(line)
    barrier(world)
    return folder


def build_run(
    config: RunConfig,
    folder: Path,
    world: World,
    display: Display,
    data_root: Path,
    *,
    fresh: bool = False,
) -> Run:
    """Open the data and build the model with its optimizers, all at their first step.

    Args:
        config: the run.
        folder: its folder.
        world: the ranks.
        display: shows the progress.
        data_root: where data sets lie that the config names no folder for.
        fresh: as in `data_folder`.

    Raises:
        ConfigError, DataError, UnsupportedError: as `gem.train.loop.train`.
    """
    spec = config.train
    _check_built(config, world)  # before data is prepared
    source = data_folder(config, world, display, data_root, fresh=fresh)
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
    plan = plan_of(config, world)
    reader.balance = step_balance(config, plan, schema, world.size)
    own_rows = plan.tables_are_local
    model = build_model(config.model, schema, seed=config.seed, with_rows=own_rows)
    shard_tables(config, plan, model, schema, world)
    model = model.to(world.device)
    # Ranks start from equal weights and then draw dropout masks of their own.
    torch.manual_seed((config.seed + 0x9E3779B97F4A7C15 * (world.rank + 1)) % 2**63)
    clock = StepClock(world.device)
    wait = wait_of(reader, spec)
    total_steps = reader.steps("train") * spec.passes if wait is None else wait.steps
    loop = LoopState()
    guard = Guard(spec.guard, world, loop)
    step = TrainStep(
        config, model, schema, world, total_steps=total_steps, clock=clock, guard=guard
    )
    dense = sum(step.sizes.values())
    rows = sum(t.num_embeddings * t.embedding_dim for t in model_tables(model)[0])
    display.stage(
        f"build model {config.model.kind}: {dense:,} dense parameters, {rows:,} in tables, "
        f"{len(schema.ids) + len(schema.numbers)} inputs, "
        f"{len(schema.streams)} stream{'' if len(schema.streams) == 1 else 's'}"
    )
    low = step.low_precision
    if low.formats or low.kept:
        display.stage(f"precision: {low.told()}")
    if step.low_attention.formats or step.low_attention.kept:
        display.stage(f"precision: {step.low_attention.told()}")
    if step.gathered is not None:
        display.stage(f"precision: {step.gathered.told()}")
    if world.size > 1 or config.parallel is not None:
        display.stage(f"plan: {_told(plan, step)}")
    for line in idle_keys(step):
        display.stage(line)
    if wait is not None:
        display.stage(told(wait))
    for name, facts in reader.embedding_facts("train").items():
        display.stage(
            f"embeddings {name}: {facts['known_frac']:.1%} of the training rows have one, "
            f"{facts['age_hours_median']:.1f} h old in the middle, "
            f"{facts['age_hours_p90']:.1f} h in nine of ten"
        )
    window = MetricStream(schema.labels, schema.domains, spec.window_steps // spec.log_every_steps)
    histories = HistoryCounts(schema.streams)
    state = TrainState(
        model,
        step.optimizers,
        step.ema,
        window,
        histories=histories,
        loop=loop,
        sharded=world.size > 1 and (plan.shard * plan.expert > 1 or not own_rows),
    )
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
        wait=wait,
    )


def _told(plan: ParallelSpec, step: TrainStep) -> str:
    """A plan in one line, with the way in which tables are cut."""
    dense = ", ".join(f"{axis} {getattr(plan, axis)}" for axis in DENSE_AXES)
    if plan.balance != "off":
        dense += f"; work balanced ({plan.balance}, base batches of {plan.base_batch})"
    if step.engine is None:
        return f"{dense}; every rank holds all tables"
    cuts = Counter(placement.sharding for placement in step.engine.plan.placements)
    cut = ", ".join(f"{count} {sharding}" for sharding, count in sorted(cuts.items()))
    fully = ", fully sharded" if plan.fully_sharded_tables else ""
    return f"{dense}; tables in {plan.table_shard} parts x {plan.table_replicate}{fully} ({cut})"


def _check_built(config: RunConfig, world: World) -> None:
    """Refuse what is not built or not there, by the names of the recipe's keys."""
    if config.train.wandb is not None:
        check_wandb()
    check_built(plan_of(config, world))
    check_balance(config, plan_of(config, world), world.size)
    refuse_copies(plan_of(config, world), world.device)
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
    """Load the newest checkpoint of a run that holds what was written, if it has one.

    Damaged ones before it are renamed to ``damaged-step-N``, and a line says so: what they held is
    trained again, with the same result.

    Args:
        run: freshly built; its state is overwritten.

    Raises:
        ConfigError, DataError: the checkpoint is of other settings or other data, all that there
            are have been damaged, or ranks see different ones.
    """
    checkpoints = run.folder / CHECKPOINTS
    damaged: list[Path] = []
    ranks = run.world.size
    for folder, whole in RankGroup(run.world).seen_alike(checkpoints, newest_first(checkpoints)):
        if whole:
            manifest = read_manifest(folder)
            check_continues(manifest, run.config, run.dataset)
            ranks = manifest["world_size"]
            try:
                load_checkpoint(folder, run.state, run.world)
            except DamagedCheckpoint:
                whole = False
        if whole:
            _put_aside(damaged, run)
            run.display.stage(f"continue from {folder}: step {run.state.step} of {run.total_steps}")
            if ranks != run.world.size:
                run.display.stage(
                    f"warning: dropout, if there is any, draws other numbers than before: {ranks} "
                    f"ranks wrote this checkpoint, {run.world.size} continue it"
                )
            return
        damaged.append(folder)
    if damaged:
        raise none_is_whole(checkpoints, damaged)
    run.display.stage("no checkpoint to continue from: begin at the first step")


def _put_aside(damaged: list[Path], run: Run) -> None:
    """Keep damaged checkpoints from counting as some of those that are kept."""
    barrier(run.world)  # every rank has looked at them
    for folder in damaged:
        aside = folder.with_name(f"{DAMAGED}{folder.name}")
        if run.world.is_first:
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        run.display.stage(
            f"warning: {folder} is damaged (files missing, changed or cut short) and is now "
            f"{aside.name}; the one before it is taken"
        )


def asked_to_stop(run: Run) -> int:
    """Why the run has to end now. Every rank has to call this; the answer is the same on each.

    Args:
        run: may have nothing that asks.

    Returns:
        Number of a signal, ``TIME_IS_UP``, or 0 to go on.
    """
    return agree(run.world, 0 if run.stop is None else run.stop.reason())[0]


def agree(world: World, *own: int) -> list[int]:
    """The greatest of each number over ranks. Every rank has to call this.

    Args:
        world: the ranks.
        own: numbers of this rank.

    Returns:
        As many numbers, the same on every rank.
    """
    if world.size == 1:
        return list(own)
    flags = torch.zeros(world.size, len(own), dtype=torch.int64, device=world.device)
    flags[world.rank] = torch.tensor(own)
    return all_reduce_sum(flags, world).amax(0).tolist()


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


def reduced_counters(
    counters: Mapping[str, float], world: World, more: Sequence[str] = ()
) -> dict[str, float]:
    """Sum the counters over ranks. Every rank has to call this.

    Args:
        counters: of this rank.
        world: the ranks.
        more: names of counters wanted beside the fixed ones, the same on every rank.

    Returns:
        The sums, under the fixed names and those.
    """
    names = ("flops", "loss", "loss_steps", *more)
    values = torch.tensor(
        [counters.get(name, 0.0) for name in names], dtype=torch.float64, device=world.device
    )
    return dict(zip(names, all_reduce_sum(values, world).tolist(), strict=True))

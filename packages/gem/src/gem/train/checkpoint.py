"""Checkpoints of a run: `checkpoints/step-N/`, complete or not there.

A checkpoint is a folder of torch.distributed.checkpoint files with a manifest beside them. It is
written under another name, and renamed once every file and the manifest are on disk. What a
checkpoint is worth is decided by the manifest: it lists each file with its size and checksum, and
has one of its own. A folder that was cut short, or copied only in part, is never chosen; a file
whose content has changed is refused when it is loaded.

Every tensor is stored under the name that it has in a single process: ``model/<name>``,
``<optimizer>/<parameter>/<key>``, ``ema/<name>``, ``metrics/<block>``, ``histories/<stream>``,
``rng/<rank>``. Sharded ones are stored in pieces, which are read as any other plan needs them. So a
run can be continued on another number of ranks and under another plan; only the random numbers
(dropout) then differ.
"""

import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gem.config import RunConfig
from gem.contract_faults import explain
from gem.train.checkpoint_faults import damage_named
from gem.train.checkpoint_manifest import check_content, is_complete, read_manifest
from gem.train.checkpoint_tensors import (
    engine_of,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    room_for,
    table_steps,
    table_tensors,
    take_over,
)
from gem.train.history_counts import HistoryCounts
from gem.train.loop_state import LoopState
from gem.train.metrics import MetricBlock, MetricStream
from gem.train.rank_group import RankGroup
from gem.train.spec import RESUMABLE_KEYS
from gem_opkit.errors import ConfigError, DataError, refusal
from gem_parallel.launch import World

_log = logging.getLogger(__name__)

PARTIAL = "partial-"
DAMAGED = "damaged-"
# A checkpoint while a newer one of the same step takes its place: as good as any, if it comes to
# that. By name it comes before the new one.
REPLACED = "replaced-"


@dataclass
class TrainState:
    """Everything that a step changes.

    Attributes:
        model: the model itself, not its data-parallel wrapper.
        optimizers: name -> optimizer; parameters are known by their names in the model.
        ema: name -> averaged dense weight; empty without averaging.
        metrics: progressive metrics.
        step: steps done.
        examples: examples trained on, over all ranks.
        counters: sums that the summary needs, such as FLOPs counted so far.
        histories: lengths of the histories that were trained on.
        loop: what the loop decides by.
        sharded: whether ranks hold different parts of weights or tables, so that each of them has
            to write and read.
    """

    model: nn.Module
    optimizers: Mapping[str, torch.optim.Optimizer]
    ema: dict[str, Tensor]
    metrics: MetricStream
    step: int = 0
    examples: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    histories: HistoryCounts = field(default_factory=lambda: HistoryCounts(()))
    loop: LoopState = field(default_factory=LoopState)
    sharded: bool = False


def step_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step lies.

    Args:
        checkpoints: the run's folder of checkpoints.
        step: number of steps done.
    """
    return checkpoints / f"step-{step}"


def latest_complete(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint; incomplete ones are passed over with a warning in the log.

    Args:
        checkpoints: the run's folder of checkpoints; may be missing.

    Returns:
        Its folder, or None where there is none at all.

    Raises:
        DataError: there are checkpoints, and none is complete: to begin anew would overwrite what
            is left of the run.
        OSError: one of them cannot be read, so nobody knows what it is worth.
    """
    damaged: list[Path] = []
    for folder, whole in newest_first(checkpoints):
        if whole:
            for one in damaged:
                _log.warning("%s is not complete and is passed over", one)
            return folder
        damaged.append(folder)
    if damaged:
        raise none_is_whole(checkpoints, damaged)
    return None


def newest_first(checkpoints: Path) -> Iterator[tuple[Path, bool]]:
    """The checkpoints of a run, and whether each is complete by its manifest and the sizes.

    Args:
        checkpoints: the run's folder of checkpoints; may be missing.

    Yields:
        The folder and whether it is complete.

    Raises:
        OSError: one of them cannot be read, so nobody knows what it is worth.
    """
    for _, folder in sorted(step_folders(checkpoints), reverse=True):
        yield folder, is_complete(folder)


def none_is_whole(checkpoints: Path, damaged: Sequence[Path]) -> DataError:
    """What to say where every checkpoint of a run is damaged.

    Args:
        checkpoints: the run's folder of checkpoints.
        damaged: all of them, the newest first.
    """
    return DataError(
        refusal(
            "checkpoint",
            str(checkpoints),
            must="hold a complete checkpoint, or none at all",
            got=f"{', '.join(one.name for one in damaged)} with files missing, changed or "
            "cut short",
            fix="restore them, or remove them to begin at the first step",
        )
    )


def step_folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """Every checkpoint that a run has finished, with its step.

    Args:
        checkpoints: the run's folder of checkpoints; may be missing.

    Raises:
        PermissionError: the folder may not be read.
    """
    if not checkpoints.exists():
        return []
    # Listed, not globbed: a glob finds nothing in a folder that may not be read.
    return [
        (int(entry.name.rpartition("-")[2]), entry)
        for entry in checkpoints.iterdir()
        if re.fullmatch(f"({REPLACED})?step-[0-9]+", entry.name)
    ]


def check_continues(manifest: Mapping[str, Any], config: RunConfig, dataset: str) -> None:
    """Refuse to continue a run under settings or data that would make it another run.

    Args:
        manifest: of the checkpoint.
        config: of the run that wants to continue.
        dataset: fingerprint of its data set.

    Raises:
        ConfigError: settings differ; the message names each key with both values.
        DataError: the data set is another one.
    """
    saved = _saved_config(manifest)
    keys = config.differences(saved, ignored=RESUMABLE_KEYS)
    # The one choice of a plan that decides what is learned; without a plan gradients are merged.
    here, there = (
        "gradients" if one.parallel is None else one.parallel.table_replicas
        for one in (config, saved)
    )
    if here != there:
        keys.append(f"parallel.table_replicas: {here!r} here, {there!r} there")
    if keys:
        raise ConfigError(
            refusal(
                "checkpoint",
                "config",
                must="equal that of the run to continue",
                got="; ".join(keys),
                fix="use the same recipe and settings, or another --out",
            )
        )
    if manifest["dataset"] != dataset:
        raise DataError(
            refusal(
                "checkpoint",
                "data set",
                must=f"be the one that the run began with ({manifest['dataset'][:12]})",
                got=dataset[:12],
                fix="restore the data, or start again with another --out",
            )
        )


def _saved_config(manifest: Mapping[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate_json(json.dumps(manifest["config"]))
    except ValidationError as fault:
        raise ConfigError(
            refusal(
                "checkpoint",
                "config",
                must="be one that this version of the trainer reads",
                got=explain(fault, manifest["config"], RunConfig),
                fix="use the version that wrote it",
            )
        ) from fault


def load_checkpoint(folder: Path, state: TrainState, world: World) -> None:
    """Put a checkpoint's content into a freshly built state. Every rank has to call this.

    Args:
        folder: a complete checkpoint.
        state: built from an equal config; overwritten.
        world: the ranks, as many as wrote it or not.

    Raises:
        DamagedCheckpoint: it has changed since it was written; the state is as it was.
        DataError: the checkpoint is not complete, or does not fit the model.
    """
    manifest = read_manifest(folder)
    check_content(folder, manifest, world)
    ranks = RankGroup(world)
    own = model_tensors(state.model)
    own |= {f"ema/{name}": value for name, value in state.ema.items()}
    rows = table_tensors(state.model)
    tensors: dict[str, Tensor] = {}
    # Before the disk is asked: a rank that failed there would answer with something else.
    parts = ranks.gather(_shapes(own)) if state.sharded else [_shapes(own)]
    with ranks.together("read its part of the checkpoint"):
        with damage_named(folder):
            stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        _check_names(stored, set().union(*parts))
        tensors |= _room(stored, own, rows, state, world)
        with single_process_is_meant(), damage_named(folder):
            # Each rank reads alone: a fault of one must not leave others waiting within torch.
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    for name, live in {**own, **rows}.items():
        if name in tensors:
            take_over(live, tensors[name])
    names = {id(p): name for name, p in state.model.named_parameters()}
    for kind, optimizer in state.optimizers.items():
        scalars = manifest["scalars"].get(kind, {})
        load_optimizer(optimizer, names, _under(tensors, f"{kind}/"), scalars)
    engine = engine_of(state.model)
    if engine is not None:
        engine.load_table_state(engine.table_state())
        steps = [int(tensors[name]) for name in table_steps(state.model) if name in tensors]
        engine.step = max(steps, default=0)
    blocks = {k: v.numpy() for k, v in _under(tensors, "metrics/").items()}
    state.metrics.load_state(blocks, keep_current=world.is_first)
    state.step, state.examples = manifest["step"], manifest["examples"]
    # Sums over ranks, so exactly one rank keeps them.
    state.counters = dict(manifest["counters"]) if world.is_first else {}
    state.histories.load(_under(tensors, "histories/"), keep=world.is_first)
    state.loop.load(manifest.get("loop", {}))
    random = _under(tensors, f"rng/{world.rank}/")
    if "cpu" in random:
        torch.set_rng_state(random["cpu"])
    if "cuda" in random and world.device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"], world.device)


def _room(
    stored: Mapping[str, Any],
    own: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    state: TrainState,
    world: World,
) -> dict[str, Tensor]:
    """Memory for everything that this rank needs of what is stored."""
    parameters = dict(state.model.named_parameters())
    steps = table_steps(state.model)
    tensors: dict[str, Tensor] = {}
    for name, entry in stored.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        kind, _, rest = name.partition("/")
        live = own.get(name, rows.get(name))
        if live is None and kind in state.optimizers:
            live = parameters.get(rest.rpartition("/")[0])
        elsewhere = kind in ("model", "ema", "tables") or kind in state.optimizers
        of_another = kind == "rng" and not name.startswith(f"rng/{world.rank}/")
        if of_another or (live is None and elsewhere and name not in steps):
            continue
        tensors[name] = room_for(live, entry.size, entry.properties.dtype)
    return tensors


@contextmanager
def single_process_is_meant() -> Iterator[None]:
    """Keep torch from warning of every save and load in a single process, for a ``with`` block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def collect(
    state: TrainState, current: MetricBlock
) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """Every tensor by its name in the checkpoint, and the optimizers' plain numbers.

    Args:
        state: what a checkpoint is of; its tensors are not copied.
        current: the open block of metrics.

    Returns:
        name -> tensor, without random states, which are of each rank; and optimizer -> name ->
        number.

    Raises:
        DataError: the model's state holds something that is no tensor.
    """
    tensors = model_tensors(state.model)
    tensors |= {f"ema/{name}": value for name, value in state.ema.items()}
    scalars: dict[str, dict[str, float]] = {}
    names = {id(p): name for name, p in state.model.named_parameters()}
    for kind, optimizer in state.optimizers.items():
        found, scalars[kind] = optimizer_tensors(kind, optimizer, names)
        tensors |= found
    tensors |= {**table_tensors(state.model), **table_steps(state.model)}
    tensors |= {f"histories/{name}": value for name, value in state.histories.tensors().items()}
    for name, data in state.metrics.state(current).items():
        tensors[f"metrics/{name}"] = torch.from_numpy(data.copy())
    return tensors, scalars


def _shapes(tensors: Mapping[str, Tensor]) -> set[tuple[str, tuple[int, ...]]]:
    return {(name, tuple(value.shape)) for name, value in tensors.items()}


def _check_names(stored: Mapping[str, Any], wanted: set[tuple[str, tuple[int, ...]]]) -> None:
    """The stored model and averages must be those of this model, by name and shape."""
    there = {
        (name, tuple(getattr(entry, "size", ())))
        for name, entry in stored.items()
        if name.startswith(("model/", "ema/"))
    }
    if wanted != there:
        raise DataError(
            refusal(
                "checkpoint",
                "tensors",
                must="be those of the model",
                got=f"missing {_told(wanted - there)}, unknown {_told(there - wanted)}",
                fix="take the version of the trainer and the config.toml that the run began with",
            )
        )


def _told(tensors: set[tuple[str, tuple[int, ...]]]) -> str:
    shown = [f"{name} {list(shape)}" for name, shape in sorted(tensors)[:3]]
    rest = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return f"{', '.join(shown)}{rest}" if shown else "none"

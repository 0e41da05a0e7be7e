"""Checkpoints of a run: `checkpoints/step-N/`, complete or not there.

A checkpoint is a folder of torch.distributed.checkpoint files with a manifest beside them. It is
written under another name, and renamed once every file and the manifest are on disk. What a
checkpoint is worth is decided by the manifest: it lists each file with its size and checksum, and
has one of its own. A folder that was cut short, or copied only in part, is never chosen; a file
whose content has changed is refused when it is loaded.

Every tensor is stored under a name of its own, whole: ``model/<name>``, ``<optimizer>/<parameter>/
<key>``, ``ema/<name>``, ``metrics/<block>``, ``histories/<stream>``, ``rng/<rank>``. So
a run can be continued on another number of ranks; only the random numbers (dropout) then differ.
"""

import json
import logging
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
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
from gem.train.checkpoint_faults import damage_named, disk_faults_named
from gem.train.checkpoint_manifest import (
    FORMAT,
    check_content,
    checksums,
    is_complete,
    read_manifest,
    write_manifest,
)
from gem.train.history_counts import HistoryCounts
from gem.train.metrics import MetricBlock, MetricStream
from gem.train.spec import RESUMABLE_KEYS
from gem_opkit.errors import ConfigError, DataError, refusal
from gem_parallel.collectives import barrier
from gem_parallel.launch import World

_log = logging.getLogger(__name__)

_PARTIAL = "partial-"


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
    """

    model: nn.Module
    optimizers: Mapping[str, torch.optim.Optimizer]
    ema: dict[str, Tensor]
    metrics: MetricStream
    step: int = 0
    examples: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    histories: HistoryCounts = field(default_factory=lambda: HistoryCounts(()))


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
        PermissionError: one of them may not be read, so nobody knows what it is worth.
    """
    passed_over: list[Path] = []
    for _, folder in sorted(_step_folders(checkpoints), reverse=True):
        if is_complete(folder):
            for damaged in passed_over:
                _log.warning("%s is not complete and is passed over", damaged)
            return folder
        passed_over.append(folder)
    if passed_over:
        raise DataError(
            refusal(
                "checkpoint",
                str(checkpoints),
                must="hold a complete checkpoint, or none at all",
                got=f"{', '.join(one.name for one in passed_over)} with files missing, changed or "
                "cut short",
                fix="restore them, or remove them to begin at the first step",
            )
        )
    return None


def _step_folders(checkpoints: Path) -> list[tuple[int, Path]]:
    if not checkpoints.exists():
        return []
    # Listed, not globbed: a glob finds nothing in a folder that may not be read.
    return [
        (int(entry.name.removeprefix("step-")), entry)
        for entry in checkpoints.iterdir()
        if re.fullmatch("step-[0-9]+", entry.name)
    ]


def save_checkpoint(
    checkpoints: Path,
    state: TrainState,
    config: RunConfig,
    world: World,
    *,
    current: MetricBlock,
    dataset: str,
    keep: int,
) -> Path:
    """Write a checkpoint and remove the oldest ones. Every rank has to call this.

    Args:
        checkpoints: the run's folder of checkpoints, shared by all ranks.
        state: what to write.
        config: the run's config, kept beside it.
        world: the ranks.
        current: the open block of metrics, merged over ranks.
        dataset: fingerprint of the data set.
        keep: newest checkpoints that stay.

    Returns:
        Folder of the checkpoint.
    """
    target = step_folder(checkpoints, state.step)
    partial = checkpoints / f"{_PARTIAL}{target.name}"
    if world.is_first:
        for old in checkpoints.glob(f"{_PARTIAL}*"):
            shutil.rmtree(old)
        partial.mkdir(parents=True)
    barrier(world)
    tensors, scalars = _collect(state, world, current)
    with _one_process_is_meant(), disk_faults_named(partial):
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial), no_dist=world.size == 1)
    barrier(world)
    files = checksums(partial, world)
    if world.is_first:
        facts = {
            "format": FORMAT,
            "step": state.step,
            "examples": state.examples,
            "world_size": world.size,
            "torch": torch.__version__,
            "dataset": dataset,
            "config": config.model_dump(mode="json"),
            "counters": state.counters,
            "scalars": scalars,
            "files": files,
        }
        with disk_faults_named(partial):
            write_manifest(partial, facts)
            if target.exists():  # left there incomplete, by a copy or a full disk
                shutil.rmtree(target)
            partial.rename(target)
        for old in [f for _, f in sorted(_step_folders(checkpoints)) if is_complete(f)][:-keep]:
            # Renamed first: a run that is killed meanwhile leaves no half of a checkpoint behind.
            shutil.rmtree(old.rename(old.with_name(f"{_PARTIAL}{old.name}")))
    barrier(world)
    return target


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
        DataError: the checkpoint is not complete, has changed since it was written, or does not
            fit the model.
    """
    manifest = read_manifest(folder)
    check_content(folder, manifest, world)
    with damage_named(folder):
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    _check_names(stored, state)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
        and (not name.startswith("rng/") or name.startswith(f"rng/{world.rank}/"))
    }
    with _one_process_is_meant(), damage_named(folder):
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=world.size == 1)
    state.model.load_state_dict(_under(tensors, "model/"))
    for name, average in _under(tensors, "ema/").items():
        state.ema[name].copy_(average)
    for name, optimizer in state.optimizers.items():
        _load_optimizer(
            optimizer, state.model, _under(tensors, f"{name}/"), manifest["scalars"].get(name, {})
        )
    blocks = {k: v.numpy() for k, v in _under(tensors, "metrics/").items()}
    state.metrics.load_state(blocks, keep_current=world.is_first)
    state.step, state.examples = manifest["step"], manifest["examples"]
    # Sums over ranks, so exactly one rank keeps them.
    state.counters = dict(manifest["counters"]) if world.is_first else {}
    state.histories.load(_under(tensors, "histories/"), keep=world.is_first)
    random = _under(tensors, f"rng/{world.rank}/")
    if manifest["world_size"] != world.size:
        _log.warning(
            "the checkpoint is of %d ranks and this run has %d: dropout will differ",
            manifest["world_size"],
            world.size,
        )
    if "cpu" in random:
        torch.set_rng_state(random["cpu"])
    if "cuda" in random and world.device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"], world.device)


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Torch warns of every save and load in a single process, asked for or not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _collect(
    state: TrainState, world: World, current: MetricBlock
) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """Every tensor by its name in the checkpoint, and the optimizers' plain numbers."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, float]] = {}
    for name, value in state.model.state_dict().items():
        if not isinstance(value, Tensor):
            raise DataError(
                refusal(
                    "checkpoint",
                    f"model state {name}",
                    must="be a tensor",
                    got=type(value).__name__,
                    fix="register it as a buffer",
                )
            )
        tensors[f"model/{name}"] = value
    tensors |= {f"ema/{name}": value for name, value in state.ema.items()}
    names = {id(p): name for name, p in state.model.named_parameters()}
    for kind, optimizer in state.optimizers.items():
        scalars[kind] = {}
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():
                place = f"{names[id(parameter)]}/{key}"
                if isinstance(value, Tensor):
                    tensors[f"{kind}/{place}"] = value
                else:
                    scalars[kind][place] = value
    tensors |= {f"histories/{name}": value for name, value in state.histories.tensors().items()}
    for name, data in state.metrics.state(current).items():
        tensors[f"metrics/{name}"] = torch.from_numpy(data.copy())
    tensors[f"rng/{world.rank}/cpu"] = torch.get_rng_state()
    if world.device.type == "cuda":
        tensors[f"rng/{world.rank}/cuda"] = torch.cuda.get_rng_state(world.device)
    return tensors, scalars


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, float],
) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    index = {name: i for i, name in enumerate(ordered)}
    entries: dict[int, dict[str, Any]] = {}
    for place, value in {**tensors, **scalars}.items():
        parameter, _, key = place.rpartition("/")
        entries.setdefault(index[parameter], {})[key] = value
    # The groups stay those of this run: the config is equal, and rates follow from the step.
    optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})


def _check_names(stored: Mapping[str, Any], state: TrainState) -> None:
    """The stored model and averages must be those of this model, by name."""
    wanted = {f"model/{name}" for name in state.model.state_dict()}
    wanted |= {f"ema/{name}" for name in state.ema}
    there = {name for name in stored if name.startswith(("model/", "ema/"))}
    if wanted != there:
        raise DataError(
            refusal(
                "checkpoint",
                "tensors",
                must="be those of the model",
                got=f"missing {sorted(wanted - there)[:3]}, unknown {sorted(there - wanted)[:3]}",
                fix="build the model from the run's own config.toml",
            )
        )

"""The dense weights of a run as one SafeTensors file, for other programs to read.

They are read from a checkpoint alone: neither the data set nor the model's code is needed. Left
out: embedding tables, which are large and belong to their ids.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gem import __version__
from gem.train.checkpoint import latest_complete, read_manifest, single_process_is_meant
from gem.train.checkpoint_faults import damage_named
from gem.train.checkpoint_manifest import check_content
from gem.train.run_folder import CHECKPOINTS, CONFIG_FILE
from gem.train.whole_file import check_new, partial_of
from gem_opkit.errors import ConfigError, DataError, refusal
from gem_parallel.launch import World

_TABLES = "tables."


def export_weights(run: Path, out: Path, *, averaged: bool = True) -> dict[str, Any]:
    """Write the dense weights of a run's newest complete checkpoint.

    Args:
        run: the run's folder, or one of its checkpoints.
        out: file to write; must not be there.
        averaged: the averages in place of the weights, where the run keeps them, as evaluation
            does.

    Returns:
        ``{file, checkpoint, steps, tensors, bytes, averaged}``.

    Raises:
        ConfigError: no run there, or ``out`` is in use.
        DataError: no complete checkpoint, or a damaged one.
        OSError: the disk refuses; names ``out``, and nothing is left of it.
    """
    check_new(out, command="gem export-weights")
    checkpoint = checkpoint_of(run, command="gem export-weights")
    manifest = read_manifest(checkpoint)
    check_content(checkpoint, manifest, World())
    tensors, are_averaged = checkpoint_weights(checkpoint, averaged=averaged, tables=False)
    notes = {
        "format": "pt",
        "gem_trainer": __version__,
        "recipe": str(manifest["config"]["name"]),
        "step": str(manifest["step"]),
        "dataset": str(manifest["dataset"]),
        "averaged": str(are_averaged).lower(),
    }
    _write(out, save(tensors, metadata=notes))
    return {
        "file": str(out),
        "checkpoint": str(checkpoint),
        "steps": manifest["step"],
        "tensors": len(tensors),
        "bytes": out.stat().st_size,
        "averaged": are_averaged,
    }


def _write(out: Path, content: bytes) -> None:
    partial = partial_of(out)
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(out)
    except OSError as fault:
        fault.filename = str(out)
        raise
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def checkpoint_of(run: Path, *, command: str) -> Path:
    """Find the checkpoint that is meant.

    Args:
        run: the run's folder, or one of its checkpoints.
        command: who asks, for messages.

    Returns:
        the newest complete checkpoint of the run, or the one given.

    Raises:
        ConfigError: no run there.
        DataError: it has no complete checkpoint.
    """
    if not (run / CONFIG_FILE).is_file():
        if run.parent.name == CHECKPOINTS:
            return run
        raise ConfigError(
            refusal(
                command,
                "RUN",
                must=f"be the folder of a run, with its {CONFIG_FILE}, or one of its checkpoints",
                got=str(run),
                fix="give the folder that gem train wrote",
            )
        )
    newest = latest_complete(run / CHECKPOINTS)
    if newest is None:
        raise DataError(
            refusal(
                command,
                "RUN",
                must="have a complete checkpoint",
                got=str(run),
                fix="train it first, or continue it with --resume",
            )
        )
    return newest


def checkpoint_weights(
    checkpoint: Path, *, averaged: bool, tables: bool = True
) -> tuple[dict[str, Tensor], bool]:
    """Read the weights of a model from a checkpoint, whoever holds which part of them there.

    Args:
        checkpoint: a complete one, whose content has been checked.
        averaged: the averages in place of the weights, where the run keeps them.
        tables: the embedding tables, too.

    Returns:
        weights and buffers by their names in the model, and whether the dense ones are averages.

    Raises:
        DataError: the checkpoint is damaged.
    """
    with damage_named(checkpoint):
        stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    names = {
        name.removeprefix("model/"): name
        for name in stored
        if name.startswith("model/") and (tables or not name.startswith(f"model/{_TABLES}"))
    }
    means = {name.removeprefix("ema/"): name for name in stored if name.startswith("ema/")}
    if averaged:
        names |= {name: place for name, place in means.items() if name in names}
    wanted = {
        place: torch.empty(entry.size, dtype=entry.properties.dtype)
        for place in names.values()
        if isinstance(entry := stored[place], TensorStorageMetadata)
    }
    with single_process_is_meant(), damage_named(checkpoint):
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    tensors = {name: wanted[place] for name, place in sorted(names.items()) if place in wanted}
    return tensors, averaged and bool(means)

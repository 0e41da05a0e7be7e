"""A run's folder: whose it is, and the config in it."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gem.config import RunConfig, parse_recipe, recipe_text
from gem.train.spec import RESUMABLE_KEYS
from gem.train.whole_file import partial_of, write_whole
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.collectives import all_reduce_sum, barrier
from gem_parallel.launch import World

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.toml"
CHECKPOINTS = "checkpoints"


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
    used = folder.is_dir() and any(
        entry.name != partial_of(path).name for entry in folder.iterdir()
    )
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
        write_whole(folder / CONFIG_FILE, config.to_toml())


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

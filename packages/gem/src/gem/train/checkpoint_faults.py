"""What goes wrong while a checkpoint is written or read, as one line for the user.

torch wraps the fault of a rank into a `CheckpointException`, which is no `Exception`, and hides
that of a full disk behind a `RuntimeError` of its file writer; so both are looked into.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from gem.train.checkpoint_manifest import instead_of
from gem_opkit.errors import DataError, refusal

# Less than what a write that did not fit may leave: a buffer of torch's writer.
_LEAST_FREE_BYTES = 1 << 18


@contextmanager
def disk_faults_named(partial: Path) -> Iterator[None]:
    """Turn what a full or broken disk makes torch raise into one line; remove the torn files.

    Args:
        partial: the folder that is being written.

    Raises:
        DataError: the disk refused; names the folder of checkpoints and what the system said.
    """
    try:
        yield
    except (CheckpointException, RuntimeError, OSError) as fault:
        full = _is_full(partial.parent)  # asked before the torn files go
        shutil.rmtree(partial, ignore_errors=True)
        _go_on_ending(fault)
        cause = _first(fault, lambda one: isinstance(one, OSError))
        if cause is None and full:
            # torch's writer in C++ says that a write failed, and not why.
            cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if cause is None:
            raise
        raise DataError(
            refusal(
                "checkpoint",
                str(partial.parent),
                must="take another checkpoint",
                got=cause,
                fix="free space there, then continue with --resume",
            )
        ) from fault


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _LEAST_FREE_BYTES
    except OSError:
        return False


def _first(fault: BaseException, wanted: Callable[[BaseException], bool]) -> BaseException | None:
    """The first of some errors among those that led to a fault."""
    waiting: list[BaseException | None] = [fault]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        if wanted(one):
            return one
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, CheckpointException):
            waiting += [error for error, _ in one.failures.values()]
    return None


def _go_on_ending(fault: BaseException) -> None:
    """Raise again what ends a command, such as Ctrl-C or SIGTERM: torch takes it for a fault."""
    own = CheckpointException, Exception
    ending = _first(fault, lambda one: not isinstance(one, own))
    if ending is not None:
        raise ending from fault


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Turn what damaged files make torch raise into one line.

    Args:
        folder: the checkpoint that is being read.

    Raises:
        DataError: some file cannot be read. It holds what was written, as its checksum says.
    """
    try:
        yield
    except (CheckpointException, Exception) as fault:
        _go_on_ending(fault)
        first = _first(fault, lambda one: isinstance(one, Exception)) or fault
        raise DataError(
            refusal(
                "checkpoint",
                str(folder),
                must="be readable",
                got=f"{type(first).__name__}: {first}",
                fix=instead_of(folder),
            )
        ) from fault

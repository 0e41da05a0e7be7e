"""Join the ranks that ``torchrun`` started, or run alone. Nothing else reads its environment."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gem_opkit.errors import ConfigError
from gem_parallel.contract import DenseAxis
from gem_parallel.meeting import store_of_this_start
from gem_parallel.watch import watched

# Keeps process groups until the process ends. The destructor of a gloo group joins its threads
# while it holds the interpreter's lock, and a thread that is still dropping the tensor of the last
# collective waits for that lock: a deadlock at the end of one job in a few.
_groups_of_this_process: list[object] = []
# For what those threads have still to do when the last collective is over. One that wants the lock
# when the interpreter has begun to end aborts the process, after right results. On a busy host a
# thread may not have had a core by then, so its state is looked at, up to the limit.
_SETTLE_S = 0.1
_SETTLE_LIMIT_S = 10.0
_TASKS = Path("/proc/self/task")
_GLOO_THREAD = "pt_gloo_runloop"
# A rank may prepare data or write a checkpoint while the others wait in a collective. That a rank
# has died is found sooner, by the watch.
_COLLECTIVE_LIMIT = timedelta(minutes=30)
# Variable that sets the silence after which a rank counts as dead, seconds; 0: nobody watches.
SILENCE_VARIABLE = "GEM_RANK_SILENCE_S"
_SILENCE_S = 45


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a job, as one of them sees it.

    Attributes:
        rank: number of this rank, 0 <= rank < size.
        size: number of ranks; 1 means that no process group is needed, and none exists but for
            ``way``.
        device: device of this rank.
        way: axis of the dense plan whose way a single rank goes, with a process group of its own,
            though nothing has to be cut or sent: for tests and measurements of what several ranks
            cost beside communication (`gem_parallel.testing.one_rank_group`). None otherwise.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    way: DenseAxis | None = None

    @property
    def is_first(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.rank == 0

    @property
    def grouped(self) -> bool:
        """Whether there is a process group: with several ranks, or one that goes their way."""
        return self.size > 1 or self.way is not None


@contextmanager
def process_group(device: str = "auto") -> Iterator[World]:
    """Join the job of this process for the length of a ``with`` block.

    Under ``torchrun`` the environment holds RANK, WORLD_SIZE and LOCAL_RANK; without them the
    process is a job of its own and no process group is made. CPU ranks talk over gloo, GPU ranks
    over NCCL. A rank that gives no sign of life for 45 s, or as many as the variable
    GEM_RANK_SILENCE_S says, ends all others with a line that names it.

    Args:
        device: ``auto`` (CUDA where there is one, otherwise CPU), ``cpu`` or ``cuda``.

    Yields:
        The world that this process is part of.

    Raises:
        ConfigError: the device is unknown or absent, a host has more ranks than GPUs, or the
            environment gives no place among the ranks.
    """
    size, rank = _env_int("WORLD_SIZE", 1), _env_int("RANK", 0)
    local_rank = _env_int("LOCAL_RANK", 0)
    _check_place(rank, size)
    chosen = _pick_device(device, local_rank)
    if size == 1:
        yield World(device=chosen)
        return
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    silence_s = _env_int(SILENCE_VARIABLE, _SILENCE_S)
    shared, _, _ = next(dist.rendezvous("env://", rank, size, timeout=_COLLECTIVE_LIMIT))
    store = store_of_this_start(shared, rank, size, _COLLECTIVE_LIMIT)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=_COLLECTIVE_LIMIT
    )
    _groups_of_this_process.append(dist.group.WORLD)
    try:
        with watched(store, rank, size, silence_s):
            yield World(rank=rank, size=size, device=chosen)
    finally:
        # The groups of meshes too.
        _groups_of_this_process.extend(dist.distributed_c10d._world.pg_map)
        _settle()
        dist.destroy_process_group()


def _settle() -> None:
    """Wait until gloo's threads sleep, with the interpreter's lock free for them meanwhile."""
    end = time.monotonic() + _SETTLE_LIMIT_S
    time.sleep(_SETTLE_S)
    while time.monotonic() < end and _gloo_is_busy():
        time.sleep(_SETTLE_S)


def _gloo_is_busy() -> bool:
    """True while a thread of gloo that runs collectives has work or waits for a core.

    False where there is no ``/proc``: the fixed wait is all that is known there.
    """
    for task in _TASKS.glob("*"):
        try:
            # "number (name) state ..."
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # The thread has ended.
        if name == _GLOO_THREAD and rest.split()[0] != "S":
            return True
    return False


def _env_int(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    # A superscript is a digit too, and `int` refuses thousands of them.
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(
            f"process_group: {name} must be a whole number; got {text!r}; unset it, or start ranks "
            "with torchrun"
        )
    return int(text)


def _check_place(rank: int, size: int) -> None:
    """Refuse a place that does not exist: torch would wait for the missing ranks, in silence."""
    if size < 1 or rank >= size:
        raise ConfigError(
            f"process_group: RANK must be in [0, WORLD_SIZE); got RANK {rank} of WORLD_SIZE "
            f"{size}; start ranks with torchrun"
        )
    if size > 1 and "RANK" not in os.environ:
        raise ConfigError(
            f"process_group: RANK must be set with WORLD_SIZE {size}; got none; start ranks with "
            "torchrun"
        )


def _pick_device(device: str, local_rank: int) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"process_group: device must be auto, cpu or cuda; got {device!r}; choose one of them"
        )
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"process_group: a host must have a GPU for every rank; got local rank {local_rank} "
            f"and {count} GPUs; start fewer ranks a host or ask for device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)

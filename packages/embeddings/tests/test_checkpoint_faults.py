"""What goes wrong on one rank while all of them write or read a checkpoint: nobody is left waiting.

Each fault happens on the second of two ranks, at a place of torch's checkpoint that other ranks
would not hear of. Both ranks have to raise, name that rank, and go on.
"""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from gem_embeddings.checkpoint_files import Whole, copied, read, write
from gem_opkit.errors import DataError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

# Ranks that wait for each other need minutes to find out.
TIMEOUT_S = 30.0


class TwoWordsError(Exception):
    """Can be sent to another rank, and not be received."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def unsendable(*_: Any, **__: Any) -> None:
    fault: Any = ValueError("cannot be sent")
    fault.lock = threading.Lock()
    raise fault


def unreceivable(*_: Any, **__: Any) -> None:
    raise TwoWordsError("cannot be", "received")


def memory(*_: Any, **__: Any) -> None:
    raise MemoryError("no host memory")


# Where it happens and what; what each rank is told.
Fault = tuple[type, str, Callable[..., None], str]
WHILE_WRITING: list[Fault] = [
    (dcp.FileSystemWriter, "__init__", full, "No space left"),
    (dcp.DefaultSavePlanner, "create_local_plan", unsendable, "cannot be sent"),
    (dcp.FileSystemWriter, "write_data", full, "No space left"),
    (dcp.FileSystemWriter, "write_data", unsendable, "cannot be sent"),
    (dcp.FileSystemWriter, "write_data", unreceivable, "cannot be received"),
]
WHILE_READING: list[Fault] = [
    (dcp.FileSystemReader, "read_metadata", full, "No space left"),
    (dcp.FileSystemReader, "read_data", unreceivable, "cannot be received"),
    (Whole, "of", memory, "no host memory"),
]


@contextmanager
def broken(where: type, name: str, fault: Callable[..., None]) -> Iterator[None]:
    before = where.__dict__.get(name)
    setattr(where, name, fault)
    try:
        yield
    finally:
        if before is None:
            delattr(where, name)
        else:
            setattr(where, name, before)


def told(world: World, call: Callable[[], None], fault: Fault) -> str:
    """What this rank raises."""
    try:
        if world.rank == 1:
            with broken(*fault[:3]):
                call()
        else:
            call()
    except DataError as refused:
        return str(refused)
    return "nothing"


def meet_faults(world: World, folder: Path) -> list[str]:
    whole = {"t": torch.arange(6.0)}
    state = {"t": torch.full((6,), -1.0)}
    found = []
    for index, fault in enumerate(WHILE_WRITING):
        target = folder / f"write-{index}"
        found.append(told(world, lambda to=target: write(copied(whole), {}, to, world), fault))
    write(copied(whole), {}, folder / "good", world)
    for fault in WHILE_READING:
        found.append(told(world, lambda: read(state, folder / "good", world), fault))
        if not bool((state["t"] == -1).all()):
            found[-1] = "half-loaded"
    read(state, folder / "good", world)
    found.append(str(state["t"].tolist() == whole["t"].tolist()))
    return found


def test_a_fault_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    by_rank = run_ranks(meet_faults, 2, tmp_path, timeout_s=TIMEOUT_S)
    for rank, found in enumerate(by_rank):
        assert found.pop() == "True"  # nothing is out of step afterwards
        for (*_, words), message in zip([*WHILE_WRITING, *WHILE_READING], found, strict=True):
            assert words in message, (rank, words)
            assert ("got rank 1: " in message) == (rank == 0), message
    # Nothing half-written is left.
    assert [path.name for path in tmp_path.iterdir()] == ["good"]

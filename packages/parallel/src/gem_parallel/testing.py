"""Run a function on several gloo ranks of this machine, inside a test.

Ranks come from a fork server that has torch loaded already, so that a test of two or four ranks
costs about a second. A failing rank's traceback is raised in the test; a rank that never answers
ends in a TimeoutError that names it.
"""

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gem_opkit.errors import DataError
from gem_parallel.contract import DenseAxis
from gem_parallel.launch import World

_CONTEXT = multiprocessing.get_context("forkserver")
# Imported once here, not in every rank: DistributedDataParallel needs Dynamo, which takes seconds.
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])

# Ranks that have answered need this long to leave; the others are not waited for.
_LEAVE_S = 20.0


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: object, timeout_s: float = 120.0
) -> list[Any]:
    """Call ``function(world, *args)`` on every rank of a fresh gloo job.

    Args:
        function: defined at the top of a file. Each rank loads that file anew, since pytest's
            importlib mode gives test modules names that no other process can import.
        world_size: number of processes, at least 1.
        args: pickled to every rank.
        timeout_s: longest wait for all results, seconds.

    Returns:
        The ranks' results, in rank order. Tensors are returned as copies.

    Raises:
        RuntimeError: a rank raised; its traceback is the message.
        TimeoutError: a rank gave no result in time.
    """
    source = (str(inspect.getsourcefile(function)), function.__name__)
    results: Any = _CONTEXT.Queue()
    answers: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            _CONTEXT.Process(
                target=_run_rank,
                args=(*source, World(rank=rank, size=world_size), store, results, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        while len(answers) < world_size and all(ok for ok, _ in answers.values()):
            try:
                rank, ok, value = results.get(timeout=0.5)
            except queue.Empty:
                died = [r for r, p in enumerate(ranks) if not p.is_alive() and r not in answers]
                if died or time.monotonic() > deadline:
                    break
                continue
            answers[rank] = (ok, value)
        clean = len(answers) == world_size and all(ok for ok, _ in answers.values())
        _end(ranks, wait_s=_LEAVE_S if clean else 1.0)
    for rank, (ok, value) in sorted(answers.items()):
        if not ok:
            raise RuntimeError(f"rank {rank} of {world_size} failed:\n{value}")
    missing = sorted(set(range(world_size)) - set(answers))
    if missing:
        raise TimeoutError(f"no result from ranks {missing}: dead, or silent for {timeout_s:.0f} s")
    return [pickle.loads(answers[rank][1]) for rank in range(world_size)]


@contextmanager
def one_rank_group(
    way: DenseAxis, device: torch.device | None = None, *, backend: str | None = None
) -> Iterator[World]:
    """Let this process go the way of several ranks by itself, for the length of a ``with`` block.

    What several ranks cost beside communication can then be measured on one GPU, and tested on it.

    Args:
        way: axis of the dense plan whose way is gone: copies, shards or experts, each one part.
        device: of the rank; None for the CPU.
        backend: of the group; None for NCCL on a GPU and gloo on a CPU.

    Yields:
        a world of one rank with a process group.
    """
    device = torch.device("cpu") if device is None else device
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(device=device, way=way)
    finally:
        dist.destroy_process_group()


class MappedBuffer:
    """A shared buffer of CPU ranks (`gem_parallel.copy_engine.buffers.SharedBuffer`), in files.

    Memory of other ranks is really read, as the copy engines of GPUs read it.

    Args:
        folder: empty at first, the same on every rank.
        group: the ranks.
        bytes_: size on every rank.

    Attributes:
        own: this rank's memory, uint8, filled with 255.
    """

    made = 0

    def __init__(self, folder: str | Path, group: dist.ProcessGroup, bytes_: int) -> None:
        among = "-".join(map(str, dist.get_process_group_ranks(group)))
        stem = f"{folder}/{MappedBuffer.made}-{among}"
        MappedBuffer.made += 1
        self._group = group
        paths = [f"{stem}-{rank}" for rank in range(group.size())]
        self.own = torch.from_file(paths[group.rank()], shared=True, size=bytes_, dtype=torch.uint8)
        self.own.fill_(255)
        dist.barrier(group)
        self._all = [
            torch.from_file(path, shared=True, size=bytes_, dtype=torch.uint8) for path in paths
        ]

    def meet(self) -> None:
        """Wait until every rank has come here."""
        dist.barrier(self._group)

    def of(self, rank: int, first_byte: int, bytes_: int) -> torch.Tensor:
        """Give a part of another rank's memory.

        Args:
            rank: in the group.
            first_byte: at which it begins.
            bytes_: its size.

        Returns:
            uint8.
        """
        return self._all[rank][first_byte : first_byte + bytes_]


def _end(ranks: Sequence[BaseProcess], *, wait_s: float) -> None:
    for process in ranks:
        process.join(wait_s)
        if process.is_alive():
            process.kill()
            process.join()


def _run_rank(
    file: str,
    name: str,
    world: World,
    store: str,
    results: Any,
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        function = _load(file, name)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size
        )
        # Pickled here: the queue would pass tensors as shared memory, which ends with this process.
        results.put((world.rank, True, pickle.dumps(function(world, *args))))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever a rank raises must reach the test
        results.put((world.rank, False, traceback.format_exc()))
    results.close()
    results.join_thread()
    # Leaving the usual way can abort in the destructors of gloo's threads after right results.
    os._exit(0)


def _load(file: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"ranks_{Path(file).stem}", file)
    if spec is None or spec.loader is None:
        raise DataError(f"run_ranks: function must live in a Python file; got {file}; move it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)

"""Checkpoints are written while training goes on, from a copy of the state in memory.

    take_snapshot   every rank, between two steps: a copy of what it is to write
    write_snapshot  at leisure: files, checksums, manifest, rename, old ones removed

Where every rank has a copy of everything but its random numbers, the first one writes it all, and
no rank talks to another meanwhile. Of a sharded state every rank writes what it holds, and they
talk over a process group of their own. So a write cannot get in the way of the collectives of
training. Only one is under way at a time; the next one waits for it.
"""

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from gem.config import RunConfig
from gem.train.checkpoint import (
    PARTIAL,
    REPLACED,
    TrainState,
    collect,
    single_process_is_meant,
    step_folder,
    step_folders,
)
from gem.train.checkpoint_faults import disk_faults_named
from gem.train.checkpoint_manifest import FORMAT, checksums, is_complete, write_manifest
from gem.train.checkpoint_tensors import copied
from gem.train.metrics import MetricBlock
from gem.train.rank_group import RankGroup
from gem_embeddings.agreement import Agreement
from gem_embeddings.checkpoint_write import write_agreed
from gem_opkit.errors import DataError, refusal
from gem_parallel.collectives import all_gather_rows, all_reduce_sum
from gem_parallel.launch import World

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checkpoint that is to be written.

    Attributes:
        step: steps done.
        tensors: name -> tensor in host memory, which nothing else writes to; of a sharded one what
            this rank holds.
        facts: what the manifest says, but for the files.
    """

    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def take_snapshot(
    state: TrainState,
    config: RunConfig,
    world: World,
    *,
    current: MetricBlock,
    dataset: str,
    copy: bool = True,
) -> Snapshot | None:
    """Copy a state for a checkpoint. Every rank has to call this.

    Args:
        state: counters, histories and counts of ids must be sums over ranks by now.
        config: the run's config, kept beside it.
        world: the ranks.
        current: the open block of metrics, merged over ranks.
        dataset: fingerprint of the data set.
        copy: whether the state may change before the snapshot is written.

    Returns:
        The snapshot; None on ranks that have nothing to write, which are all but the first one
        unless the state is sharded.

    Cost: with ``copy`` the host holds everything that this rank writes once more; of what is
    sharded it always does.
    """
    random = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(world.device)
    numbers = {f"rng/{world.rank}/{kind}": own for kind, own in random.items()}
    if not state.sharded:
        gathered = {
            kind: all_gather_rows(own[None].to(world.device), world).cpu()
            for kind, own in random.items()
        }
        if not world.is_first:
            return None
        for kind, states in gathered.items():
            numbers |= {f"rng/{rank}/{kind}": own.clone() for rank, own in enumerate(states)}
    tensors, scalars = collect(state, current)
    tensors = {name: copied(value, copy=copy) for name, value in tensors.items()} | numbers
    if state.sharded:
        scalars = _joined(RankGroup(world).gather(scalars))
    facts = {
        "format": FORMAT,
        "step": state.step,
        "examples": state.examples,
        "world_size": world.size,
        "torch": torch.__version__,
        "dataset": dataset,
        "config": config.model_dump(mode="json"),
        "counters": dict(state.counters),
        "loop": state.loop.to_json(),
        "scalars": scalars,
    }
    return Snapshot(state.step, tensors, facts)


def _joined(parts: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Numbers of the optimizers of all ranks, of which some have parameters of their own."""
    whole: dict[str, dict[str, float]] = {}
    for part in parts:
        for kind, numbers in part.items():
            whole.setdefault(kind, {}).update(numbers)
    return whole


def write_snapshot(
    checkpoints: Path,
    snapshot: Snapshot,
    *,
    keep: int,
    best: int | None = None,
    ranks: RankGroup | None = None,
) -> Path:
    """Write a checkpoint and remove the oldest ones.

    Args:
        checkpoints: the run's folder of checkpoints.
        snapshot: what to write.
        keep: newest checkpoints that stay.
        best: step of one that stays whatever its age.
        ranks: those that each write a part, and all call this; None for one process that writes
            all.

    Returns:
        Folder of the checkpoint.

    Raises:
        DataError: the disk refused; what was there before is whole.
    """
    ranks = RankGroup(World()) if ranks is None else ranks
    target = step_folder(checkpoints, snapshot.step)
    partial = checkpoints / f"{PARTIAL}{target.name}"
    with ranks.together("begin to write"), disk_faults_named(partial):
        if ranks.world.is_first:
            remove_partial(checkpoints)
            partial.mkdir(parents=True)
    if ranks.world.size == 1:
        with disk_faults_named(partial):
            dcp.save(snapshot.tensors, storage_writer=dcp.FileSystemWriter(partial), no_dist=True)
            files = checksums(partial)
    else:
        writing = Agreement(
            ranks.world,
            ranks.group,
            "checkpoint",
            str(partial.parent),
            "take another checkpoint",
            "free space there, then continue with --resume",
        )
        try:
            files = write_agreed(snapshot.tensors, partial, writing)
        except DataError:  # on every rank, and none of them writes any more
            shutil.rmtree(partial, ignore_errors=True)
            raise
    with ranks.together("write the manifest"), disk_faults_named(partial):
        if ranks.world.is_first:
            write_manifest(partial, {**snapshot.facts, "files": files})
            _settle(partial)
            _put_in_place(partial, target)
            _settle(checkpoints)
    if ranks.world.is_first:
        _remove_old(checkpoints, keep, best)
    return target


def remove_partial(checkpoints: Path) -> None:
    """Remove what killed processes had begun to write or to remove. Nobody may be writing.

    Args:
        checkpoints: the run's folder of checkpoints; may be missing.

    Raises:
        OSError: the disk refuses.
    """
    for old in checkpoints.glob(f"{PARTIAL}*"):
        shutil.rmtree(old)


def _put_in_place(partial: Path, target: Path) -> None:
    # Left there incomplete by a copy, or of the same step before it was evaluated.
    if target.exists():
        before = target.with_name(f"{REPLACED}{target.name}")
        if before.exists():
            _remove(before)
        target.rename(before)
    partial.rename(target)


def _remove_old(checkpoints: Path, keep: int, best: int | None) -> None:
    whole: list[tuple[int, Path]] = []
    for step, one in sorted(step_folders(checkpoints)):
        if one.name.startswith(REPLACED) and is_complete(step_folder(checkpoints, step)):
            _remove(one)
        elif is_complete(one):
            whole.append((step, one))
    for step, old in whole[:-keep]:
        if step != best:
            _remove(old)


def _remove(checkpoint: Path) -> None:
    # Renamed first: a run that is killed meanwhile leaves no half of a checkpoint behind.
    shutil.rmtree(checkpoint.rename(checkpoint.with_name(f"{PARTIAL}{checkpoint.name}")))


def _settle(folder: Path) -> None:
    """Have the names in a folder survive a power cut, where its file system can promise that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


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
    """Write a checkpoint and wait for it. Every rank has to call this.

    Args:
        checkpoints: the run's folder of checkpoints, seen by all ranks.
        state: what to write.
        config: the run's config, kept beside it.
        world: the ranks.
        current: the open block of metrics, merged over ranks.
        dataset: fingerprint of the data set.
        keep: newest checkpoints that stay.

    Returns:
        Folder of the checkpoint.

    Raises:
        DataError: the disk refused.
    """
    snapshot = take_snapshot(state, config, world, current=current, dataset=dataset, copy=False)
    ranks = RankGroup.of_its_own(world) if state.sharded else None
    with CheckpointWriter(checkpoints, keep=keep, background=False, ranks=ranks) as writer:
        writer.write(snapshot)
        raise_on_all(writer.take_fault(), world)
    return step_folder(checkpoints, state.step)


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time. To be used in a ``with`` block.

    Leaving the block waits for the one that is under way, unless it is left for a KeyboardInterrupt
    or the end of the process.

    Args:
        checkpoints: the run's folder of checkpoints.
        keep: newest checkpoints that stay.
        background: write in a thread of its own; otherwise `write` returns when it is done.
        ranks: those that each write a part, in a group of their own; None where the first rank
            writes all.

    Attributes:
        longest_s: seconds that the slowest one took so far.
    """

    def __init__(
        self, checkpoints: Path, *, keep: int, background: bool, ranks: RankGroup | None = None
    ) -> None:
        self.longest_s = 0.0
        self._ranks = ranks
        self._checkpoints, self._keep, self._background = checkpoints, keep, background
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None
        self._quiet = contextlib.ExitStack()

    def write(self, snapshot: Snapshot | None, *, best: int | None = None) -> None:
        """Begin to write a checkpoint, once the one before it is done.

        Args:
            snapshot: what to write; None on a rank that has nothing to write.
            best: step of a checkpoint that stays whatever its age.
        """
        self.wait()
        if snapshot is None:
            return
        if not self._background:
            self._write(snapshot, best)
            return
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, best), name="gem-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_fault(self) -> BaseException | None:
        """What became of the writes since the last call, without waiting for one under way.

        Returns:
            Why one could not be written, or None.
        """
        if self._thread is not None and self._thread.is_alive():
            return None
        self.wait()
        fault, self._fault = self._fault, None
        return fault

    def _write(self, snapshot: Snapshot, best: int | None) -> None:
        began = time.monotonic()
        try:
            write_snapshot(
                self._checkpoints, snapshot, keep=self._keep, best=best, ranks=self._ranks
            )
        except BaseException as fault:  # noqa: BLE001 - told in the loop, on every rank
            self._fault = fault
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def __enter__(self) -> "CheckpointWriter":
        # Here and not around a write: a thread must not change what all threads share.
        self._quiet.enter_context(single_process_is_meant())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        at_once = kind is not None and not issubclass(kind, Exception)
        if not at_once:
            self.wait()
            if self._fault is not None and kind is not None:
                _log.warning("the newest checkpoint was not written: %s", self._fault)
        self._quiet.close()


def raise_on_all(fault: BaseException | None, world: World) -> None:
    """Raise on every rank what the first one ran into. Every rank has to call this.

    Args:
        fault: of this rank, or None.
        world: the ranks.

    Raises:
        BaseException: ``fault`` where it is, a DataError on the other ranks.
    """
    found = torch.tensor([int(fault is not None)], device=world.device)
    if not all_reduce_sum(found, world).item():
        return
    raise fault if fault is not None else not_written()


def not_written() -> DataError:
    """What a rank says that did not write: the first rank tells what was wrong."""
    return DataError(
        refusal(
            "checkpoint",
            "the first rank",
            must="write it",
            got="a fault there",
            fix="see its line",
        )
    )

"""The files of a table checkpoint: written whole or not at all, read whole or not at all.

The format is that of ``torch.distributed.checkpoint``, with checksums beside it. Every rank writes
its own pieces into a folder under another name, which is renamed when all are done. A load first
holds the files against their checksums and reads everything into host memory; only when every rank
has succeeded is anything overwritten.
"""

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from gem_embeddings.agreement import Agreement, first_words
from gem_embeddings.checkpoint_write import write_agreed
from gem_embeddings.checksums import check_files, write_checksums
from gem_embeddings.pieces import local_pieces
from gem_opkit.errors import DataError, GemError, refusal
from gem_parallel.launch import World

_NAME = "table checkpoint"
# A JSON text beside the tensors, as bytes: torch would pickle any other object.
_FACTS = "tables.facts"
# Names that a message lists.
_SHOWN = 4


class Whole(LocalShardsWrapper):
    """What this rank holds of a tensor, in host memory, as torch's checkpoint takes it.

    Unlike a DTensor it needs no mesh and may lie on another device than the mesh. Make it with
    ``of``.
    """

    __slots__ = ["_whole"]

    @classmethod
    def of(cls, tensor: Tensor, *, copy: bool) -> "Whole":
        """Make room for what this rank holds of a tensor.

        Args:
            tensor: a DTensor of ``gem_embeddings.pieces``, or a plain tensor.
            copy: whether its content is copied there.
        """
        pieces = local_pieces(tensor)
        values = [
            piece.values.to("cpu", copy=True)
            if copy
            else torch.empty(piece.values.shape, dtype=tensor.dtype)
            for piece in pieces
        ]
        made = cls(values, [piece.offsets for piece in pieces])
        made._whole = tensor.shape
        return made

    def size(self) -> torch.Size:  # type: ignore[override]
        """The size of the whole, which torch writes, and compares with that in a file."""
        return self._whole

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Host memory, also of no pieces, which torch would otherwise take for a meta tensor."""
        return torch.device("cpu")

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Never."""
        return False

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Tell torch what this rank reads; of what it holds nothing, nothing."""
        return self.local_chunks if self.local_shards() else []


def copied(state: Mapping[str, Tensor]) -> dict[str, Whole]:
    """Copy a state into host memory, so that training may go on while it is written.

    Args:
        state: name -> tensor, what this rank holds of it.
    """
    return {name: Whole.of(tensor, copy=True) for name, tensor in state.items()}


def write(
    state: Mapping[str, Whole],
    facts: Mapping[str, Any],
    folder: Path,
    world: World,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint. Every rank has to call this.

    Args:
        state: from ``copied``.
        facts: what JSON can say of it; the same on every rank.
        folder: of the checkpoint; must not exist, on a disk that all ranks see.
        world: the ranks.
        group: over which they talk; None for the default one.

    Raises:
        DataError: the folder is taken, or a rank could not write; nothing is left there then.
    """
    partial = folder.with_name(f"partial-{folder.name}")
    ranks = agreement(world, group, folder, "be written", "free space there")
    with ranks.step():
        if folder.exists():
            raise DataError(
                refusal(
                    _NAME,
                    str(folder),
                    must="not exist",
                    got="something there",
                    fix="take another name, or remove it",
                )
            )
        if world.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    text = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    try:
        files = write_agreed({**state, _FACTS: text}, partial, ranks)
        with ranks.step():
            if world.is_first:
                write_checksums(partial, files)
                partial.rename(folder)
    except BaseException:
        if world.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def agreement(
    world: World, group: dist.ProcessGroup | None, folder: Path, must: str, fix: str
) -> Agreement:
    """Say what ranks agree upon about a checkpoint.

    Args:
        world: the ranks.
        group: over which they talk; None for the default one.
        folder: of the checkpoint.
        must: what has to be done to it.
        fix: what can be done where it fails.
    """
    return Agreement(world, group, _NAME, str(folder), must, fix)


def read_facts(folder: Path) -> dict[str, Any]:
    """Read what a checkpoint says of itself.

    Args:
        folder: of a checkpoint whose files are what was written.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    entry = _index(folder).state_dict_metadata.get(_FACTS)
    if not isinstance(entry, TensorStorageMetadata):
        raise _refused(folder, "be one of tables", f"no {_FACTS}", "give the folder of tables")
    text = torch.empty(entry.size, dtype=torch.uint8)
    with _named(folder), _alone_is_meant():
        dcp.load({_FACTS: text}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return dict(json.loads(bytes(text.tolist())))


def read(
    state: Mapping[str, Tensor],
    folder: Path,
    world: World,
    *,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Overwrite what this rank holds of a state. Every rank has to call this.

    Args:
        state: name -> tensor, all of which must be in the checkpoint; more may be.
        folder: of the checkpoint.
        world: the ranks.
        check: raises where the checkpoint does not fit for other reasons; called once its files are
            known to be what was written.

    Raises:
        DataError: a file is missing, cut or altered, or a tensor is missing or has another size, on
            any rank. The state is as it was, on all ranks.

    Cost: host memory for what this rank holds of the state, once. Every file is read through once
        by some rank, besides the parts that are loaded.
    """
    fix = "restore the files, or load another checkpoint"
    ranks = agreement(world, None, folder, "be loaded", fix)
    with ranks.step():
        _check_whole(folder, world)
    with ranks.step():
        check()
        _check_sizes(folder, _index(folder), state)
    staged: dict[str, Whole] = {}
    with ranks.step(), _named(folder), _alone_is_meant():
        staged |= {name: Whole.of(tensor, copy=False) for name, tensor in state.items()}
        # Each rank reads alone: a fault of one must not leave others waiting within torch.
        dcp.load(dict(staged), storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    for name, tensor in state.items():
        for own, piece in zip(local_pieces(tensor), staged[name].local_shards(), strict=True):
            own.values.copy_(piece)


def _refused(folder: Path, must: str, got: object, fix: str) -> DataError:
    return DataError(refusal(_NAME, str(folder), must=must, got=got, fix=fix))


def _check_whole(folder: Path, world: World) -> None:
    if not (folder / ".metadata").is_file():
        got = "no file .metadata" if folder.is_dir() else "no such folder"
        raise _refused(folder, "be a whole checkpoint", got, "give a folder that was saved whole")
    check_files(_NAME, folder, world)


def _index(folder: Path) -> Metadata:
    with _named(folder):
        return dcp.FileSystemReader(folder).read_metadata()


def _check_sizes(folder: Path, index: Metadata, state: Mapping[str, Tensor]) -> None:
    for name, tensor in state.items():
        entry = index.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            known = sorted(n for n in index.state_dict_metadata if n != _FACTS)
            more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
            got = ", ".join(known[:_SHOWN]) + more if known else "nothing"
            raise _refused(folder, f"hold {name}", got, "load the tables that were saved")
        if entry.size != tensor.shape:
            raise _refused(
                folder,
                f"hold {name} of {list(tensor.shape)}",
                list(entry.size),
                "build the tables with the sizes that were saved",
            )
        held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if held != math.prod(entry.size):
            raise _refused(
                folder,
                f"hold all {math.prod(entry.size)} elements of {name}",
                held,
                "load another checkpoint",
            )


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Turn what damaged files make torch raise into one line."""
    try:
        yield
    except GemError:
        raise
    except (CheckpointException, Exception) as fault:
        raise _refused(
            folder, "be readable", first_words(fault), "restore it, or load another checkpoint"
        ) from fault


@contextmanager
def _alone_is_meant() -> Iterator[None]:
    """Keep torch from warning of every save and load in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield

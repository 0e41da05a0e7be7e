"""Write what many ranks hold as one checkpoint of torch, such that none is left waiting.

torch's own ``save`` lets ranks talk while they plan and write. A rank that fails outside of what it
guards, or with an error that cannot be sent, leaves the others waiting until the process group
gives up. Here ranks agree after every step that may fail, and talk only in between; planner and
file format are torch's.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from gem_embeddings.agreement import Agreement
from gem_embeddings.checksums import checksum

_INDEX = ".metadata"


def write_agreed(
    content: Mapping[str, Any], folder: Path, ranks: Agreement
) -> dict[str, dict[str, int]]:
    """Write a checkpoint into a folder. Every rank has to call this.

    Args:
        content: name -> what this rank holds, as torch's checkpoint takes it: tensors in host
            memory, DTensors, ``checkpoint_files.Whole``.
        folder: exists and is empty, on a disk that all ranks see. Nothing of it can be relied upon
            until this has returned.
        ranks: who writes, and how they talk.

    Returns:
        on the first rank: file -> its ``bytes`` and ``crc32``, sorted; nothing on the others.

    Raises:
        DataError: a rank could not plan or write; every rank raises.

    Cost: every file is read once more, by the rank that wrote it.
    """
    world = ranks.world
    planner: Any = dcp.DefaultSavePlanner()
    writer: Any = dcp.FileSystemWriter
    own = b""
    with ranks.step():
        writer = writer(folder)
        planner.set_up_planner(
            dict(content), storage_meta=writer.storage_meta(), is_coordinator=world.is_first
        )
        writer.set_up_storage_writer(world.is_first, rank=world.rank, use_collectives=True)
        own = pickle.dumps(writer.prepare_local_plan(planner.create_local_plan()))
    plans = _gathered(own, ranks)
    parts: list[bytes] = []
    index: Any = None
    with ranks.step():
        if world.is_first:
            whole, index = planner.create_global_plan([pickle.loads(plan) for plan in plans])
            parts = [pickle.dumps(plan) for plan in writer.prepare_global_plan(whole)]
    part = _scattered(parts, ranks)
    with ranks.step():
        written = writer.write_data(planner.finish_plan(pickle.loads(part)), planner)
        written.wait()
        results = written.value()
        names = sorted({result.storage_data.relative_path for result in results})
        own = pickle.dumps((results, {name: checksum(folder / name) for name in names}))
    told = _gathered(own, ranks)
    files: dict[str, dict[str, int]] = {}
    with ranks.step():
        if world.is_first:
            found = [pickle.loads(one) for one in told]
            writer.finish(metadata=index, results=[results for results, _ in found])
            files |= {name: of for _, sums in found for name, of in sums.items()}
            files[_INDEX] = checksum(folder / _INDEX)
    return dict(sorted(files.items()))


def _gathered(own: bytes, ranks: Agreement) -> list[bytes]:
    """What all ranks have, on the first one; nothing on the others."""
    if ranks.world.size == 1:
        return [own]
    found: list[Any] | None = [None] * ranks.world.size if ranks.world.is_first else None
    dist.gather_object(own, found, dst=0, group=ranks.group)
    return found or []


def _scattered(parts: list[bytes], ranks: Agreement) -> bytes:
    """What the first rank has for this one."""
    if ranks.world.size == 1:
        return parts[0]
    heard: list[Any] = [None]
    given: Any = parts if ranks.world.is_first else None
    dist.scatter_object_list(heard, given, src=0, group=ranks.group)
    return heard[0]

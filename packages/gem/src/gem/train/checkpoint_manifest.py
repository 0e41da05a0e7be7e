"""The manifest of a checkpoint: what the folder must hold, byte for byte.

Sizes say whether a checkpoint is complete, which is asked often and costs nothing; checksums say
whether it is still what was written, which is asked once, when it is loaded. CRC-32 is meant for
that: it finds every flipped byte, and nobody forges a checkpoint of their own.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gem_embeddings.checksums import checksum
from gem_opkit.errors import DataError, refusal
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.launch import World

FORMAT = 2
MANIFEST = "manifest.json"
_OWN = "manifest_crc32"
_KEYS = frozenset(
    {"format", "step", "examples", "world_size", "dataset", "config", "counters", "scalars"}
)
_UNREADABLE = -1
_STEP = re.compile(r"^step-([0-9]+)$")


class DamagedCheckpoint(DataError):
    """A checkpoint does not hold what was written. One before it may."""


def checksums(folder: Path) -> dict[str, dict[str, int]]:
    """Size and CRC-32 of every file of a checkpoint that one process has written.

    Args:
        folder: holds the files, and no manifest yet.

    Returns:
        path within the folder -> ``{"bytes": ..., "crc32": ...}``.

    Raises:
        OSError: a file cannot be read.

    Cost: every file is read once, at the rate of `gem_embeddings.checksums.checksum`.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): checksum(path) for path in paths}


def check_content(folder: Path, manifest: Mapping[str, Any], world: World) -> None:
    """Compare every file of a checkpoint with its checksum. Every rank has to call this.

    Args:
        folder: a complete checkpoint.
        manifest: its manifest.
        world: the ranks; each reads its share of the files.

    Raises:
        DamagedCheckpoint: a file is not what was written; names the first one.
        DataError: a file cannot be read, so nobody knows what it is worth.
    """
    names = list(manifest["files"])
    found = _shared_out([folder / name for name in names], world)
    for name, crc32 in zip(names, found, strict=True):
        written = manifest["files"][name]["crc32"]
        if crc32 != written:
            raise _changed(folder / name, written, crc32)


def _changed(path: Path, written: int, found: int) -> DataError:
    unreadable = found == _UNREADABLE
    kind = DataError if unreadable else DamagedCheckpoint
    return kind(
        refusal(
            "checkpoint",
            str(path),
            must=f"hold what was written (CRC-32 {written:08x})",
            got="a file that cannot be read" if unreadable else f"other bytes ({found:08x})",
            fix="check its permissions and the disk" if unreadable else instead_of(path.parent),
        )
    )


def _shared_out(paths: Sequence[Path], world: World) -> list[int]:
    """Checksums of some files, each computed by one rank."""
    sums = torch.zeros(len(paths), dtype=torch.int64, device=world.device)
    for place in _share(len(paths), world):
        sums[place] = _crc32(paths[place])
    return all_reduce_sum(sums, world).tolist()


def _share(files: int, world: World) -> range:
    return range(world.rank, files, world.size)


def _crc32(path: Path) -> int:
    try:
        return checksum(path)["crc32"]
    except OSError:  # told once all ranks know; alone, this one would leave the others waiting
        return _UNREADABLE


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest beside a checkpoint's files.

    Args:
        folder: holds the files.
        facts: what the manifest says; ``files`` as `checksums` gives it.

    Raises:
        OSError: the disk refused.
    """
    text = json.dumps({**facts, _OWN: _own_crc32(facts)}, indent=1)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint has its manifest, unchanged, and every file in it, as long as it was.

    Args:
        folder: a checkpoint.

    Raises:
        OSError: it cannot be read, so it is not known whether anything is wrong with it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not manifest["files"] or not manifest.keys() >= _KEYS:
            return False
        if manifest.pop(_OWN) != _own_crc32(manifest):
            return False
        return all(
            (folder / name).stat().st_size == facts["bytes"]
            for name, facts in manifest["files"].items()
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint.

    Args:
        folder: the checkpoint.

    Raises:
        DataError: the checkpoint is not complete, or of another format.
    """
    _check_format(folder)
    if not is_complete(folder):
        raise DataError(
            refusal(
                "checkpoint",
                str(folder),
                must="be complete: a manifest, and every file that it lists",
                got="a folder where some are missing, changed or cut short",
                fix=instead_of(folder),
            )
        )
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    del manifest[_OWN]
    return manifest


def instead_of(folder: Path) -> str:
    """What to do about a damaged checkpoint; to remove the only one would lose the run.

    Args:
        folder: the checkpoint.
    """
    if any(_is_whole_before(other, folder) for other in folder.parent.iterdir()):
        return f"remove {folder}, so that the checkpoint before it is used"
    return (
        f"restore {folder} from a copy, or train again: no whole checkpoint is before it in "
        f"{folder.parent}"
    )


def _is_whole_before(other: Path, folder: Path) -> bool:
    steps = [_STEP.search(one.name) for one in (other, folder)]
    if steps[0] is None or steps[1] is None or int(steps[0][1]) >= int(steps[1][1]):
        return False
    try:
        return is_complete(other)
    except OSError:  # a disk that fails; it is no way out
        return False


def _check_format(folder: Path) -> None:
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["format"]
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return  # not complete, which is told by name
    if found != FORMAT:
        raise DataError(
            refusal(
                "checkpoint",
                f"format of {folder}",
                must=f"be {FORMAT}",
                got=found,
                fix="use the version of the trainer that wrote it",
            )
        )


def _own_crc32(facts: Mapping[str, Any]) -> int:
    """Checksum of what a manifest says, whatever its layout."""
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())

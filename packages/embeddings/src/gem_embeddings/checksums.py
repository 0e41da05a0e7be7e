"""Size and CRC-32 of every file of a checkpoint, in a file beside them.

CRC-32 finds every cut, swapped or altered file, which is what disks and copies do; nobody forges a
checkpoint of their own.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gem_opkit.errors import DataError, refusal
from gem_parallel.launch import World

CHECKSUMS = "checksums.json"
_CHUNK_BYTES = 1 << 22
_FIX = "restore it, or load another checkpoint"
# What is missing was never written by the first format.
_FIX_OLD = f"{_FIX}; one of format 1 has none and is not read: save it anew"


def checksum(path: Path) -> dict[str, int]:
    """Read a file through.

    Args:
        path: of the file.

    Returns:
        its ``bytes`` and ``crc32``.

    Raises:
        OSError: it cannot be read.

    Cost: about 2 GB/s on one core where the file is in the page cache, as one just written is.
    """
    value = length = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
            length += len(chunk)
    return {"bytes": length, "crc32": value}


def write_checksums(folder: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """Write down what the files of a checkpoint are.

    Args:
        folder: of the checkpoint.
        files: path within it -> what ``checksum`` said.

    Raises:
        OSError: the disk refused.
    """
    text = json.dumps({"files": files, "crc32": _own(files)}, indent=1)
    with (folder / CHECKSUMS).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def check_files(op: str, folder: Path, world: World) -> None:
    """Hold the files of a checkpoint against their checksums: sizes of all, content of a share.

    Not collective: each rank reads its share, and the others have to be told what it raises.

    Args:
        op: who refuses.
        folder: of the checkpoint.
        world: the ranks; together they read every file once.

    Raises:
        DataError: a file is missing, cut or altered, or cannot be read; names the first one.
    """
    files = _read(op, folder)
    for name, written in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != written["bytes"]:
            got = "no such file" if size is None else f"{size} bytes"
            raise _changed(op, folder, f"have the file {name}, {written['bytes']} bytes", got)
    for name in list(files)[world.rank :: world.size]:
        written, found = files[name], checksum(folder / name)
        if found != written:
            raise _changed(
                op,
                folder,
                f"hold in {name} what was written (CRC-32 {written['crc32']:08x})",
                f"other bytes ({found['crc32']:08x})",
            )


def _read(op: str, folder: Path) -> dict[str, dict[str, int]]:
    path = folder / CHECKSUMS
    if not path.is_file():
        raise _changed(op, folder, f"have the file {CHECKSUMS}", "no such file", fix=_FIX_OLD)
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        files = {
            str(name): {"bytes": int(of["bytes"]), "crc32": int(of["crc32"])}
            for name, of in told["files"].items()
        }
        # Checksums that leave out the index would hold of any files.
        whole = told["crc32"] == _own(files) and ".metadata" in files
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        whole, files = False, {}
    if not whole:
        raise _changed(op, folder, f"hold in {CHECKSUMS} what was written", "something else")
    return files


def _own(files: Mapping[str, Mapping[str, int]]) -> int:
    """Checksum of the checksums, whatever their layout."""
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())


def _changed(op: str, folder: Path, must: str, got: str, *, fix: str = _FIX) -> DataError:
    return DataError(refusal(op, str(folder), must=must, got=got, fix=fix))

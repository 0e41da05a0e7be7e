"""Folders of arrays on disk that are mapped into memory: complete or not there, made once.

A mapped array takes no memory of the process: its pages belong to the system, which drops them
when it needs the room and shares them among all processes that map the same file. So a log of any
length can be indexed, by as many workers as there are. Bytes that change on the disk are found when
they are read (`gem.data.checked_array`).

Left out: what the arrays mean (`gem.data.log_index`).
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from gem.data.checked_array import BlockSums, CheckedArray
from gem.data.columns import not_whole
from gem_opkit.errors import DataError, refusal

MANIFEST = "arrays.json"
_log = logging.getLogger(__name__)
_FOOTER_BYTES = 1 << 16


class ArrayWriter:
    """Writes arrays piece by piece into the files of a folder.

    Args:
        folder: there already.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[str, int] = {}
        self._dtypes: dict[str, np.dtype] = {}
        self._sums: dict[str, BlockSums] = {}

    def append(self, name: str, values: np.ndarray) -> None:
        """Add values to the end of an array.

        Args:
            name: of the array; made where it is new.
            values: one dim, of one dtype a name.

        Raises:
            OSError: the disk is full, or fails otherwise.
        """
        dtype = self._dtypes.setdefault(name, values.dtype)
        self._rows[name] = self._rows.get(name, 0) + len(values)
        data = np.ascontiguousarray(values, dtype).view(np.uint8).data
        self._sums.setdefault(name, BlockSums(dtype)).add(data)
        append_bytes(self._folder / f"{name}.bin", data)

    def finish(self) -> None:
        """Write the sums, and the manifest, without which the folder does not count."""
        manifest = {}
        for name, rows in self._rows.items():
            dtype, sums = self._dtypes[name].str, self._sums[name].all().tobytes()
            append_bytes(self._folder / f"{name}.sums", sums)
            manifest[name] = {"dtype": dtype, "rows": rows, "sum": _sum(name, dtype, rows, sums)}
        (self._folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def append_bytes(path: Path, data: bytes | memoryview) -> None:
    """Add bytes to the end of a file, all of them or with an error.

    `numpy.ndarray.tofile` would not do: what is left in its buffer when the disk is full is lost
    without a word.

    Args:
        path: of the file; made where it is not there.
        data: what is added.

    Raises:
        OSError: the disk is full, or fails otherwise.
    """
    with path.open("ab") as file:
        file.write(data)


def _sum(name: str, dtype: str, rows: int, sums: bytes) -> int:
    """Of everything that says how an array is read."""
    return zlib.crc32(sums, zlib.crc32(f"{name} {dtype} {rows}".encode()))


def map_arrays(folder: Path) -> dict[str, CheckedArray]:
    """Map the arrays of a folder into memory, read-only.

    Args:
        folder: that an `ArrayWriter` has finished.

    Returns:
        name -> array, which raises a DataError where bytes turn out to have changed.

    Raises:
        DataError: a file is missing, or shorter or longer than it was written, or what says how
            it is read has changed.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {name: _mapped(folder, name, one) for name, one in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise _not_whole(folder, str(fault)) from fault


def _not_whole(folder: Path, got: str) -> DataError:
    return DataError(
        refusal(
            "gem data",
            str(folder),
            must="hold whole arrays, as they were written",
            got=got.rstrip("."),
            fix="start again, with --resume; that folder is made anew",
        )
    )


def _mapped(folder: Path, name: str, one: Mapping[str, object]) -> CheckedArray:
    dtype, rows = np.dtype(str(one["dtype"])), int(str(one["rows"]))
    path, sums = folder / f"{name}.bin", (folder / f"{name}.sums").read_bytes()
    if _sum(name, dtype.str, rows, sums) != one["sum"]:
        raise ValueError(f"{name}.sums or {MANIFEST} has changed")
    size = path.stat().st_size
    if size != rows * dtype.itemsize:
        raise ValueError(f"{path.name} has {size} bytes in place of {rows * dtype.itemsize}")

    def damaged(first: int, last: int) -> DataError:
        # The folder does not count any more, so whoever opens it next makes it anew.
        with contextlib.suppress(OSError):
            (folder / MANIFEST).unlink(missing_ok=True)
        return _not_whole(folder, f"other bytes in {first} .. {last} of {path.name}")

    # As a plain array: every slice of a memmap object would cost a look at its file.
    values = np.empty(0, dtype)
    if rows:
        values = np.asarray(np.memmap(path, dtype, mode="r", shape=(rows,)))
    return CheckedArray(values, np.frombuffer(sums, np.uint32), damaged)


def made_once(
    root: Path,
    name: str,
    key: str,
    make: Callable[[ArrayWriter, Path], None],
    *,
    at_once: Iterable[str] = (),
) -> dict[str, CheckedArray]:
    """The arrays of a folder; the first process that needs them makes them, the others wait.

    A folder that is damaged, with files gone or of another length or content, is made again, with a
    warning.

    Args:
        root: holds the folders of one data set; made where it is missing.
        name: of what is stored; folders of other keys under this name are removed.
        key: hash of everything that the arrays depend on.
        make: writes the arrays; it is given a folder for temporary files besides.
        at_once: names of arrays whose content is checked now and not as it is read.

    Returns:
        the arrays, mapped.

    Raises:
        DataError: the folder cannot be written.
    """
    folder, at_once = root / f"{name}-{key}", tuple(at_once)
    try:
        arrays = _if_whole(folder, at_once)
        if arrays is not None:
            return arrays
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock"):
            arrays = _if_whole(folder, at_once)  # another process may have been first
            if arrays is None:
                _remove_partial(root, name)
                _make(root, folder, make)
                _remove_others(root, name, folder)
                arrays = map_arrays(folder)
            return arrays
    except OSError as fault:
        raise DataError(
            refusal(
                "gem data",
                str(root),
                must="take the index of the data set",
                got=str(fault).rstrip("."),
                fix="make room there, or set data.index_folder to a folder that can be written",
            )
        ) from fault


def _if_whole(folder: Path, at_once: tuple[str, ...]) -> dict[str, CheckedArray] | None:
    if not folder.exists():
        return None
    try:
        arrays = map_arrays(folder)
        for name in at_once:
            if name in arrays:
                arrays[name].whole()
    except DataError as fault:
        _log.warning("%s; it is made again now", str(fault).rpartition(";")[0].rpartition(";")[0])
        return None
    return arrays


def _make(root: Path, folder: Path, make: Callable[[ArrayWriter, Path], None]) -> None:
    partial = root / f".{folder.name}.partial"
    shutil.rmtree(folder, ignore_errors=True)  # damaged
    work = partial / "work"
    work.mkdir(parents=True)
    _log.info("making %s, once", folder)
    try:
        writer = ArrayWriter(partial)
        make(writer, work)
        shutil.rmtree(work)
        writer.finish()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _remove_partial(root: Path, name: str) -> None:
    """Remove what killed processes had begun, for whichever key; the lock says they are dead."""
    for entry in root.glob(f".{name}-*.partial"):
        if entry.name[len(name) + 2 : -len(".partial")].isalnum():
            shutil.rmtree(entry, ignore_errors=True)


def _remove_others(root: Path, name: str, kept: Path) -> None:
    for entry in root.glob(f"{name}-*"):
        if entry != kept and entry.name[len(name) + 1 :].isalnum():
            shutil.rmtree(entry, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system drops when the process ends, however it ends."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def fingerprint(parts: Mapping[str, object], files: Iterable[Path]) -> str:
    """Hash what an index depends on, without reading all of it.

    Args:
        parts: declarations, by name.
        files: the Parquet files; each counts with its path, size, time of change and last 64 KiB,
            which hold row counts and the range of every column.

    Returns:
        20 hex digits.

    Raises:
        DataError: a file cannot be read.
    """
    digest = hashlib.sha256(repr(sorted(parts.items())).encode())
    for path in files:
        try:
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
            with path.open("rb") as file:
                file.seek(max(0, status.st_size - _FOOTER_BYTES))
                digest.update(file.read())
        except OSError as fault:
            raise not_whole(path, fault) from fault
    return digest.hexdigest()[:20]

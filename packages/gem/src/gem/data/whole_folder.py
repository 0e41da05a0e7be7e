"""A folder that is complete or not there, whatever stands at its place before.

A new folder is written beside its place under a hidden name, and renamed. An empty one that is
there already stays the folder that it is: it may be a mount, what a link points to, or where a
shell stands. Its files are written into a hidden folder in it and moved up, the one that makes it
complete behind all others.
"""

import shutil
from pathlib import Path

_PARTIAL = ".partial"


def is_free(folder: Path) -> bool:
    """Whether a folder can be made at a place.

    Args:
        folder: the place.

    Returns:
        True where nothing is, or a folder that holds nothing, or what a killed process had begun.
    """
    if folder.is_dir():
        return all(entry.name == _PARTIAL for entry in folder.iterdir())
    return not folder.exists() and not folder.is_symlink()


def begin_folder(folder: Path) -> Path:
    """Make the hidden folder that the files are written into.

    Args:
        folder: a free place.

    Returns:
        the hidden folder, new and empty.
    """
    work = hidden_folder(folder)
    if work.exists():  # of a process that was killed
        shutil.rmtree(work)
    work.mkdir(parents=True)
    return work


def hidden_folder(folder: Path) -> Path:
    """Where the files of a folder lie until it is complete.

    Args:
        folder: a free place.
    """
    return folder / _PARTIAL if folder.is_dir() else folder.with_name(f".{folder.name}{_PARTIAL}")


def complete_folder(work: Path, folder: Path, *, last: str) -> None:
    """Give the files their place.

    Args:
        work: of `begin_folder`.
        folder: the place.
        last: name of the file without which the folder does not count.
    """
    if work.parent != folder:
        work.rename(folder)
        return
    for entry in sorted(work.iterdir(), key=lambda entry: entry.name == last):
        entry.rename(folder / entry.name)
    work.rmdir()

"""Files that are whole or not there; a fault of the disk names the file. Loads no torch."""

from pathlib import Path


def partial_of(path: Path) -> Path:
    """Where a file lies while it is written, beside its place.

    Args:
        path: its place.
    """
    return path.with_name(f".{path.name}.partial")


def write_whole(path: Path, text: str) -> None:
    """Write a text such that the file is whole or not there.

    Args:
        path: the file; replaced once the new one is whole.
        text: in UTF-8.

    Raises:
        OSError: the disk refuses; names the file, which a failed write by itself does not.
    """
    partial = partial_of(path)
    try:
        partial.write_text(text, encoding="utf-8")
        partial.rename(path)
    except OSError as fault:
        partial.unlink(missing_ok=True)
        if fault.filename is None:
            fault.filename = str(path)
        raise

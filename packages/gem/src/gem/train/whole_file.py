"""Files that are whole or not there; a fault of the disk names the file. Loads no torch."""

from pathlib import Path

from gem_opkit.errors import ConfigError, refusal


def partial_of(path: Path) -> Path:
    """Where a file lies while it is written, beside its place.

    Args:
        path: its place.
    """
    return path.with_name(f".{path.name}.partial")


def check_new(path: Path, *, command: str, option: str = "--out") -> None:
    """Refuse a file that is there, before anything is done for it.

    Args:
        path: to be written.
        command: that was given, as ``gem nearest``.
        option: that names it.

    Raises:
        ConfigError: something is there; a link that leads nowhere counts.
    """
    if path.exists() or path.is_symlink():
        raise ConfigError(
            refusal(
                command,
                option,
                must="be a new file",
                got=f"{path}, which is there",
                fix=f"choose another {option}",
            )
        )


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

"""The process of a rank, so that others on its machine can tell that it has ended.

A process is known by its number and the time it began, within the boot and the namespace of
numbers that it lives in: two machines may have the same name, and a number is given again. Where
there is no ``/proc``, and for processes elsewhere, nothing is known.
"""

import os
from pathlib import Path

_PROC = Path("/proc")
# Fields of /proc/N/stat behind the name: state, and the time of the beginning.
_STATE, _BEGAN = 0, 19


def own_whereabouts() -> str:
    """Describe this process.

    Returns:
        a word without spaces for `has_ended`; ``-`` where there is nothing to look it up by.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        space = str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return "-"
    fields = _stat(os.getpid())
    return "-" if fields is None else f"{boot}/{space}/{os.getpid()}/{fields[_BEGAN]}"


def has_ended(word: str) -> bool:
    """Whether a process is known to be gone.

    Args:
        word: from `own_whereabouts` of that process.

    Returns:
        True once it has ended, also if nobody has taken note yet; False while it lives, and for
        what cannot be looked up from here.
    """
    here, there = own_whereabouts().split("/"), word.split("/")
    if len(there) != 4 or there[:2] != here[:2] or not there[2].isdigit():
        return False
    fields = _stat(int(there[2]))
    return fields is None or fields[_STATE] in ("Z", "X") or fields[_BEGAN] != there[3]


def _stat(number: int) -> list[str] | None:
    """What the kernel says of a process, behind its name; None where there is none."""
    try:
        # The name stands in brackets and may hold spaces and brackets.
        return (_PROC / str(number) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None

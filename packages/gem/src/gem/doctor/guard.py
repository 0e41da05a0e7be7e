"""The guards of `gem doctor`: a broken installation still gets an answer."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def tried(call: Callable[[], T], otherwise: T, problems: list[str], what: str) -> T:
    """Call something that a broken installation can make fail.

    Args:
        call: what to call.
        otherwise: what stands for its result then.
        problems: gets a line then.
        what: names it in that line; empty: no line.

    Returns:
        The result of the call, or ``otherwise``.
    """
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - an installation can be broken in any way
        if what:
            problems.append(f"{what} cannot be looked at ({one_line(error)})")
        return otherwise


def one_line(error: BaseException) -> str:
    """An error with its kind, in one line.

    Args:
        error: any.
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def major_minor(version: str | None) -> tuple[int, int] | None:
    """The first two numbers of a version.

    Args:
        version: as a package gives it; None where there is none.

    Returns:
        major and minor; None where other words stand there.
    """
    parts = (version or "").split("+")[0].split(".")[:2]
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return None
    return int(parts[0]), int(parts[1])

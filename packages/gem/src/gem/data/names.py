"""Hints for mistyped names, shared by the contracts and the readers of a data set."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Words that point from a mistyped name to the nearest known one.

    Args:
        name: what was given.
        known: what there is.

    Returns:
        ``"; did you mean 'x'?"``, or a list of what there is where nothing is near, or an empty
        text where there is nothing at all. Meant to follow the received value in a message.
    """
    names = sorted(set(known))
    if close := suggestion(name, names):
        return close
    if not names:
        return ""
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"; there are {shown}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """As `nearest`, for a message that lists the known names already.

    Args:
        name: what was given.
        known: what there is.

    Returns:
        ``"; did you mean 'x'?"``, or an empty text where nothing is near.
    """
    close = difflib.get_close_matches(name, sorted(set(known)), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""

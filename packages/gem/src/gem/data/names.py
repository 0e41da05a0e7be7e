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
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    if not names:
        return ""
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"; there are {shown}"

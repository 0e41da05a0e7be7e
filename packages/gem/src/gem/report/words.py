"""Numbers as a person reads them, with their units, and metrics in a sentence."""

from datetime import UTC, datetime

from gem.report.compare import Spread

NONE = "n/a"
_THIN = "\u202f"  # before a unit


def count(value: float | None) -> str:
    """A whole number with its digits in threes.

    Args:
        value: None shows as not available.
    """
    return NONE if value is None else f"{value:,.0f}"


def short(value: float) -> str:
    """A number of at most about five signs, as at an axis.

    Args:
        value: any finite number.
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scaled = value / (1e3 if letter == "k" else size)
            return f"{scaled:.4g}{_THIN}{letter}"
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.0e}"


def metric(value: float | None) -> str:
    """A metric with four decimals.

    Args:
        value: None shows as not available.
    """
    return NONE if value is None else f"{value:.4f}"


def spread(found: Spread | None) -> str:
    """A mean, with the deviation behind it where there are several runs.

    Args:
        found: None shows as not available.
    """
    if found is None:
        return NONE
    tail = "" if found.deviation is None else f" ± {found.deviation:.4f}"
    return metric(found.mean) + tail


def percent(share: float | None, decimals: int = 1) -> str:
    """A share as percent.

    Args:
        share: 1 is all; None shows as not available.
        decimals: digits behind the point.
    """
    return NONE if share is None else f"{100 * share:.{decimals}f}{_THIN}%"


def size(value: float | None) -> str:
    """Bytes in the unit that fits.

    Args:
        value: bytes; None shows as not available.
    """
    if value is None:
        return NONE
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    place = 0
    while value >= 1024 and place < len(units) - 1:
        value, place = value / 1024, place + 1
    return f"{value:.{0 if place == 0 else 1}f}{_THIN}{units[place]}"


def milliseconds(value: float | None) -> str:
    """A time in milliseconds, or in seconds from 10 s on.

    Args:
        value: milliseconds; None shows as not available.
    """
    if value is None:
        return NONE
    if value >= 1e4:
        return duration(value / 1e3)
    return f"{value:.3g}{_THIN}ms" if value < 1000 else f"{value:.0f}{_THIN}ms"


def duration(seconds: float | None) -> str:
    """A length of time in two units at most.

    Args:
        seconds: None shows as not available.
    """
    if seconds is None:
        return NONE
    if seconds < 60:
        return f"{seconds:.3g}{_THIN}s"
    whole = round(seconds)
    for unit, length, smaller, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= length:
            rest = whole % length // part
            tail = f" {rest}{_THIN}{smaller}" if rest else ""
            return f"{whole // length}{_THIN}{unit}{tail}"
    return f"{whole}{_THIN}s"


def moment(ms: float | None) -> str:
    """A time of the data, in UTC.

    Args:
        ms: milliseconds since 1970; None shows as not available.
    """
    try:
        return NONE if ms is None else f"{datetime.fromtimestamp(ms / 1e3, UTC):%d %b %Y %H:%M}"
    except (OverflowError, ValueError, OSError):  # no year of the calendar
        return count(ms)


def about_ne(value: float | None, reason: str | None) -> str:
    """What a normalised entropy says.

    Args:
        value: below 1 beats predicting the mean rate.
        reason: why it is None.
    """
    if value is None:
        return f"not defined: {reason or 'not recorded'}"
    gain = 100 * (1 - value)
    if abs(gain) < 0.05:
        return "no better than always predicting the mean rate"
    word = "less" if gain > 0 else "more"
    return f"{abs(gain):.1f}{_THIN}% {word} log loss than always predicting the mean rate"


def about_auc(value: float | None, reason: str | None) -> str:
    """What an area under the curve says.

    Args:
        value: 0.5 is chance.
        reason: why it is None.
    """
    if value is None:
        return f"not defined: {reason or 'not recorded'}"
    return (
        f"a positive gets a higher prediction than a negative in {100 * value:.1f} of 100 "
        f"pairs; 50 is chance"
    )


def about_calibration(value: float | None, reason: str | None) -> str:
    """What a calibration says.

    Args:
        value: sum of predictions over sum of labels.
        reason: why it is None.
    """
    if value is None:
        return f"not defined: {reason or 'not recorded'}"
    off = 100 * (value - 1)
    if abs(off) < 0.05:
        return "predictions add up to the positives that came"
    word = "more" if off > 0 else "fewer"
    return f"predicts {abs(off):.1f}{_THIN}% {word} positives than came"

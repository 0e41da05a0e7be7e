"""Time: its unit, its gaps, and the labels of each day."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import numpy as np

from gem.data.checks.report import DayReport, Finding

DAY_MS = 86_400_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Beyond, datetime has no year; such a time is no date at all.
_DATES_MS = 250_000_000_000_000
_RATE_FACTOR = 1.5
_LARGE_Z = 6.0
_LONG_GAP_MS = DAY_MS
_GAP_FACTOR = 20.0


def when(time_ms: int) -> str:
    """A time for a person, UTC.

    Args:
        time_ms: milliseconds since 1970.
    """
    if abs(time_ms) > _DATES_MS:
        return f"{time_ms} ms"
    return f"{_EPOCH + timedelta(milliseconds=time_ms):%Y-%m-%d %H:%M:%S}"


def days_of(times: np.ndarray, labels: Mapping[str, np.ndarray]) -> tuple[DayReport, ...]:
    """Examples and label rates of each day that has any, in order.

    Args:
        times: ms, int64, one an example, in any order.
        labels: name -> float32, NaN where unknown.

    Returns:
        empty where the times are no dates.
    """
    if not len(times) or int(np.abs(times).max()) > _DATES_MS:
        return ()
    days, places = np.unique(times // DAY_MS, return_inverse=True)
    count = len(days)
    known = {k: np.bincount(places[~np.isnan(v)], minlength=count) for k, v in labels.items()}
    sums = {
        k: np.bincount(places, weights=np.nan_to_num(v).astype(np.float64), minlength=count)
        for k, v in labels.items()
    }
    rows = np.bincount(places, minlength=count)
    return tuple(
        DayReport(
            day=f"{_EPOCH + timedelta(days=int(day)):%Y-%m-%d}",
            examples=int(rows[i]),
            known={k: int(known[k][i]) for k in labels},
            rates={k: float(sums[k][i] / known[k][i]) if known[k][i] else None for k in labels},
        )
        for i, day in enumerate(days)
    )


def rate_findings(days: tuple[DayReport, ...]) -> list[Finding]:
    """Days on which a label is known or true far more or less often than over the whole.

    Args:
        days: as `days_of` gives them.
    """
    findings = []
    for label in days[0].rates if days else ():
        known = np.array([day.known[label] for day in days], np.float64)
        rates = np.array([day.rates[label] or 0.0 for day in days])
        if not known.sum():
            continue
        mean = float((known * rates).sum() / known.sum())
        spread = np.sqrt(max(mean * (1 - mean), 1e-12) / np.maximum(known, 1))
        far = (rates > mean * _RATE_FACTOR) | (rates * _RATE_FACTOR < mean)
        odd = np.flatnonzero((np.abs(rates - mean) > _LARGE_Z * spread) & far & (known > 0))
        if len(odd):
            worst = int(odd[np.argmax(np.abs(rates[odd] - mean) / spread[odd])])
            findings.append(
                Finding(
                    grade="warning",
                    kind="label-rate",
                    where=f"examples, label {label!r}",
                    found=f"its rate is {rates[worst]:.4f} on {days[worst].day} and {mean:.4f} "
                    f"over all days" + (f"; {len(odd)} days are as odd" if len(odd) > 1 else ""),
                    how=f"{abs(rates[worst] - mean) / spread[worst]:.0f} standard errors away, "
                    f"from {int(known[worst]):,} examples",
                    fix="see whether the labels of that day are whole, or the traffic was another",
                )
            )
    return findings


def time_findings(times: np.ndarray, where: str) -> list[Finding]:
    """A unit that is not milliseconds, and long gaps.

    Args:
        times: ms, int64, at least one, in order.
        where: column that they are from.
    """
    middle = int(times[len(times) // 2])
    size = abs(middle)
    unit = "seconds" if 5e8 < size < 5e9 else "microseconds" if 5e14 < size < 5e15 else None
    unit = unit or ("nanoseconds" if 5e17 < size < 5e18 else None)
    if unit is not None:
        return [
            Finding(
                grade="warning",
                kind="time-unit",
                where=where,
                found=f"its times look like {unit}: as milliseconds the middle one is "
                f"{when(middle)}",
                how=f"the middle value is {middle}",
                fix="write milliseconds since 1970",
            )
        ]
    gaps = np.diff(times)
    if not len(gaps):
        return []
    longest = int(np.argmax(gaps))
    usual = float(np.quantile(gaps, 0.999))
    if gaps[longest] > max(_LONG_GAP_MS, _GAP_FACTOR * usual):
        count = int((gaps > max(_LONG_GAP_MS, _GAP_FACTOR * usual)).sum())
        return [
            Finding(
                grade="warning",
                kind="time-gap",
                where=where,
                found=f"no example for {gaps[longest] / DAY_MS:.1f} days, from "
                f"{when(int(times[longest]))} to {when(int(times[longest + 1]))}"
                + (f"; {count} such gaps" if count > 1 else ""),
                how=f"99.9 % of the gaps between examples are below {usual / 1000:,.0f} s",
                fix="see whether a part of the log is missing",
            )
        ]
    return []

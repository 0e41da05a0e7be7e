"""Which of a stream's events the examples see: strictly before them, of their own user."""

import numpy as np

from gem.data.checks.report import Finding, HistoryReport
from gem.data.join import first_at_or_after

_MANY_EMPTY = 0.5


def own_times(users: np.ndarray, times: np.ndarray, untimed: np.ndarray | None) -> np.ndarray:
    """The time from which each event is known: that of the user's last one, for untimed events.

    Args:
        users: user of each event, int64.
        times: as stored, int64.
        untimed: 1 where the event has no time of its own; None where all have one.

    Returns:
        int64, one an event.
    """
    if untimed is None or not untimed.any():
        return times
    rows = np.flatnonzero(untimed)
    owners, places = np.unique(users[rows], return_inverse=True)
    last = np.full(len(owners), np.iinfo(np.int64).min)
    np.maximum.at(last, places, times[rows])
    found = times.copy()
    found[rows] = last[places]
    return found


def look(
    stream: str,
    events: tuple[np.ndarray, np.ndarray],
    examples: tuple[np.ndarray, np.ndarray],
) -> HistoryReport:
    """Count what the examples see of a stream.

    Args:
        stream: its name.
        events: user and time of each event, in file order.
        examples: user and time of each example.

    Cost: one sort of the events; memory of a few integers an event and an example.
    """
    users, times = events
    asking, at = examples
    order = np.lexsort((times, users))
    users, times = users[order], times[order]
    first = np.searchsorted(users, asking, side="left")
    end = np.searchsorted(users, asking, side="right")
    seen = first_at_or_after(times, first, end, at) - first
    # An event is seen by someone if it lies before the last example of its user.
    people, places = np.unique(asking, return_inverse=True)
    last = np.full(len(people), np.iinfo(np.int64).min)
    np.maximum.at(last, places, at)
    if len(people) and len(users):
        place = np.minimum(np.searchsorted(people, users), len(people) - 1)
        known = people[place] == users
        visible = known & (times < last[place])
    else:
        known = visible = np.zeros(len(users), bool)
    return HistoryReport(
        stream=stream,
        events=len(users),
        never_seen=int((~visible).sum()),
        of_strangers=int((~known).sum()),
        empty_frac=float((seen == 0).mean()) if len(seen) else 0.0,
        users_without=int((~np.isin(people, users)).sum()),
        median=float(np.median(seen)) if len(seen) else 0.0,
        p95=float(np.quantile(seen, 0.95)) if len(seen) else 0.0,
        longest=int(seen.max(initial=0)),
    )


def history_findings(report: HistoryReport, *, users: int, is_union: bool) -> list[Finding]:
    """What is odd about the histories of a stream.

    Args:
        report: of the stream.
        users: users with examples.
        is_union: the stream also holds events of another one, which the report does not count.
    """
    where = f"events/{report.stream}"
    count = report.events
    if not count:
        return [
            Finding(
                grade="note",
                kind="history",
                where=where,
                found="no events" + (" of its own" if is_union else ": every history is empty"),
            )
        ]
    findings = []
    seen_by_none = report.never_seen == count
    if seen_by_none and not is_union:
        strangers = report.of_strangers == count
        findings.append(
            Finding(
                grade="error",
                kind="history",
                where=where,
                found="no example sees any of its events: "
                + (
                    "none of its users has an example"
                    if strangers
                    else "all come at the time of their user's last example or after it"
                ),
                how=f"joined all {count:,} events by user and time",
                fix="check that user and time are those of the examples, in milliseconds",
            )
        )
    elif report.never_seen:
        late = report.never_seen - report.of_strangers
        words = [f"{late:,} come at or after the last example of their user"] if late else []
        if report.of_strangers:
            words.append(f"{report.of_strangers:,} are of users without examples")
        findings.append(
            Finding(
                grade="note",
                kind="history",
                where=where,
                found=f"{report.never_seen:,} of {count:,} events are seen by no example: "
                + " and ".join(words),
            )
        )
    if report.users_without and not seen_by_none:
        findings.append(
            Finding(
                grade="note",
                kind="history",
                where=where,
                found=f"{report.users_without:,} of {users:,} users have no event here; they get "
                f"an empty history",
            )
        )
    if report.empty_frac > _MANY_EMPTY and not seen_by_none and not is_union:
        findings.append(
            Finding(
                grade="warning",
                kind="history",
                where=where,
                found=f"{report.empty_frac:.0%} of the examples see no event before them",
                fix="see whether the log of events begins early enough",
            )
        )
    return findings

"""What `gem data check` finds: the contract of its ``--json``. No torch, no Arrow."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, computed_field

from gem_opkit.contract import Contract

Grade = Literal["error", "warning", "note"]
GRADES: tuple[Grade, ...] = ("error", "warning", "note")


class Finding(Contract):
    """One thing that a person should know of a data set.

    An error keeps a run from starting, or makes its result worthless; a warning is likely a
    mistake; a note is worth knowing and mostly as it should be.
    """

    grade: Grade
    kind: str = Field(description="what was looked for, as in time-order or leak")
    where: str = Field(description="part, column or file")
    found: str = Field(description="what is there")
    how: str = Field(default="", description="how it was found, and how sure that is")
    fix: str = Field(default="", description="what to do; empty where `found` says it")

    @property
    def text(self) -> str:
        """The finding as one line."""
        return f"{self.where}: {self.found}" + (f"; {self.fix}" if self.fix else "")


class PartReport(Contract):
    """What one part of a data set holds."""

    part: str = Field(description="examples, events/<stream> or entities/<entity>")
    rows: int = Field(ge=0)
    files: int = Field(default=0, ge=0)
    row_groups: int = Field(default=0, ge=0)
    missing: dict[str, int] = Field(
        default_factory=dict, description="per column with nulls: how many were filled"
    )
    fills: dict[str, float | None] = Field(
        default_factory=dict, description="per column of `missing`: with what; null for labels"
    )


class LabelReport(Contract):
    """A label on one split."""

    split: str
    label: str
    examples: int = Field(ge=0)
    known: int = Field(ge=0)
    positives: float = Field(ge=0, description="sum of the known labels")


class DayReport(Contract):
    """The examples of one day, UTC."""

    day: str = Field(description="YYYY-MM-DD")
    examples: int = Field(ge=0)
    known: dict[str, int] = Field(description="per label: examples in which it is known")
    rates: dict[str, float | None] = Field(description="per label: mean where known")


class HistoryReport(Contract):
    """What the examples see of a stream's stored events, without a limit on their number."""

    stream: str
    events: int = Field(ge=0)
    never_seen: int = Field(ge=0, description="events that come before no example of their user")
    of_strangers: int = Field(ge=0, description="events of users who have no example")
    empty_frac: float = Field(ge=0, le=1, description="share of examples without any event")
    users_without: int = Field(ge=0, description="users with examples and without events")
    median: float = Field(ge=0, description="events before an example")
    p95: float = Field(ge=0)
    longest: int = Field(ge=0)


class DatasetReport(Contract):
    """The outcome of `gem.data.check.check`; a data set is sound where `problems` is empty."""

    name: str
    folder: str
    parts: tuple[PartReport, ...]
    labels: tuple[LabelReport, ...]
    days: tuple[DayReport, ...] = ()
    histories: tuple[HistoryReport, ...] = ()
    findings: tuple[Finding, ...] = ()

    @computed_field
    @property
    def problems(self) -> tuple[str, ...]:
        """The errors, one line each."""
        return tuple(finding.text for finding in self.findings if finding.grade == "error")

    def count(self, grade: Grade) -> int:
        """How many findings there are of a grade.

        Args:
            grade: which.
        """
        return sum(finding.grade == grade for finding in self.findings)


def sorted_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then warnings, then notes; within a grade in the order found.

    Args:
        findings: in any order.
    """
    return tuple(sorted(findings, key=lambda finding: GRADES.index(finding.grade)))

"""Inputs: columns that know the answer, are always the same, or are mostly missing."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gem.data.checks.leaks import power
from gem.data.checks.report import Finding, Grade
from gem.data.columns import Column

# Words of what is known only after an example: as the name of an input they are worth a look.
_LATER = re.compile(
    r"(^|_)(play(ed|ing)?_?time|watch(ed)?_?time|watch_ratio|dwell(_time)?|stay_time|view_time|"
    r"time_spent|conver(t|ted|sion)|purchase(d)?|revenue|gmv|outcome|target|label|reward|"
    r"is_(click|like|follow|comment|forward|hate|buy|rand)|long_view|clicked|liked|bought|rating|"
    r"response|feedback)(_|$)",
    re.IGNORECASE,
)
_SUSPECT_ABOVE = 0.75
_MOSTLY_MISSING = 0.5
_RATE_ROWS = 5
_RATE_KEYS = 30
_RATE_ABOVE = 0.99


@dataclass(frozen=True, slots=True)
class Input:
    """A column as the model would get it.

    Attributes:
        where: part and column, for messages.
        name: of the column.
        column: one row an example, or a row of the entity.
        rows: row of `column` for each example of the sample; -1 where the entity has none.
        is_number: continuous.
        is_own: a column of the examples themselves.
    """

    where: str
    name: str
    column: Column
    rows: np.ndarray
    is_number: bool
    is_own: bool

    def sampled(self) -> tuple[np.ndarray, np.ndarray, bool]:
        """Values of the sample, which were missing, and whether to rank them as numbers.

        Of a list its length and first element are looked at, as one value.
        """
        values, filled, is_number = self.column.values, self.column.filled, self.is_number
        if self.column.offsets is not None:
            starts, ends = self.column.offsets[:-1], self.column.offsets[1:]
            lengths = ends - starts
            padded = np.append(values, 0)
            first = np.where(lengths > 0, padded[np.minimum(starts, len(values))], -1)
            values, filled = first * 64 + np.minimum(lengths, 63), None
        absent = self.rows < 0
        if not len(values):
            return np.zeros(len(self.rows), values.dtype), np.ones(len(self.rows), bool), is_number
        gone = absent if filled is None else absent | filled[self.rows]
        return values[self.rows], gone, is_number


def leak_findings(one: Input, labels: Mapping[str, np.ndarray]) -> list[Finding]:
    """Whether a column alone predicts a label, and whether its name says that it might.

    Args:
        one: the column.
        labels: name -> values of the sample, NaN where unknown.
    """
    findings: list[Finding] = []
    values, gone, is_number = one.sampled()
    strongest = 0.5
    for label, truth in labels.items():
        found = power(values, gone, truth, is_number=is_number)
        if found is None:
            continue
        strongest = max(strongest, found.low)
        if found.grade is not None:
            findings.append(
                Finding(
                    grade=found.grade,
                    kind="leak",
                    where=one.where,
                    found=found.how.replace("{label}", repr(label)),
                    how=found.sureness,
                    fix="no input may know the answer: remove it from dataset.toml",
                )
            )
    if not findings and one.is_own and _LATER.search(one.name):
        grade: Grade = "warning" if strongest > _SUSPECT_ABOVE else "note"
        findings.append(
            Finding(
                grade=grade,
                kind="leak-name",
                where=one.where,
                found="its name is that of something known only after the example",
                how=f"by its name; alone it predicts a label with AUC {strongest:.3f} at least"
                if strongest > 0.5
                else "by its name alone",
                fix="remove it, unless it is about an earlier time",
            )
        )
    return findings


def filling_findings(one: Input) -> list[Finding]:
    """Whether a column says anything: constant, or mostly missing.

    Args:
        one: the column.
    """
    column, values = one.column, one.column.values
    rows = column.rows
    if rows < 2:
        return []
    if len(values) and column.missing == len(values):
        found, fix = "is missing in every row", "the model sees its fill only: remove it"
        return [Finding(grade="warning", kind="missing", where=one.where, found=found, fix=fix)]
    constant = len(values) > 0 and bool((values == values[0]).all())
    if constant and column.offsets is not None:
        constant = bool((np.diff(column.offsets) == column.offsets[1]).all())
    if constant or not len(values):
        found = f"is {values[0]:g} in every row" if len(values) else "is an empty list in every row"
        fix = "it tells the model nothing: remove it"
        return [Finding(grade="warning", kind="constant", where=one.where, found=found, fix=fix)]
    if column.missing > _MOSTLY_MISSING * len(values):
        share = column.missing / len(values)
        found = f"is missing in {share:.1%} of {len(values):,} values"
        fix = "the model sees its fill there"
        return [Finding(grade="note", kind="missing", where=one.where, found=found, fix=fix)]
    return []


def rate_findings(one: Input, rows: np.ndarray, labels: Mapping[str, np.ndarray]) -> list[Finding]:
    """Whether a number of an entity was computed from the labels of the whole log.

    Args:
        one: a continuous column of an entity.
        rows: row of the entity for each example; -1 where it has none.
        labels: name -> values of all examples, NaN where unknown.

    Such a column looks into the future of most examples, though it tells no single one apart.
    """
    values = one.column.values.astype(np.float64)
    there = rows >= 0
    findings = []
    for label, truth in labels.items():
        known = there & ~np.isnan(truth)
        count = np.bincount(rows[known], minlength=len(values))
        total = np.bincount(rows[known], weights=truth[known], minlength=len(values))
        enough = count >= _RATE_ROWS
        if enough.sum() < _RATE_KEYS:
            continue
        made = {
            f"the mean of {label!r}": total[enough] / count[enough],
            f"the sum of {label!r}": total[enough],
            f"the number of examples that know {label!r}": count[enough].astype(np.float64),
        }
        for what, series in made.items():
            likeness = _likeness(values[enough], series)
            if abs(likeness) > _RATE_ABOVE:
                findings.append(
                    Finding(
                        grade="warning",
                        kind="leak-entity",
                        where=one.where,
                        found=f"follows {what} over the whole log",
                        how=f"correlation {likeness:.4f} over {int(enough.sum()):,} rows with at "
                        f"least {_RATE_ROWS} examples",
                        fix="it knows the future: let the recipe's [[data.statistics]] compute it, "
                        "which look only back",
                    )
                )
                break
    return findings


def _likeness(left: np.ndarray, right: np.ndarray) -> float:
    """Pearson's correlation; 0 where a side is constant."""
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])

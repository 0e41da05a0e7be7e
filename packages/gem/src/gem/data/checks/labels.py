"""Labels and splits: what there is to learn from, and to be measured on."""

from collections.abc import Mapping

import numpy as np

from gem.data.checks.report import Finding, LabelReport
from gem.data.features import DatasetSpec


def label_reports(spec: DatasetSpec, labels: Mapping[str, np.ndarray]) -> tuple[LabelReport, ...]:
    """Count each label on each split.

    Args:
        spec: the contract.
        labels: name -> float32, NaN where unknown.
    """
    reports = []
    for split in spec.splits:
        for name, column in labels.items():
            values = column[split.start : split.stop]
            known = ~np.isnan(values)
            reports.append(
                LabelReport(
                    split=split.name,
                    label=name,
                    examples=len(values),
                    known=int(known.sum()),
                    positives=float(values[known].sum(dtype=np.float64)),
                )
            )
    return tuple(reports)


def label_findings(reports: tuple[LabelReport, ...]) -> list[Finding]:
    """Labels of which a split has none, or one class only.

    Args:
        reports: as `label_reports` gives them.
    """
    findings = []
    for one in reports:
        where = f"split {one.split!r}, label {one.label!r}"
        if not one.examples:
            continue
        if not one.known:
            found = f"unknown in all {one.examples:,} examples"
            fix = "nothing can be learned of it: remove the label, or write it"
        elif one.positives in (0.0, float(one.known)):
            found = f"{one.positives / one.known:.0f} in all {one.known:,} examples that know it"
            fix = "AUC and NE need both classes: see how the label was made"
        else:
            continue
        in_train = one.split == "train"
        findings.append(
            Finding(
                grade="warning",
                kind="label",
                where=where,
                found=found,
                fix=fix if in_train or one.known else "there its metrics will be null",
            )
        )
    return findings


def split_findings(spec: DatasetSpec) -> list[Finding]:
    """Splits that are missing or empty, and rows in none.

    Args:
        spec: the contract.
    """
    findings = []
    rows = {split.name: split.stop - split.start for split in spec.splits}
    for name in ("train", "valid", "test"):
        if rows.get(name):
            continue
        train = name == "train"
        findings.append(
            Finding(
                grade="error" if train else "note",
                kind="split",
                where=f"split {name!r}",
                found="has no rows" if name in rows else "is not declared",
                fix="declare its rows in dataset.toml; training needs some"
                if train
                else "there will be no metrics of it",
            )
        )
    outside = spec.examples.rows - sum(rows.values())
    if outside:
        findings.append(
            Finding(
                grade="note",
                kind="split",
                where="examples",
                found=f"{outside:,} of {spec.examples.rows:,} rows are in no split",
                fix="they count for the past of other rows at most",
            )
        )
    return findings

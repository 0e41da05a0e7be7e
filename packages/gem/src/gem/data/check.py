"""`gem data check`: read everything that a data set declares and report what is there."""

from pathlib import Path

import numpy as np
from pydantic import Field

from gem.data.columns import Column
from gem.data.dataset import Dataset
from gem.data.features import DatasetSpec
from gem_opkit.contract import Contract
from gem_opkit.errors import DataError


class PartReport(Contract):
    """What one part of a data set holds."""

    part: str = Field(description="examples, events/<stream> or entities/<entity>")
    rows: int = Field(ge=0)
    missing: dict[str, int] = Field(
        default_factory=dict, description="per column with nulls: how many were filled"
    )


class LabelReport(Contract):
    """A label on one split."""

    split: str
    label: str
    examples: int = Field(ge=0)
    known: int = Field(ge=0)
    positives: float = Field(ge=0, description="sum of the known labels")


class DatasetReport(Contract):
    """The outcome of `check`; the data set is sound where `problems` is empty."""

    name: str
    folder: str
    parts: tuple[PartReport, ...]
    labels: tuple[LabelReport, ...]
    problems: tuple[str, ...]


def check(folder: Path | str) -> DatasetReport:
    """Read every declared column of a data set.

    Args:
        folder: holds `dataset.toml`.

    Returns:
        rows, missing values and label counts; and as `problems` the first fault of each part,
        with file, row and value.

    Raises:
        DataError: there is no data set, or its contract is not valid.
    """
    dataset = Dataset.open(folder)
    spec = dataset.spec
    parts: list[PartReport] = []
    labels: list[LabelReport] = []
    problems: list[str] = []
    try:
        columns = dataset.examples(_example_names(spec))
        parts.append(_part("examples", columns))
        labels = _labels(spec, columns)
    except DataError as fault:
        problems.append(str(fault))
    for stream in spec.streams:
        try:
            parts.append(_part(f"events/{stream.name}", dataset.events(stream.name)))
        except DataError as fault:
            problems.append(str(fault))
    for entity in spec.entities:
        try:
            parts.append(_part(f"entities/{entity.name}", dataset.entity(entity.name)))
        except DataError as fault:
            problems.append(str(fault))
    return DatasetReport(
        name=spec.name,
        folder=str(folder),
        parts=tuple(parts),
        labels=tuple(labels),
        problems=tuple(problems),
    )


def _example_names(spec: DatasetSpec) -> list[str]:
    examples = spec.examples
    names = [examples.user, examples.time]
    names += [one.name for one in (*examples.ids, *examples.numbers, *examples.labels)]
    names += [name for name in (examples.domain, examples.weight) if name is not None]
    return list(dict.fromkeys(names))


def _part(name: str, columns: dict[str, Column]) -> PartReport:
    rows = next(iter(columns.values())).rows
    missing = {key: column.missing for key, column in columns.items() if column.missing}
    return PartReport(part=name, rows=rows, missing=missing)


def _labels(spec: DatasetSpec, columns: dict[str, Column]) -> list[LabelReport]:
    reports = []
    for split in spec.splits:
        for label in spec.examples.labels:
            values = columns[label.name].values[split.start : split.stop]
            known = ~np.isnan(values)
            reports.append(
                LabelReport(
                    split=split.name,
                    label=label.name,
                    examples=len(values),
                    known=int(known.sum()),
                    positives=float(values[known].sum(dtype=np.float64)),
                )
            )
    return reports

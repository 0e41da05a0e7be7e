"""`gem data check`: read everything that a data set declares, and say what a person should know.

Columns are read one at a time, so memory holds users, times, labels and one column besides. What
is looked for stands in `gem.data.checks`, one room for each kind of fault.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from gem.data.checks.files import FileFacts, file_facts, group_findings, type_findings
from gem.data.checks.histories import history_findings, look, own_times
from gem.data.checks.inputs import Input, filling_findings, leak_findings, rate_findings
from gem.data.checks.labels import label_findings, label_reports, split_findings
from gem.data.checks.leaks import sample_of
from gem.data.checks.report import (
    DatasetReport,
    DayReport,
    Finding,
    HistoryReport,
    LabelReport,
    PartReport,
    sorted_findings,
)
from gem.data.checks.rows import RowHashes
from gem.data.checks.times import days_of, time_findings
from gem.data.checks.times import rate_findings as day_findings
from gem.data.columns import Column, ColumnRequest, part_files, read_columns
from gem.data.dataset import Dataset
from gem.data.fields import EntitySpec, StreamSpec
from gem_opkit.errors import DataError

_MANY_REPEATS = 0.001


def check(folder: Path | str) -> DatasetReport:
    """Read every declared column of a data set and look for what is wrong or odd.

    Args:
        folder: holds `dataset.toml`.

    Returns:
        rows, missing values, label rates, histories, and the findings.

    Raises:
        DataError: there is no data set, or its contract is not valid.

    Cost: every column is decoded once; a sort of users and times for each stream, and of the row
    hashes for each part.
    """
    return _Check(Dataset.open(folder)).run()


class _Check:
    """One look at one data set."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._spec = dataset.spec
        self._findings: list[Finding] = []
        self._parts: list[PartReport] = []
        self._columns: dict[str, np.ndarray] = {}  # user, time, labels and keys of the examples
        self._rows = self._spec.examples.rows

    def run(self) -> DatasetReport:
        self._findings += split_findings(self._spec)
        self._examples()
        labels, days = self._labels()
        histories = [self._stream(stream) for stream in self._spec.streams]
        for entity in self._spec.entities:
            self._entity(entity)
        return DatasetReport(
            name=self._spec.name,
            folder=str(self._dataset.folder),
            parts=tuple(self._parts),
            labels=labels,
            days=days,
            histories=tuple(one for one in histories if one is not None),
            findings=sorted_findings(self._findings),
        )

    # -- parts ---------------------------------------------------------------------------------
    def _examples(self) -> None:
        spec = self._spec.examples
        requests = self._dataset.example_requests()
        part = _Part("examples", self._dataset.examples_folder, requests, self._findings)
        label_names = [label.name for label in spec.labels]
        inputs = {field.name for field in (*spec.ids, *spec.numbers)}
        inputs |= {spec.domain} if spec.domain is not None else set()
        numbers = {field.name for field in spec.numbers}
        keys = {entity.key for entity in self._spec.entities}
        kept = {spec.user, spec.time, *label_names, *keys}
        # Labels first: the inputs are held against them.
        order = sorted(requests, key=lambda name: name not in label_names)
        hashes, label_columns = RowHashes(self._rows), []
        for name in order:
            column = part.read(name)
            if column is None:
                continue
            if name in kept:
                self._columns[name] = column.values
            if name in label_names:
                label_columns.append(column)
                continue
            hashes.add(column)
            if name in inputs:
                rows = sample_of(self._rows)
                where = f"examples, column {name!r}"
                one = Input(where, name, column, rows, is_number=name in numbers, is_own=True)
                self._findings += filling_findings(one)
                self._findings += leak_findings(one, self._sampled_labels())
        if spec.time in self._columns:
            self._times(self._columns[spec.time])
        if part.whole:
            self._repeats("examples", hashes, label_columns, order="time")
        self._parts += part.report(self._rows)

    def _stream(self, stream: StreamSpec) -> HistoryReport | None:
        requests = self._dataset.event_requests(stream)
        name = f"events/{stream.name}"
        part = _Part(name, self._dataset.folder / name, requests, self._findings)
        kept: dict[str, np.ndarray] = {}
        hashes: RowHashes | None = None
        nowhere = np.empty(0, np.int64)
        for column_name in requests:
            column = part.read(column_name)
            if column is None:
                continue
            hashes = hashes or RowHashes(column.rows)
            hashes.add(column)
            if column_name in (stream.user, stream.time, stream.untimed):
                kept[column_name] = column.values
                if column_name == stream.untimed:  # such events say nothing of when: equal is usual
                    places = np.where(column.values == 1, np.arange(column.rows), -1)
                    hashes.add(Column(places))
            else:
                where = f"{name}, column {column_name!r}"
                one = Input(where, column_name, column, nowhere, is_number=False, is_own=False)
                for finding in filling_findings(one):
                    # The same value in every row of the file is not all that the model sees where
                    # the stream holds events of another one too.
                    if stream.also is None or finding.kind != "constant":
                        self._findings.append(finding)
        if part.whole and hashes is not None and len(hashes.values):
            self._repeats(name, hashes, [], order="its files")
        self._parts += part.report(len(hashes.values) if hashes is not None else 0)
        asked = [self._spec.examples.user, self._spec.examples.time]
        if not {stream.user, stream.time} <= kept.keys() or not set(asked) <= self._columns.keys():
            return None
        users = kept[stream.user]
        untimed = kept.get(stream.untimed or "")
        times = own_times(users, kept[stream.time], untimed)
        asking = self._columns[asked[0]]
        report = look(stream.name, (users, times), (asking, self._columns[asked[1]]))
        if self._rows:
            people = len(np.unique(asking))
            is_union = stream.also is not None
            self._findings += history_findings(report, users=people, is_union=is_union)
        return report

    def _entity(self, entity: EntitySpec) -> None:
        name = f"entities/{entity.name}"
        try:
            keys = self._dataset.entity(entity.name, [])[entity.key].values
        except DataError as fault:
            self._findings.append(_fault(name, fault))
            return
        requests = self._dataset.field_requests((*entity.ids, *entity.numbers))
        if entity.valid_from is not None:
            requests[entity.valid_from] = ColumnRequest(entity.valid_from, "time")
        part = _Part(name, self._dataset.folder / name, requests, self._findings)
        numbers = {field.name for field in entity.numbers}
        rows = _rows_of(keys, self._columns.get(entity.key))
        for column_name in requests:
            column = part.read(column_name)
            if column is None or column_name == entity.valid_from:
                continue
            where, is_number = f"{name}, column {column_name!r}", column_name in numbers
            sampled = np.empty(0, np.int64) if rows is None else rows[sample_of(self._rows)]
            one = Input(where, column_name, column, sampled, is_number=is_number, is_own=False)
            self._findings += filling_findings(one)
            if rows is not None:
                self._findings += leak_findings(one, self._sampled_labels())
                if is_number:
                    self._findings += rate_findings(one, rows, self._known_labels())
        if rows is not None and (rows < 0).any():
            self._findings.append(
                Finding(
                    grade="note",
                    kind="entity",
                    where=name,
                    found=f"{int((rows < 0).sum()):,} of {len(rows):,} examples have a "
                    f"{entity.key} without a row here; they get the fills",
                )
            )
        self._parts += part.report(len(keys))

    # -- what is looked at -----------------------------------------------------------------------
    def _times(self, times: np.ndarray) -> None:
        name = self._spec.examples.time
        if not len(times):
            return
        falls = times[1:] < times[:-1]
        if falls.any():
            row = int(np.argmax(falls)) + 1
            self._findings.append(
                Finding(
                    grade="error",
                    kind="time-order",
                    where="examples",
                    found=f"{name} must not fall; got {times[row]} after {times[row - 1]} in row "
                    f"{row} over all files, and {int(falls.sum()):,} such rows",
                    how="compared every row with the one before",
                    fix="sort the examples by time",
                )
            )
        self._findings += time_findings(np.sort(times), f"examples, column {name!r}")

    def _labels(self) -> tuple[tuple[LabelReport, ...], tuple[DayReport, ...]]:
        labels = self._known_labels()
        reports = label_reports(self._spec, labels)
        self._findings += label_findings(reports)
        time = self._columns.get(self._spec.examples.time)
        days = () if time is None else days_of(time, labels)
        self._findings += day_findings(days)
        return reports, days

    def _known_labels(self) -> dict[str, np.ndarray]:
        names = [label.name for label in self._spec.examples.labels]
        return {name: self._columns[name] for name in names if name in self._columns}

    def _sampled_labels(self) -> Mapping[str, np.ndarray]:
        rows = sample_of(self._rows)
        return {name: values[rows] for name, values in self._known_labels().items()}

    def _repeats(
        self, part: str, hashes: RowHashes, labels: Iterable[Column], *, order: str
    ) -> None:
        alike, row = hashes.repeats()
        equal = alike
        for column in labels:
            hashes.add(column)
            equal, row = hashes.repeats()
        rows = len(hashes.values)
        if equal:
            self._findings.append(
                Finding(
                    grade="warning" if equal > _MANY_REPEATS * rows else "note",
                    kind="duplicates",
                    where=part,
                    found=f"{equal:,} of {rows:,} rows repeat an earlier one; the first is row "
                    f"{row} of the data set, from 0 in order of {order}",
                    how="equal in every declared column, by a 64-bit hash",
                    fix="drop them, unless the same thing really happened twice",
                )
            )
        if alike > equal:
            self._findings.append(
                Finding(
                    grade="warning" if alike - equal > _MANY_REPEATS * rows else "note",
                    kind="duplicates",
                    where=part,
                    found=f"{alike - equal:,} of {rows:,} rows equal an earlier one in everything "
                    f"but a label",
                    how="equal in every other declared column, by a 64-bit hash",
                    fix="keep the row with the label that counts",
                )
            )


class _Part:
    """Columns of one part, read one at a time; a fault is a finding and not the end."""

    def __init__(
        self,
        name: str,
        folder: Path,
        requests: Mapping[str, ColumnRequest],
        findings: list[Finding],
    ) -> None:
        self._name, self._requests, self._findings = name, requests, findings
        self._missing: dict[str, int] = {}
        self.whole = True
        self._files: list[Path] = []
        self._facts = FileFacts(0, (), {})
        try:
            self._files = part_files(folder)
            self._facts = file_facts(self._files)
        except DataError as fault:
            self._fail(fault)
            self._files = []
            return
        findings += type_findings(name, self._facts, list(requests))
        findings += group_findings(name, self._facts)

    def read(self, name: str) -> Column | None:
        """One column, or None where it cannot be read."""
        if not self._files:
            return None
        request = self._requests[name]
        try:
            column = read_columns(self._files, [request], mark_filled=True)[name]
        except DataError as fault:
            self._fail(fault)
            if "must be a whole Parquet file" in str(fault):  # said once, not for every column
                self._files = []
            return None
        if column.missing:
            self._missing[name] = column.missing
        else:
            column = replace(column, filled=None)
        return column

    def _fail(self, fault: DataError) -> None:
        self.whole = False
        self._findings.append(_fault(self._name, fault))

    def report(self, rows: int) -> list[PartReport]:
        """What the part holds; nothing where it could not be read whole."""
        if not self.whole:
            return []
        fills = {name: self._requests[name].fill for name in self._missing}
        return [
            PartReport(
                part=self._name,
                rows=rows,
                files=len(self._files),
                row_groups=len(self._facts.groups),
                missing=self._missing,
                fills=fills,
            )
        ]


def _fault(part: str, fault: DataError) -> Finding:
    return Finding(grade="error", kind="unreadable", where=part, found=str(fault))


def _rows_of(keys: np.ndarray, wanted: np.ndarray | None) -> np.ndarray | None:
    """The entity's row for each example; -1 where it has none."""
    if wanted is None:
        return None
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)
    rows = order[place]
    return np.where(keys[rows] == wanted, rows, -1)

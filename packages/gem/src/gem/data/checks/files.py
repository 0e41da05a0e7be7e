"""The Parquet files of a part as they lie there: types of columns, row groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from gem.data.checks.report import Finding
from gem.data.columns import open_parquet

_LARGE_GROUP_BYTES = 1 << 30
_SMALL_GROUP_ROWS = 1_000
_MANY_GROUPS = 64


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the footers of a part say.

    Attributes:
        rows: over all files.
        groups: rows and bytes (not compressed) of each row group.
        types: column -> type as text -> first file that has it.
    """

    rows: int
    groups: tuple[tuple[int, int], ...]
    types: dict[str, dict[str, Path]]


def file_facts(files: Sequence[Path]) -> FileFacts:
    """Read the footers of a part's files.

    Args:
        files: in order.

    Raises:
        DataError: a footer cannot be read.
    """
    groups: list[tuple[int, int]] = []
    types: dict[str, dict[str, Path]] = {}
    for file in files:
        parquet = open_parquet(file)
        for index in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(index)
            groups.append((group.num_rows, group.total_byte_size))
        for field in parquet.schema_arrow:
            types.setdefault(field.name, {}).setdefault(_kind(field.type), file)
    return FileFacts(sum(rows for rows, _ in groups), tuple(groups), types)


def _kind(kind: pa.DataType) -> str:
    """The type as far as it decides what a value means: widths of integers do not."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind):
        return "floating point"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "string"
    return str(kind)


def type_findings(part: str, facts: FileFacts, declared: Sequence[str]) -> list[Finding]:
    """Declared columns that are of one type in one file and of another in the next.

    Args:
        part: name of the part.
        facts: of its files.
        declared: columns that the data set declares.
    """
    findings = []
    for name in declared:
        kinds = {kind: file for kind, file in facts.types.get(name, {}).items() if kind != "null"}
        if len(kinds) > 1:
            listed = " and ".join(f"{kind} in {file.name}" for kind, file in kinds.items())
            findings.append(
                Finding(
                    grade="error",
                    kind="type-change",
                    where=f"{part}, column {name!r}",
                    found=f"must have one type in every file; got {listed}",
                    how="read from the footers of all files",
                    fix="write it with one type, integers for ids",
                )
            )
    return findings


def group_findings(part: str, facts: FileFacts) -> list[Finding]:
    """Row groups of a size that costs memory or time.

    Args:
        part: name of the part.
        facts: of its files.
    """
    largest = max((size for _, size in facts.groups), default=0)
    count = len(facts.groups)
    if largest > _LARGE_GROUP_BYTES:
        return [
            Finding(
                grade="warning",
                kind="row-groups",
                where=part,
                found=f"a row group of {largest / 2**30:.1f} GiB, which is read as a whole",
                fix="write row groups of 100,000 to 1,000,000 rows",
            )
        ]
    if count > _MANY_GROUPS and facts.rows / count < _SMALL_GROUP_ROWS:
        return [
            Finding(
                grade="note",
                kind="row-groups",
                where=part,
                found=f"{count:,} row groups of {facts.rows / count:,.0f} rows on average",
                fix="fewer and larger ones are read faster",
            )
        ]
    return []

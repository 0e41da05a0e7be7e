"""What tables were asked for: ids, different rows, ids outside, empty examples, counted by table.

Every kind of table counts the same things in the same words, so that logs and tests can compare
them. Counts are of one rank and of training: an evaluation leaves them as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from gem_embeddings.contract import TableSpec


@dataclass(frozen=True, slots=True)
class TableCounts:
    """Counts of one table.

    Attributes:
        looked_up: ids that were looked up.
        unique: different rows that a call read, summed over calls; ``looked_up / unique`` says how
            often a row that has been fetched is used.
        out_of_range: ids outside the rows, which were read as the nearest row or as zeros.
        empty_bags: examples of pooled features without an id, whose vector is zeros.
        clipped: those of ``out_of_range`` that were read as the nearest row.
    """

    looked_up: int = 0
    unique: int = 0
    out_of_range: int = 0
    empty_bags: int = 0
    clipped: int = 0

    def __add__(self, other: "TableCounts") -> "TableCounts":
        """Add up, count by count."""
        return TableCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


COUNTS: tuple[str, ...] = tuple(field.name for field in fields(TableCounts))


# Where counts stood: those of the host and those of the device, by table, and for all tables: ids
# outside, and different rows.
Mark = tuple[Mapping[str, Sequence[int]], Mapping[str, Tensor], Tensor | None, Tensor | None]


class TableCounters:
    """Counts of several tables, of which a device is asked only when they are read.

    Numbers that the host knows anyway are added on the host; the number of ids outside a table,
    which only the device knows, is added there and nothing waits for it.

    Args:
        tables: the tables; what ``clipped`` counts follows from their ``out_of_range``.
    """

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self._clips = {table.name: table.out_of_range == "clamp" for table in tables}
        # looked_up, unique, empty_bags; lists, since each feature of each step adds to them.
        self._host = {table: [0, 0, 0] for table in self._clips}
        self._outside: dict[str, Tensor] = {}
        self._outside_T: Tensor | None = None
        self._unique_T: Tensor | None = None

    def add(self, table: str, *, looked_up: int = 0, unique: int = 0, empty_bags: int = 0) -> None:
        """Add what the host knows.

        Args:
            table: name of the table.
            looked_up: ids.
            unique: different rows of them.
            empty_bags: examples without ids.
        """
        counts = self._host[table]
        counts[0] += looked_up
        counts[1] += unique
        counts[2] += empty_bags

    def add_outside(self, table: str, count: Tensor) -> None:
        """Add ids outside the rows.

        Args:
            table: name of the table.
            count: int64 scalar on any device; read later, so nothing else may write to it.
        """
        self._outside[table] = _added(self._outside.get(table), count)

    def add_outside_all(self, counts_T: Tensor) -> None:
        """Add ids outside the rows of all tables, in one launch.

        Args:
            counts_T: int64, one for each table in their order, as for ``add_outside``.
        """
        self._outside_T = _added(self._outside_T, counts_T)

    def add_unique_all(self, counts_T: Tensor) -> None:
        """Add different rows of all tables, where the host does not know them.

        Args:
            counts_T: int64, one for each table in their order, as for ``add_outside``.
        """
        self._unique_T = _added(self._unique_T, counts_T)

    def read(self) -> dict[str, TableCounts]:
        """Return all counts, by table. Waits for the device where anything was counted there.

        Returns:
            table name -> counts since they were last taken.
        """
        outside = dict.fromkeys(self._host, 0)
        if self._outside:
            # One wait for all tables of a device.
            found = torch.stack(list(self._outside.values())).tolist()
            outside.update(zip(self._outside, found, strict=True))
        if self._outside_T is not None:
            for table, count in zip(self._host, self._outside_T.tolist(), strict=True):
                outside[table] += count
        different = dict.fromkeys(self._host, 0)
        if self._unique_T is not None:
            different = dict(zip(self._host, self._unique_T.tolist(), strict=True))
        return {
            table: TableCounts(
                looked_up=looked_up,
                unique=unique + different[table],
                out_of_range=outside[table],
                empty_bags=empty_bags,
                clipped=outside[table] if self._clips[table] else 0,
            )
            for table, (looked_up, unique, empty_bags) in self._host.items()
        }

    def take(self) -> dict[str, TableCounts]:
        """Return all counts and begin at 0 again.

        Returns:
            as ``read``.
        """
        found = self.read()
        self.return_to(_nothing())
        return found

    def set_aside(self) -> Mark:
        """Begin at 0 without reading anything; ``add_all`` brings back what had been counted.

        Returns:
            the counts so far.
        """
        found = self.mark()
        self.return_to(_nothing())
        return found

    def add_all(self, mark: Mark) -> None:
        """Add counts that were set aside. Nothing waits for a device.

        Args:
            mark: from ``mark`` or ``set_aside``, of counters of the same tables.
        """
        host, outside, outside_T, unique_T = mark
        for table, counts in host.items():
            self.add(table, looked_up=counts[0], unique=counts[1], empty_bags=counts[2])
        for table, count in outside.items():
            self.add_outside(table, count)
        if outside_T is not None:
            self.add_outside_all(outside_T)
        if unique_T is not None:
            self.add_unique_all(unique_T)

    def mark(self) -> Mark:
        """Remember where the counts stand, without reading them; ``return_to`` undoes what follows.

        Returns:
            something that ``return_to`` takes.
        """
        host = {table: list(counts) for table, counts in self._host.items()}
        return host, dict(self._outside), self._outside_T, self._unique_T

    def return_to(self, mark: Mark) -> None:
        """Forget what has been counted since a mark, such as a step that is done again.

        Args:
            mark: from ``mark``, of these counters.
        """
        self._host = {table: list(mark[0].get(table, (0, 0, 0))) for table in self._clips}
        self._outside = dict(mark[1])
        self._outside_T, self._unique_T = mark[2], mark[3]


def _nothing() -> Mark:
    return {}, {}, None, None


def _added(before: Tensor | None, count: Tensor) -> Tensor:
    # Tables that were moved to a GPU may have counted on a CPU: nothing waits for that either.
    return count if before is None else before.to(count.device, non_blocking=True) + count

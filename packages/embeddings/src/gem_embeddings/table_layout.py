"""Where tables lie in one flat buffer, and which features look them up; imports no torch.

All rows of one number format lie in one buffer of one dim, table after table or with gaps, so that
one launch serves any number of tables. Optimizer rows lie in buffers of their own: one value a row
at the row's number over all tables, or one value an element at the element's place in the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gem_embeddings.contract import Pooling
from gem_opkit.errors import ConfigError, refusal

POOLINGS: tuple[Pooling, ...] = ("sum", "mean", "none")
# Numbers that a feature takes in a list of slots: first element, first row, rows, width, pooling.
SLOT = 5


@dataclass(frozen=True, slots=True)
class TableSlot:
    """A table, or the part of one that a rank holds.

    Attributes:
        offset: element of the weights at which its first row begins.
        rows: number of rows; 0 for a rank that holds none.
        width: elements of a row, at least 1.
        row_offset: number of its first row, counted over all tables; place of its first value in
            the state of row-wise optimizers.
    """

    offset: int
    rows: int
    width: int
    row_offset: int


@dataclass(frozen=True, slots=True)
class FeatureSlot:
    """A feature.

    Attributes:
        table: index of the table that it looks up.
        pooling: ``"sum"``, ``"mean"`` or ``"none"``.
    """

    table: int
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Tables in a flat buffer and the features that look them up, in the order of their ids.

    Attributes:
        tables: the tables; neither their elements nor their row numbers overlap.
        features: the features; several may look up one table.

    Raises:
        ConfigError: a feature without its table, an unknown pooling, a negative place, a width of
            0, or tables that overlap.
    """

    tables: tuple[TableSlot, ...]
    features: tuple[FeatureSlot, ...]

    def __post_init__(self) -> None:
        for index, table in enumerate(self.tables):
            if min(table.offset, table.rows, table.row_offset) < 0 or table.width < 1:
                _refuse(f"tables[{index}]", "have places of at least 0 and a width above 0", table)
        # Two tables in one place would be moved by each other's gradients.
        elements = [(t.offset, t.offset + t.rows * t.width) for t in self.tables if t.rows]
        rows = [(t.row_offset, t.row_offset + t.rows) for t in self.tables if t.rows]
        for what, ranges in (("elements", sorted(elements)), ("row numbers", sorted(rows))):
            for before, after in pairwise(ranges):
                if after[0] < before[1]:
                    _refuse("tables", f"have {what} of their own", f"{before} and {after}")
        for index, feature in enumerate(self.features):
            if not 0 <= feature.table < len(self.tables):
                _refuse(f"features[{index}].table", f"be below {len(self.tables)}", feature.table)
            if feature.pooling not in POOLINGS:
                _refuse(f"features[{index}].pooling", "be sum, mean or none", feature.pooling)

    @classmethod
    def packed(
        cls, shapes: Sequence[tuple[int, int]], features: Sequence[tuple[int, Pooling]]
    ) -> "TableLayout":
        """Lay tables one after the other.

        Args:
            shapes: rows and width of each table.
            features: index of the table and pooling of each feature.

        Returns:
            the layout.
        """
        tables, offset, row_offset = [], 0, 0
        for rows, width in shapes:
            tables.append(TableSlot(offset, rows, width, row_offset))
            offset += rows * width
            row_offset += rows
        return cls(tuple(tables), tuple(FeatureSlot(*feature) for feature in features))

    @property
    def elements(self) -> int:
        """Elements that a buffer of weights needs."""
        return max([0, *[t.offset + t.rows * t.width for t in self.tables]])

    @property
    def rows(self) -> int:
        """Values that a buffer of one value a row needs."""
        return max([0, *[t.row_offset + t.rows for t in self.tables]])

    @property
    def slots(self) -> list[int]:
        """The features as whole numbers, five each, as the operators' schemas carry them."""
        numbers = []
        for feature in self.features:
            table = self.tables[feature.table]
            numbers += [table.offset, table.row_offset, table.rows, table.width]
            numbers.append(POOLINGS.index(feature.pooling))
        return numbers

    def output_shapes(self, batch: int, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the shape of what each feature gets.

        Args:
            batch: examples.
            counts: ids of each feature.

        Returns:
            (batch, width) for a pooled feature, (ids, width) for one without pooling.
        """
        return [
            (counts[i] if f.pooling == "none" else batch, self.tables[f.table].width)
            for i, f in enumerate(self.features)
        ]


def _refuse(name: str, must: str, got: object) -> None:
    raise ConfigError(
        refusal("TableLayout", name, must=must, got=got, fix="build it with TableLayout.packed")
    )

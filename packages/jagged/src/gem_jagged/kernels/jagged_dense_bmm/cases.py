"""Shapes on which ``jagged_dense_bmm`` is tested and timed: batches and widths of the result."""

from gem_jagged.workloads import EDGES, HISTORIES, ZIPF, PackedCase

CASES: tuple[tuple[PackedCase, int], ...] = (
    *((case, 5) for case in EDGES),
    *((case, case.width) for case in HISTORIES),
    *((case, case.width) for case in ZIPF[1:3]),
)

"""Shapes on which ``jagged_broadcast_add`` is tested and timed."""

from gem_jagged.workloads import EDGES, HISTORIES, ZIPF, PackedCase

CASES: tuple[PackedCase, ...] = (*EDGES, *HISTORIES, *ZIPF)

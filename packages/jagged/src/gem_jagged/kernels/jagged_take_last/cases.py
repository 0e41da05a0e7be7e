"""Shapes on which ``jagged_take_last`` is tested and timed: batches, and how many tokens stay."""

from gem_jagged.workloads import EDGES, HISTORIES, ZIPF, PackedCase

# The last events of a history are what a ranker reads first.
CASES: tuple[tuple[PackedCase, int], ...] = (
    *((case, 3) for case in EDGES),
    *((case, 32) for case in HISTORIES),
    *((case, 512) for case in ZIPF),
)

"""Shapes on which ``jagged_index_select`` is tested and timed: batches, and what is selected."""

import random

from gem_jagged.workloads import EDGES, HISTORIES, ZIPF, PackedCase


def _drawn(case: PackedCase) -> tuple[PackedCase, tuple[int, ...]]:
    """Draw as many sequences as the batch has, with repetition, as in-batch sampling does."""
    batch = len(case.lengths)
    return case, tuple(random.Random(1).choices(range(batch), k=batch)) if batch else ()


CASES: tuple[tuple[PackedCase, tuple[int, ...]], ...] = tuple(
    _drawn(case) for case in (*EDGES, *HISTORIES, *ZIPF)
)

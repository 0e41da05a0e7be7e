"""Shapes on which ``jagged_concat`` is tested and timed: pairs of packed batches."""

from gem_jagged.workloads import EDGES, HISTORIES, ZIPF, PackedCase, uniform_lengths


def _pair(left: PackedCase, right_lengths: tuple[int, ...]) -> tuple[PackedCase, PackedCase]:
    return left, PackedCase(left.name, right_lengths, left.width, left.device)


# The reversed lengths put empty sequences against full ones; a handful of summary tokens after a
# history is what a model concatenates.
CASES: tuple[tuple[PackedCase, PackedCase], ...] = (
    *(_pair(case, case.lengths[::-1]) for case in EDGES),
    *(_pair(case, (32,) * len(case.lengths)) for case in HISTORIES),
    *(_pair(case, case.lengths[::-1]) for case in ZIPF),
    _pair(HISTORIES[1], uniform_lengths(512, 100, fill=0.3, seed=1)),
)

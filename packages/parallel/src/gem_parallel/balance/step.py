"""Which rows of a step each rank takes, so that their work is even: Base Batch Shuffling.

The rows of a step are cut into base batches of consecutive rows, equally many for each rank and
equally long up to one row. Whole base batches change ranks; no row leaves its step, so the log is
still read in the order of time, step by step. Every rank works out the same answer from the same
lengths, and no rank talks to another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gem_opkit.errors import ConfigError, refusal
from gem_parallel.balance.contract import Variant
from gem_parallel.balance.dealing import deal, even_out, sums_of

# Between groups pieces move only where the heaviest rank is above the mean by more than this.
BETWEEN_GROUPS = 0.01


@dataclass(frozen=True, slots=True)
class Dealing:
    """How the work of ranks is evened out.

    Attributes:
        variant: which base batches may go where.
        base_batch: most consecutive rows that stay together.
        parts: micro-batches that each rank runs its rows in.
        group_ranks: neighbouring ranks of a group, for ``within_group`` and ``group``.

    Raises:
        ConfigError: one of the three numbers is below 1.
    """

    variant: Variant
    base_batch: int = 128
    parts: int = 1
    group_ranks: int = 8

    def __post_init__(self) -> None:
        for name in ("base_batch", "parts", "group_ranks"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    refusal("Dealing", name, must="be > 0", got=getattr(self, name), fix="raise it")
                )


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The rows of a step, dealt.

    Attributes:
        edges_N1: where each base batch begins, and last the number of rows.
        pieces: rank -> its base batches, in the order in which it runs them.
        before_W: work of each rank if it took the rows that follow one another.
        after_W: work of each rank as dealt.
        moved: base batches that are on another rank than without dealing.
        moved_between_groups: those of them that are in another group.
    """

    edges_N1: np.ndarray
    pieces: tuple[np.ndarray, ...]
    before_W: np.ndarray
    after_W: np.ndarray
    moved: int = 0
    moved_between_groups: int = 0

    def runs(self, rank: int) -> list[tuple[int, int]]:
        """The rows of a rank.

        Args:
            rank: whose.

        Returns:
            first row and end of each stretch of consecutive rows, in the order in which they are
            run, counted from the first row of the step; empty where the rank has none.
        """
        found: list[tuple[int, int]] = []
        for piece in self.pieces[rank]:
            low, high = int(self.edges_N1[piece]), int(self.edges_N1[piece + 1])
            if found and found[-1][1] == low:
                found[-1] = (found[-1][0], high)
            elif low < high:
                found.append((low, high))
        return [run for run in found if run[0] < run[1]]


def piece_edges(rows: int, ranks: int, dealing: Dealing) -> np.ndarray:
    """Cut the rows of a step into base batches.

    Args:
        rows: of the step over all ranks, at least 0.
        ranks: how many, > 0.
        dealing: says how long base batches may be.

    Returns:
        int64 (N+1,): where each begins, and last ``rows``. N is a multiple of ranks times parts;
        no base batch has more rows than asked for, and their lengths differ by at most one. Where
        there are fewer rows than pieces, some have none.
    """
    across = ranks * dealing.parts
    each = max(1, -(-rows // (across * dealing.base_batch)))
    count = each * across
    return np.arange(count + 1, dtype=np.int64) * rows // count


def arrange(work_B: np.ndarray, ranks: int, dealing: Dealing) -> Arrangement:
    """Deal the rows of a step.

    Args:
        work_B: work of each row of the step, in the order of the log, int64, at least 0.
        ranks: how many share the step, > 0.
        dealing: how.

    Returns:
        the rows of every rank. Without anything to deal, that is one base batch a rank, each rank
        has the rows that follow one another.

    Numerics: whole numbers throughout, so equal on every machine. The heaviest rank has at least
        the work of the heaviest base batch, and a single row may be most of that: where one row
        has more work than the mean rank, ``max / mean`` is at least their quotient.

    Cost: a sort of the base batches and a few swaps for each rank.

    Source: Base Batch Shuffling of Meta's GEM training article (2026): base batches of 128, sorted
        and interleaved heaviest with lightest. The greedy rounds and the swaps are ours.
    """
    edges = piece_edges(len(work_B), ranks, dealing)
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(work_B, dtype=np.int64)])
    work_N = np.diff(sums[edges])
    count = len(work_N)
    home = np.arange(count) * ranks // count
    dealt, between = home, 0
    if count > ranks and ranks > 1:
        if dealing.variant == "global":
            dealt = deal(work_N, ranks)
        elif dealing.variant in ("within_group", "group"):
            dealt = _within_groups(work_N, home, ranks, dealing.group_ranks)
            if dealing.variant == "group":
                dealt = even_out(work_N, dealt, ranks, until=BETWEEN_GROUPS)
            groups = np.arange(ranks) // dealing.group_ranks
            between = int((groups[dealt] != groups[home]).sum())
    pieces: list[np.ndarray] = []
    for rank in range(ranks):
        own = np.flatnonzero(dealt == rank)
        if dealing.parts > 1 and dealing.variant != "off" and len(own) > dealing.parts:
            # Equally many for each micro-batch, those of the first one first.
            own = own[np.argsort(deal(work_N[own], dealing.parts), kind="stable")]
        pieces.append(own)
    return Arrangement(
        edges,
        tuple(pieces),
        before_W=sums_of(work_N, home, ranks),
        after_W=sums_of(work_N, dealt, ranks),
        moved=int((dealt != home).sum()),
        moved_between_groups=between,
    )


def _within_groups(
    work_N: np.ndarray, home_N: np.ndarray, ranks: int, group_ranks: int
) -> np.ndarray:
    """Deal the base batches of each group over its ranks."""
    dealt = home_N.copy()
    for first in range(0, ranks, group_ranks):
        size = min(group_ranks, ranks - first)
        inside = np.flatnonzero((home_N >= first) & (home_N < first + size))
        dealt[inside] = first + deal(work_N[inside], size)
    return dealt


def part_loads(work_B: np.ndarray, runs: Iterable[Sequence[int]], parts: int) -> np.ndarray:
    """Work of each micro-batch of a rank.

    Args:
        work_B: work of the rows of a step, int64.
        runs: the rank's rows, in the order in which it runs them.
        parts: micro-batches, which are cut by rows as evenly as can be.

    Returns:
        int64 (parts,).
    """
    own = [work_B[low:high] for low, high in runs]
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([work_B[:0], *own]))])
    edges = np.arange(parts + 1) * (len(sums) - 1) // parts
    return np.diff(sums[edges])

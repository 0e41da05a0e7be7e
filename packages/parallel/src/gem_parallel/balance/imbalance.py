"""What imbalance a plan has to expect: the heaviest rank's work over the mean, before any run.

Steps are drawn from a law of lengths, dealt as a run would deal them, and averaged. No torch, so
that a forecast for thousands of ranks can ask for it.
"""

from collections.abc import Sequence

import numpy as np

from gem_opkit.errors import ConfigError, refusal
from gem_parallel.balance.contract import Variant
from gem_parallel.balance.step import Dealing, arrange
from gem_parallel.balance.work import Kind, WorkModel, max_over_mean

# Rows drawn in all, about: a few steps of thousands of ranks, many of a few ranks.
_ROWS = 1 << 21
_MOST_STEPS = 64


def zipf_lengths(count: int, *, alpha: float, longest: int) -> np.ndarray:
    """Lengths that stand for a Zipf law: one from the middle of each of equal shares.

    Args:
        count: lengths wanted, > 0.
        alpha: exponent, P(k) in proportion to k ** -alpha.
        longest: greatest length, > 0; lengths begin at 1.

    Returns:
        int64 (count,), rising.
    """
    weights = np.arange(1, longest + 1, dtype=np.float64) ** -alpha
    shares = (np.arange(count) + 0.5) / count
    places = np.searchsorted(np.cumsum(weights / weights.sum()), shares)
    return np.minimum(places, longest - 1).astype(np.int64) + 1


def imbalance(
    ranks: int,
    base_batch: int,
    lengths: Sequence[int] | np.ndarray,
    work: Kind | WorkModel | np.ndarray,
    *,
    examples: int = 1024,
    variant: Variant = "global",
    group_ranks: int = 8,
    seed: int = 0,
) -> float:
    """Expected work of the heaviest rank over the mean of all ranks.

    Args:
        ranks: how many share a step, > 0.
        base_batch: rows of a base batch, > 0.
        lengths: equally likely histories of an example, events; the law. A few thousand of them
            tell a Zipf law well, 64 do not.
        work: ``linear`` or ``quadratic`` in the length; a model of one stream; or the work of an
            example with each of these lengths, (len(lengths),), at least 0.
        examples: of a rank and step, > 0.
        variant: how base batches are dealt; ``off`` and ``local`` leave each rank its own rows.
        group_ranks: ranks of a group, for ``within_group`` and ``group``.
        seed: of the drawing.

    Returns:
        the mean over drawn steps, at least 1; the same for equal arguments.

    Raises:
        ConfigError: nothing to draw from, or a number that must be above 0.

    Cost: about two million rows are drawn, 0.1 to 0.5 s; at least one step is drawn whole.
    """
    if not len(lengths) or ranks < 1 or examples < 1:
        raise ConfigError(
            refusal(
                "imbalance",
                "ranks, examples and lengths",
                must="be above 0",
                got=f"{ranks}, {examples} and {len(lengths)} lengths",
                fix="correct them",
            )
        )
    work_L = _work_of(np.asarray(lengths, np.int64), work)
    dealing = Dealing(variant, base_batch, group_ranks=group_ranks)
    random = np.random.default_rng(seed)
    steps = min(_MOST_STEPS, max(1, _ROWS // (ranks * examples)))
    found: list[float] = []
    for _ in range(steps):
        work_B = work_L[random.integers(0, len(work_L), ranks * examples)]
        found.append(max_over_mean(arrange(work_B, ranks, dealing).after_W))
    return float(np.mean(found))


def _work_of(lengths: np.ndarray, work: Kind | WorkModel | np.ndarray) -> np.ndarray:
    if isinstance(work, np.ndarray):
        if work.shape != lengths.shape or (work < 0).any():
            raise ConfigError(
                refusal(
                    "imbalance",
                    "work",
                    must=f"be one number of at least 0 for each of {len(lengths)} lengths",
                    got=f"shape {work.shape}, least {work.min() if work.size else 'none'}",
                    fix="compute it from these lengths",
                )
            )
        most = float(work.max())
        return np.zeros(len(work), np.int64) if most == 0 else (work * (2**24 / most)).astype(int)
    if not isinstance(work, WorkModel):
        work = WorkModel.of_kind(work, int(lengths.max()))
    if len(work.by_length) != 1:
        raise ConfigError(
            refusal(
                "imbalance",
                "work",
                must="be a model of one stream",
                got=f"{len(work.by_length)} streams",
                fix="pass the work of an example with each length",
            )
        )
    return work.of(dict.fromkeys(work.by_length, lengths))

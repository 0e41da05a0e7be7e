"""Shapes on which ``pooled_attention`` is tested and timed; ``q_lengths`` repeats the seeds."""

from dataclasses import replace

from gem_attention.workloads import POOLED_WORK, SELF_EDGES, AttentionCase
from gem_jagged.workloads import uniform_lengths

_DWARFS = uniform_lengths(1000, 100, fill=0.5, seed=1)
# Three giants among a thousand short ones, and as many seeds as hierarchical seed pooling has.
_EXTREMES = (
    AttentionCase(
        "seeds_16_giants_30000", (16,) * 1003, (*_DWARFS[:500], *[30_000] * 3, *_DWARFS[500:])
    ),
    AttentionCase("seeds_256_keys_2048", (256,) * 1152, uniform_lengths(1152, 2048, fill=0.5)),
)

CASES: tuple[AttentionCase, ...] = (
    *(
        replace(case, q_lengths=(3,) * len(case.q_lengths), k_lengths=case.q_lengths)
        for case in SELF_EDGES
    ),
    *POOLED_WORK,
    *_EXTREMES,
)

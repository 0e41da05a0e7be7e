"""Shapes on which ``pooled_attention`` is tested and timed; ``q_lengths`` repeats the seeds."""

from dataclasses import replace

from gem_attention.workloads import POOLED_WORK, SELF_EDGES, AttentionCase

CASES: tuple[AttentionCase, ...] = (
    *(
        replace(case, q_lengths=(3,) * len(case.q_lengths), k_lengths=case.q_lengths)
        for case in SELF_EDGES
    ),
    *POOLED_WORK,
)

"""Shapes on which ``mx_attention`` is tested and timed."""

from dataclasses import replace

from gem_attention.workloads import CROSS_EDGES, CROSS_WORK, SELF_EDGES, SELF_WORK, AttentionCase

CASES: tuple[AttentionCase, ...] = (
    *SELF_EDGES,
    *CROSS_EDGES,
    *(replace(case, name=f"{case.name}_window", window=(1, 2)) for case in SELF_EDGES[:1]),
    *SELF_WORK,
    *CROSS_WORK,
)

"""Shapes on which ``block_attention`` is tested and timed."""

from gem_attention.workloads import BLOCK_WORK, SELF_EDGES, AttentionCase

CASES: tuple[AttentionCase, ...] = (*SELF_EDGES, *BLOCK_WORK)

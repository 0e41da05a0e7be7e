"""Shapes on which ``normed_attention`` is tested and timed."""

from dataclasses import replace

from gem_attention.workloads import SELF_EDGES, AttentionCase
from gem_jagged.workloads import uniform_lengths

# The published comparison names 128 keys, a width of 128, a fill of one half and a batch of 768.
_PUBLISHED = AttentionCase("", (), (128,) * 768, heads=1, kv_heads=1)

CASES: tuple[AttentionCase, ...] = (
    *(
        replace(case, k_lengths=(4,) * len(case.q_lengths))
        for case in SELF_EDGES
        if case.heads == case.kv_heads
    ),
    *(
        replace(
            _PUBLISHED,
            name=f"queries_{longest}_keys_128",
            q_lengths=uniform_lengths(768, longest, fill=0.5),
        )
        for longest in (2048, 512)
    ),
)

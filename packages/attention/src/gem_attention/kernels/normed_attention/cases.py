"""Shapes on which ``normed_attention`` is tested and timed."""

from dataclasses import replace

from gem_attention.workloads import SELF_EDGES, AttentionCase
from gem_jagged.workloads import uniform_lengths

# The published comparison names 128 keys, a width of 128, a fill of one half and a batch of 768; it
# leaves open how many heads a row has. The model has four.
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
            name=f"queries_{longest}_keys_128_heads_{heads}",
            q_lengths=uniform_lengths(768, longest, fill=0.5),
            heads=heads,
            kv_heads=heads,
        )
        for longest, heads in ((2048, 1), (2048, 4), (512, 1), (512, 4))
    ),
)

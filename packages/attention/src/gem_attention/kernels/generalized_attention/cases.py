"""Shapes on which ``generalized_attention`` is tested and timed."""

import random
from dataclasses import dataclass, replace

from gem_attention.workloads import (
    CROSS_EDGES,
    CROSS_WORK,
    POOLED_WORK,
    SELF_EDGES,
    SELF_WORK,
    WINDOW_WORK,
    AttentionCase,
)
from gem_jagged.workloads import uniform_lengths

CASES: tuple[AttentionCase, ...] = (
    *SELF_EDGES,
    *CROSS_EDGES,
    *(replace(case, name=f"{case.name}_window", window=(1, 2)) for case in CROSS_EDGES),
    *SELF_WORK,
    *CROSS_WORK,
    *WINDOW_WORK,
)


@dataclass(frozen=True, slots=True)
class GpuCase:
    """A case that a GPU times.

    Attributes:
        case: the shapes.
        activation: name of the activation.
    """

    case: AttentionCase
    activation: str


def _ragged_keys(batch: int, low: int, high: int) -> tuple[int, ...]:
    draw = random.Random(2)
    return tuple(draw.randint(low, high) for _ in range(batch))


_BY_NAME = {case.name: case for case in (*SELF_WORK, *CROSS_WORK, *POOLED_WORK)}
_SELF, _CROSS = _BY_NAME["self_2048_fill_.5"], _BY_NAME["cross_1024_keys_64"]
# The published benchmark's activation on its shapes first; then others where a score costs most and
# least, summaries of 17 to 250 tokens, and narrower heads.
GPU_CASES: tuple[GpuCase, ...] = (
    GpuCase(_SELF, "fast_gelu"),
    GpuCase(_BY_NAME["self_512_fill_.5"], "fast_gelu"),
    GpuCase(_BY_NAME["cross_2048_keys_256"], "fast_gelu"),
    GpuCase(_CROSS, "fast_gelu"),
    GpuCase(_BY_NAME["seeds_32_keys_2048"], "fast_gelu"),
    GpuCase(
        AttentionCase(
            "cross_2048_keys_17_to_250",
            uniform_lengths(1152, 2048, fill=0.5),
            _ragged_keys(1152, 17, 250),
        ),
        "fast_gelu",
    ),
    GpuCase(
        replace(_SELF, name="self_2048_fill_.5_width_64", heads=8, kv_heads=8, head_width=64),
        "fast_gelu",
    ),
    *(GpuCase(_SELF, name) for name in ("gelu", "silu", "relu")),
    GpuCase(_BY_NAME["cross_2048_keys_256"], "silu"),
    *(GpuCase(_CROSS, name) for name in ("silu", "relu")),
)

"""FLOPs and bytes of every operator, and visible pairs, from plain integers; imports no torch."""

from gem_attention.kernels.block_attention.cost import (
    block_attention_backward_cost,
    block_attention_cost,
    block_pairs_in_sequence,
)
from gem_attention.kernels.generalized_attention.cost import (
    generalized_attention_backward_cost,
    generalized_attention_cost,
)
from gem_attention.kernels.jagged_flash_attention.cost import (
    jagged_flash_attention_backward_cost,
    jagged_flash_attention_cost,
    visible_pairs_in_sequence,
)
from gem_attention.kernels.mx_attention.cost import (
    mx_attention_backward_cost,
    mx_attention_cost,
)
from gem_attention.kernels.normed_attention.cost import (
    normed_attention_backward_cost,
    normed_attention_cost,
)
from gem_attention.kernels.pooled_attention.cost import (
    pooled_attention_backward_cost,
    pooled_attention_cost,
)
from gem_attention.kernels.rotary_heads.cost import rotary_heads_backward_cost, rotary_heads_cost

__all__ = [
    "block_attention_backward_cost",
    "block_attention_cost",
    "block_pairs_in_sequence",
    "generalized_attention_backward_cost",
    "generalized_attention_cost",
    "jagged_flash_attention_backward_cost",
    "jagged_flash_attention_cost",
    "mx_attention_backward_cost",
    "mx_attention_cost",
    "normed_attention_backward_cost",
    "normed_attention_cost",
    "pooled_attention_backward_cost",
    "pooled_attention_cost",
    "rotary_heads_backward_cost",
    "rotary_heads_cost",
    "visible_pairs_in_sequence",
]

"""The attention operators, by name."""

from gem_attention.kernels.block_attention.op import block_attention
from gem_attention.kernels.generalized_attention.op import generalized_attention
from gem_attention.kernels.jagged_flash_attention.op import jagged_flash_attention
from gem_attention.kernels.mx_attention.op import mx_attention, mx_attention_way
from gem_attention.kernels.normed_attention.op import normed_attention
from gem_attention.kernels.pooled_attention.op import pooled_attention
from gem_attention.kernels.rotary_heads.op import rotary_heads

__all__ = [
    "block_attention",
    "generalized_attention",
    "jagged_flash_attention",
    "mx_attention",
    "mx_attention_way",
    "normed_attention",
    "pooled_attention",
    "rotary_heads",
]

"""The public operators on packed batches, imported by name.

Each takes a ``Layout`` beside its tokens and goes through a custom op, so that autograd, the FLOP
counter, ``torch.compile`` and selective checkpointing see one operator whoever computes it.
"""

from gem_jagged.kernels.jagged_concat.op import concat_layouts, jagged_concat
from gem_jagged.kernels.jagged_mean.op import jagged_mean
from gem_jagged.kernels.jagged_split.op import jagged_split
from gem_jagged.kernels.jagged_to_padded.op import jagged_to_padded
from gem_jagged.kernels.padded_to_jagged.op import padded_to_jagged

__all__ = [
    "concat_layouts",
    "jagged_concat",
    "jagged_mean",
    "jagged_split",
    "jagged_to_padded",
    "padded_to_jagged",
]

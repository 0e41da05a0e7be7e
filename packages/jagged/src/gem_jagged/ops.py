"""The public operators on packed batches, imported by name.

Each takes a ``Layout`` beside its tokens and goes through a custom op, so that autograd, the FLOP
counter, ``torch.compile`` and selective checkpointing see one operator whoever computes it.
"""

from gem_jagged.kernels.jagged_broadcast_add.op import jagged_broadcast_add
from gem_jagged.kernels.jagged_concat.op import concat_layouts, jagged_concat
from gem_jagged.kernels.jagged_dense_bmm.op import jagged_dense_bmm
from gem_jagged.kernels.jagged_index_select.op import jagged_index_select, select_layout
from gem_jagged.kernels.jagged_mean.op import jagged_mean
from gem_jagged.kernels.jagged_split.op import jagged_split
from gem_jagged.kernels.jagged_sum.op import jagged_sum
from gem_jagged.kernels.jagged_take_last.op import jagged_take_last, last_layout
from gem_jagged.kernels.jagged_to_padded.op import jagged_to_padded
from gem_jagged.kernels.padded_to_jagged.op import padded_to_jagged

__all__ = [
    "concat_layouts",
    "jagged_broadcast_add",
    "jagged_concat",
    "jagged_dense_bmm",
    "jagged_index_select",
    "jagged_mean",
    "jagged_split",
    "jagged_sum",
    "jagged_take_last",
    "jagged_to_padded",
    "last_layout",
    "padded_to_jagged",
    "select_layout",
]

"""FLOPs and bytes of every operator, from plain ints; imports no torch."""

from gem_jagged.kernels.jagged_broadcast_add.cost import (
    jagged_broadcast_add_backward_cost,
    jagged_broadcast_add_cost,
)
from gem_jagged.kernels.jagged_concat.cost import jagged_concat_cost
from gem_jagged.kernels.jagged_dense_bmm.cost import (
    jagged_dense_bmm_backward_cost,
    jagged_dense_bmm_cost,
)
from gem_jagged.kernels.jagged_index_select.cost import (
    jagged_index_select_backward_cost,
    jagged_index_select_cost,
)
from gem_jagged.kernels.jagged_mean.cost import jagged_mean_backward_cost, jagged_mean_cost
from gem_jagged.kernels.jagged_split.cost import jagged_split_cost
from gem_jagged.kernels.jagged_sum.cost import jagged_sum_backward_cost, jagged_sum_cost
from gem_jagged.kernels.jagged_take_last.cost import (
    jagged_take_last_backward_cost,
    jagged_take_last_cost,
)
from gem_jagged.kernels.jagged_to_padded.cost import (
    jagged_to_padded_backward_cost,
    jagged_to_padded_cost,
)
from gem_jagged.kernels.padded_to_jagged.cost import (
    padded_to_jagged_backward_cost,
    padded_to_jagged_cost,
)

__all__ = [
    "jagged_broadcast_add_backward_cost",
    "jagged_broadcast_add_cost",
    "jagged_concat_cost",
    "jagged_dense_bmm_backward_cost",
    "jagged_dense_bmm_cost",
    "jagged_index_select_backward_cost",
    "jagged_index_select_cost",
    "jagged_mean_backward_cost",
    "jagged_mean_cost",
    "jagged_split_cost",
    "jagged_sum_backward_cost",
    "jagged_sum_cost",
    "jagged_take_last_backward_cost",
    "jagged_take_last_cost",
    "jagged_to_padded_backward_cost",
    "jagged_to_padded_cost",
    "padded_to_jagged_backward_cost",
    "padded_to_jagged_cost",
]

"""What the operators cost, from plain integers; imports no torch."""

from gem_precision.kernels.row_norm.cost import row_norm_backward_cost, row_norm_cost

__all__ = ["row_norm_backward_cost", "row_norm_cost"]

"""What the operators cost, from plain integers; imports no torch."""

from gem_precision.kernels.mx_quantize.cost import mx_dequantize_cost, mx_quantize_cost
from gem_precision.kernels.row_norm.cost import row_norm_backward_cost, row_norm_cost

__all__ = ["mx_dequantize_cost", "mx_quantize_cost", "row_norm_backward_cost", "row_norm_cost"]

"""What the operators cost, from plain integers; imports no torch."""

from gem_precision.kernels.adam_update.cost import adam_update_cost
from gem_precision.kernels.block_quantize.cost import block_quantize_cost
from gem_precision.kernels.gated_residual.cost import (
    gated_residual_backward_cost,
    gated_residual_cost,
)
from gem_precision.kernels.grouped_linear.cost import (
    grouped_linear_backward_cost,
    grouped_linear_cost,
)
from gem_precision.kernels.mx_quantize.cost import mx_dequantize_cost, mx_quantize_cost
from gem_precision.kernels.norm_quantize.cost import norm_quantize_cost
from gem_precision.kernels.normed_linear.cost import (
    normed_linear_backward_cost,
    normed_linear_cost,
)
from gem_precision.kernels.quantized_linear.cost import (
    quantized_linear_backward_cost,
    quantized_linear_cost,
)
from gem_precision.kernels.row_norm.cost import row_norm_backward_cost, row_norm_cost
from gem_precision.kernels.tensor_norms.cost import tensor_norms_cost

__all__ = [
    "adam_update_cost",
    "block_quantize_cost",
    "gated_residual_backward_cost",
    "gated_residual_cost",
    "grouped_linear_backward_cost",
    "grouped_linear_cost",
    "mx_dequantize_cost",
    "mx_quantize_cost",
    "norm_quantize_cost",
    "normed_linear_backward_cost",
    "normed_linear_cost",
    "quantized_linear_backward_cost",
    "quantized_linear_cost",
    "row_norm_backward_cost",
    "row_norm_cost",
    "tensor_norms_cost",
]

"""Operators of low-precision layers: plain torch on a CPU, Triton on a GPU."""

from gem_precision.kernels.adam_update.op import adam_update
from gem_precision.kernels.block_quantize.op import (
    BlockMatrix,
    block_dequantize,
    block_dequantize_into,
    block_quantize,
    block_quantize_both,
    block_quantize_untraced,
)
from gem_precision.kernels.gated_residual.op import gated_residual
from gem_precision.kernels.grouped_linear.op import grouped_linear
from gem_precision.kernels.mx_quantize.op import (
    MxMatrix,
    mx_dequantize,
    mx_quantize,
    mx_quantize_both,
)
from gem_precision.kernels.norm_quantize.op import (
    norm_block_quantize,
    norm_quantize,
    norm_quantize_both,
)
from gem_precision.kernels.normed_linear.op import normed_linear
from gem_precision.kernels.quantized_linear.op import fp8_block_linear, quantized_linear
from gem_precision.kernels.row_norm.op import layer_norm, rms_norm
from gem_precision.kernels.tensor_norms.op import tensor_norms

__all__ = [
    "BlockMatrix",
    "MxMatrix",
    "adam_update",
    "block_dequantize",
    "block_dequantize_into",
    "block_quantize",
    "block_quantize_both",
    "block_quantize_untraced",
    "fp8_block_linear",
    "gated_residual",
    "grouped_linear",
    "layer_norm",
    "mx_dequantize",
    "mx_quantize",
    "mx_quantize_both",
    "norm_block_quantize",
    "norm_quantize",
    "norm_quantize_both",
    "normed_linear",
    "quantized_linear",
    "rms_norm",
    "tensor_norms",
]

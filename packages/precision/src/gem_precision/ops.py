"""Operators of low-precision layers: plain torch on a CPU, Triton on a GPU."""

from gem_precision.kernels.mx_quantize.op import (
    MxMatrix,
    mx_dequantize,
    mx_quantize,
    mx_quantize_both,
)
from gem_precision.kernels.row_norm.op import layer_norm, rms_norm

__all__ = [
    "MxMatrix",
    "layer_norm",
    "mx_dequantize",
    "mx_quantize",
    "mx_quantize_both",
    "rms_norm",
]

"""Operators of low-precision layers: plain torch on a CPU, Triton on a GPU."""

from gem_precision.kernels.row_norm.op import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]

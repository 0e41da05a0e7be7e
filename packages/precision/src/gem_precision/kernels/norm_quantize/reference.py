"""The mathematics of ``norm_quantize`` in plain torch: a norm, rounded, then quantised.

    a = x + before      n = (a − mean(a) or 0) / sqrt(mean((a − mean(a))²) + ε) · gain
    y = n + after, rounded to the dtype that holds x, ``before`` and ``after``
    elements, scales = Q(y)

The rounding in the middle is that of the norm by itself, so that the bytes are those of the two
operators one after the other. Q is ``mx_quantize`` or ``block_quantize`` in blocks of 1x128.

There is no backward: bytes have no derivative. What computes on them differentiates the norm.
"""

import torch
from torch import Tensor

from gem_precision.kernels.block_quantize.reference import block_quantize_reference
from gem_precision.kernels.mx_quantize.reference import mx_quantize_reference
from gem_precision.kernels.row_norm.reference import row_norm_reference


def norm_quantize_reference(  # noqa: PLR0913 - the arguments of the operator
    x_TD: Tensor,
    before_TD: Tensor | None,
    after_TD: Tensor | None,
    gain_D: Tensor | None,
    *,
    centred: bool,
    eps: float,
    out_dtype: torch.dtype,
    scaling: str,
    element: str,
    along: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return elements and scales by rows, then by columns; arguments as in the operator.

    What is not asked for is empty. Square blocks and block FP8 are returned as if they were rows.
    """
    given = {"centred": centred, "swish": False, "eps": eps, "out_dtype": out_dtype}
    y_TD = row_norm_reference(x_TD, before_TD, after_TD, gain_D, **given).contiguous()
    if scaling != "fp8_block":
        return mx_quantize_reference(y_TD, scaling=scaling, element=element, along=along)
    elements_TD, scales, _ = block_quantize_reference(y_TD, block="1x128", turned="no")
    nothing = x_TD.new_empty((0, 0), dtype=torch.uint8)
    return elements_TD, scales, nothing, nothing.clone()

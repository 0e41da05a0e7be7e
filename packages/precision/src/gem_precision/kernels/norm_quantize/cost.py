"""Cost of one call of ``norm_quantize``, from plain integers."""

from gem_opkit.cost import Cost
from gem_precision.kernels.block_quantize.cost import block_quantize_cost
from gem_precision.kernels.mx_quantize.cost import mx_quantize_cost


def norm_quantize_cost(
    *, rows: int, width: int, element_bytes: int, along: str, read: int = 1, affine: bool = False
) -> Cost:
    """Return the cost of normalising and quantising a matrix in one pass.

    Args:
        rows: of the matrix.
        width: elements of a row.
        element_bytes: bytes of an element of every tensor that is read.
        along: ``"rows"``, ``"columns"``, ``"both"`` or ``"square"``, or ``"block"`` for block FP8.
        read: matrices that are read: the input, and what is added before and after the norm.
        affine: each column has a gain.

    Returns:
        no FLOPs, as there is no matrix product; every tensor read once, bytes and scales written
        once. The normalised matrix itself is never in memory.
    """
    size = {"rows": rows, "width": width, "element_bytes": 0}
    if along == "block":
        written = block_quantize_cost(**size, block="1x128").bytes
    else:
        written = mx_quantize_cost(**size, along=along).bytes
    return Cost(flops=0, bytes=written + (read * rows * width + affine * width) * element_bytes)

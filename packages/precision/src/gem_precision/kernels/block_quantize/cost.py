"""Cost of one call of ``block_quantize``, from plain integers."""

from gem_opkit.cost import Cost
from gem_precision.elements import WIDE_BLOCK


def block_quantize_cost(
    *, rows: int, width: int, element_bytes: int, block: str, copies: int = 1
) -> Cost:
    """Return the cost of quantising a matrix.

    Args:
        rows: of the matrix.
        width: elements of a row.
        element_bytes: bytes of an element of the input.
        block: ``"1x128"`` or ``"128x128"``.
        copies: matrices of bytes that are written: 2 with the transposed one.

    Returns:
        no FLOPs; the input read once, a byte an element of each copy and four a block written.
    """
    strips = -(-rows // WIDE_BLOCK) if block == "128x128" else rows
    scales = 4 * strips * -(-width // WIDE_BLOCK)
    return Cost(flops=0, bytes=rows * width * (element_bytes + copies) + scales)

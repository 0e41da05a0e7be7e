"""Cost of one call of ``mx_quantize`` and of its inverse, from plain integers."""

from gem_opkit.cost import Cost
from gem_precision.elements import BLOCK


def _stored_bytes(rows: int, width: int, along: str) -> int:
    blocks_t, blocks_d = -(-rows // BLOCK), -(-width // BLOCK)
    scales = {
        "rows": rows * blocks_d,
        "columns": blocks_t * width,
        "both": rows * blocks_d + blocks_t * width,
        "square": blocks_t * blocks_d,
    }[along]
    return (2 if along == "both" else 1) * rows * width + scales


def mx_quantize_cost(*, rows: int, width: int, element_bytes: int, along: str) -> Cost:
    """Return the cost of quantising a matrix.

    Args:
        rows: of the matrix.
        width: elements of a row.
        element_bytes: bytes of an element of the input.
        along: ``"rows"``, ``"columns"``, ``"both"`` or ``"square"``.

    Returns:
        no FLOPs, as there is no matrix product; the input read once, one byte an element and one
        byte a block written for each orientation.
    """
    return Cost(flops=0, bytes=rows * width * element_bytes + _stored_bytes(rows, width, along))


def mx_dequantize_cost(*, rows: int, width: int, along: str, element_bytes: int = 4) -> Cost:
    """Return the cost of decoding a matrix.

    Args:
        rows: of the matrix.
        width: elements of a row.
        along: ``"rows"``, ``"columns"`` or ``"square"``.
        element_bytes: bytes of an element of the result.

    Returns:
        no FLOPs; bytes and scales read once, every element of the result written once.
    """
    return Cost(flops=0, bytes=element_bytes * rows * width + _stored_bytes(rows, width, along))

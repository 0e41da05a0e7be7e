"""Tile sizes of the plain attention kernels, by head width, precision and mean length.

Measured on an H200; a search (``gem_opkit.tuning``) may replace them on another GPU.
"""

from gem_opkit.tuning import LaunchConfig, length_bucket

# (widest head, mean length bucket or 0) -> rows, columns, warps, stages; first match counts.
_Table = tuple[tuple[int, int, LaunchConfig], ...]

_FORWARD: _Table = (
    (64, 512, LaunchConfig(64, 64, 4, 2)),
    (64, 0, LaunchConfig(128, 64, 4, 3)),
    (128, 512, LaunchConfig(64, 64, 4, 3)),
    (128, 0, LaunchConfig(128, 64, 8, 3)),
    (256, 64, LaunchConfig(64, 64, 4, 2)),
    (256, 0, LaunchConfig(128, 64, 8, 2)),
)
_BACKWARD_QUERIES: _Table = (
    (64, 0, LaunchConfig(64, 64, 4, 3)),
    (128, 0, LaunchConfig(64, 64, 4, 2)),
    (256, 0, LaunchConfig(64, 32, 8, 2)),
)
_BACKWARD_KEYS: _Table = (
    (64, 0, LaunchConfig(64, 64, 4, 3)),
    (128, 0, LaunchConfig(64, 32, 4, 2)),
    (256, 0, LaunchConfig(64, 32, 8, 1)),
)
# fp32 products run on the ordinary units: small tiles keep their operands in registers.
_SINGLE: _Table = ((128, 0, LaunchConfig(32, 32, 4, 1)), (256, 0, LaunchConfig(16, 16, 4, 1)))
# Where a search looks besides.
CANDIDATES: tuple[LaunchConfig, ...] = tuple(
    LaunchConfig(rows, columns, warps, stages)
    for rows, columns, warps in ((32, 64, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8))
    for stages in (2, 3)
)
SINGLE_CANDIDATES: tuple[LaunchConfig, ...] = tuple(
    LaunchConfig(rows, columns, warps, 1) for rows, columns, warps in ((16, 32, 4), (64, 32, 8))
)


def default_config(kernel: str, *, width: int, element_bytes: int, mean: int) -> LaunchConfig:
    """Return the measured setting of a kernel.

    Args:
        kernel: ``"forward"``, ``"backward_queries"`` or ``"backward_keys"``.
        width: the wider one of the padded head widths, at most 256.
        element_bytes: of q, k and v.
        mean: length bucket of the shorter side, from ``length_bucket``.

    Returns:
        tile and launch sizes.
    """
    tables = {
        "forward": _FORWARD,
        "backward_queries": _BACKWARD_QUERIES,
        "backward_keys": _BACKWARD_KEYS,
    }
    for widest, longest, config in _SINGLE if element_bytes == 4 else tables[kernel]:
        if width <= widest and (longest == 0 or 0 < mean <= longest):
            return config
    raise KeyError(f"{kernel} has no tile size for width {width}")


def short_rows(q_tokens: int, batch: int, *, width: int) -> int:
    """Return how many queries of a sequence the one-pass backward holds; 0 where it is not used.

    Args:
        q_tokens: queries of all sequences.
        batch: number of sequences.
        width: the wider one of the padded head widths.

    Returns:
        32 or 64 where the mean fits, from host numbers: a captured graph keeps its choice, and
        longer sequences among them take the split kernels.
    """
    mean = length_bucket(q_tokens, batch)
    return mean if mean in (32, 64) and width <= 128 else 0


def short_config(rows: int, element_bytes: int) -> LaunchConfig:
    """Return the measured setting of the one-pass backward.

    Args:
        rows: what ``short_rows`` returned.
        element_bytes: of q, k and v.

    Returns:
        tile and launch sizes.
    """
    if element_bytes == 4:
        return LaunchConfig(rows, 32, 4, 1)
    # 32 rows run on mma.sync, 64 on wgmma.
    return LaunchConfig(32, 32, 4, 3) if rows == 32 else LaunchConfig(64, 64, 4, 2)


def block_columns(
    width: int, value_width: int, block_tokens: int, *, single: bool
) -> tuple[int, int] | None:
    """Return the columns that a program of block attention reads at once.

    Args:
        width: head width K of queries and keys.
        value_width: head width V of values.
        block_tokens: length of a block.
        single: whether products are float32.

    Returns:
        columns of keys and of values; None where the kernels do not take these widths: heads that
        are read in chunks need values as wide as keys, with others Triton 3.6 made wrong gradients.
    """
    widest, chunk = (64, 32) if single else (128, 64)
    if single and block_tokens > 64:
        # A product is so many instructions on the ordinary units that compiling takes a minute.
        widest = chunk = 16
    tiles = [max(16, 1 << (x - 1).bit_length()) for x in (width, value_width)]
    if max(tiles) <= widest:
        return tiles[0], tiles[1]
    return (chunk, chunk) if width == value_width else None

"""What the Hopper kernels of block attention share: which block, its tiles, rotation, softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gem_attention.hopper.device import BOUND, sequence_rows, warps_meet
from gem_attention.portable.blocks.device import sine_and_cosine


@gluon.jit
def block_of(item, lists, HEADS: gl.constexpr):
    """Return an item's first token, its rows, how many of them see each other, and its column."""
    tiles, _, offsets, batch, tokens, block_tokens = lists
    sequence = gl.load(tiles + 2 * (item // HEADS))
    tile = gl.load(tiles + 2 * (item // HEADS) + 1)
    begin, length = sequence_rows(offsets, sequence, batch, tokens, True)
    rows = gl.minimum(length - tile * block_tokens, block_tokens)
    return begin + tile * block_tokens, rows, gl.where(sequence == batch, 0, rows)


@gluon.jit
def load_block(desc, tile, full, first, seen, column, wanted):
    """Load the rows of a block that see each other; those behind them are 0."""
    ROWS: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    mbarrier.expect(full, ROWS * WIDTH * 2, pred=wanted)
    tma.async_copy_global_to_shared(
        desc,
        [BOUND, first + seen, BOUND - seen, column],
        full,
        tile._reinterpret(tile.dtype, [1, 1, ROWS, WIDTH], desc.layout),
        pred=wanted,
    )


@gluon.jit
def store_block(desc, tile, first, rows, column):
    """Store the rows of a block from a tile that all warps have written and fenced."""
    ROWS: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    tma.async_copy_shared_to_global(
        desc,
        [BOUND, first + rows, BOUND - rows, column],
        tile._reinterpret(tile.dtype, [1, 1, ROWS, WIDTH], desc.layout),
    )


@gluon.jit
def turn_of(columns, pair, first, seen, angles, HAS_GAP: gl.constexpr):
    """Return sine and cosine of pairs from ``pair`` on of each row, laid out like ``columns``."""
    turns_ptr, gap_ptr, half = angles
    ROWS: gl.constexpr = columns.shape[0]
    PAIRS: gl.constexpr = columns.shape[1]
    LAYOUT: gl.constexpr = columns.type.layout
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    turns = turns_ptr + pair + gl.arange(0, PAIRS, layout=gl.SliceLayout(0, LAYOUT))
    angle = row.to(gl.float32)[:, None] * gl.load(turns)[None, :]
    if HAS_GAP:
        gap = gl.load(gap_ptr + first + row, mask=row < seen, other=0.0)
        angle += gap[:, None] * gl.load(turns + half)[None, :]
    return sine_and_cosine(angle, True)


@gluon.jit
def pairs_of(x):
    """Return the even and the odd columns, in fp32."""
    ROWS: gl.constexpr = x.shape[0]
    HALF: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.reshape(x.to(gl.float32), [ROWS, HALF, 2]))


@gluon.jit
def turned(even, odd, sine, cosine, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Turn pairs of columns, and round."""
    ROWS: gl.constexpr = even.shape[0]
    WIDTH: gl.constexpr = even.shape[1] * 2
    one = (even * cosine - odd * sine).to(dtype)
    two = (even * sine + odd * cosine).to(dtype)
    return gl.convert_layout(gl.reshape(gl.join(one, two), [ROWS, WIDTH]), LAYOUT)


@gluon.jit
def turn_in_place(q, k, first, seen, angles, HAS_GAP: gl.constexpr, COLUMNS: gl.constexpr):
    """Turn queries and keys of a block in shared memory, with one set of angles.

    COLUMNS at a time, 64 or all of them: all take 128 registers more.
    """
    # 16 bytes of a row for every thread.
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [gl.num_warps(), 1], [1, 0]
    )
    for c in gl.static_range(q.shape[1] // COLUMNS):
        q_part = q.slice(c * COLUMNS, COLUMNS, dim=1)
        k_part = k.slice(c * COLUMNS, COLUMNS, dim=1)
        even, odd = pairs_of(q_part.load(LAYOUT))
        sine, cosine = turn_of(even, c * COLUMNS // 2, first, seen, angles, HAS_GAP)
        q_part.store(turned(even, odd, sine, cosine, q.dtype, LAYOUT))
        even, odd = pairs_of(k_part.load(LAYOUT))
        k_part.store(turned(even, odd, sine, cosine, k.dtype, LAYOUT))
    fence_async_shared()
    warps_meet()


@gluon.jit
def block_weights(score_ts, factor, seen):
    """Return 2^(scores less the largest of their row) and the sum of each row.

    Keys from ``seen`` on weigh 0. Where there is none the sum is 1, so that 0 divided by it is 0.
    """
    KEYS: gl.constexpr = score_ts.shape[1]
    score_ts = score_ts * factor
    if seen < KEYS:
        key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, score_ts.type.layout))
        score_ts = gl.where((key < seen)[None, :], score_ts, float("-inf"))
    largest_t = gl.where(seen > 0, gl.max(score_ts, 1), 0.0)
    weight_ts = gl.exp2(score_ts - largest_t[:, None])
    return weight_ts, gl.where(seen > 0, gl.sum(weight_ts, 1), 1.0)

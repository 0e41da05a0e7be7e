"""What the forward on Hopper does around its products: items, loads and stores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gem_attention.hopper.device import BOUND, item_at, sequence_rows

# Numbers of an item that the consumers are told: tile, begin and length of the queries, length of
# the keys.
NUMBERS = gl.constexpr(4)


@gluon.jit
def item_of(turn, lists, HEADS: gl.constexpr):
    """Return head, tile, and begin and length of both sides of the item of a turn."""
    tiles, _, q_offsets, k_offsets, batch, q_tokens, k_tokens = lists
    item = item_at(turn, gl.num_programs(0), gl.program_id(0))
    entry = tiles + 2 * (item // HEADS)
    sequence = gl.load(entry)
    tile = gl.load(entry + 1)
    q_begin, q_length = sequence_rows(q_offsets, sequence, batch, q_tokens, True)
    k_begin, k_length = sequence_rows(k_offsets, sequence, batch, k_tokens, False)
    return item % HEADS, tile, q_begin, q_length, k_begin, k_length


@gluon.jit
def load_rows(desc, smem, full, begin, length, row, col):
    """Load rows [row, row + ROWS) of a sequence and the columns of one head."""
    ROWS: gl.constexpr = smem.shape[0]
    WIDTH: gl.constexpr = smem.shape[1]
    mbarrier.expect(full, ROWS * WIDTH * 2)
    tma.async_copy_global_to_shared(
        desc,
        [BOUND, begin + length, BOUND - length + row, col],
        full,
        smem._reinterpret(smem.dtype, [1, 1, ROWS, WIDTH], desc.layout),
    )


@gluon.jit
def store_rows(o_desc, o_tile, out, begin, length, row, col):
    """Store rows of a sequence by TMA, when the buffer is free again."""
    tma.store_wait(0)
    leave_rows(o_desc, o_tile, out, begin, length, row, col)


@gluon.jit
def leave_rows(o_desc, o_tile, out, begin, length, row, col):
    """Store rows of a sequence by TMA through a buffer that is free."""
    ROWS: gl.constexpr = o_tile.shape[0]
    WIDTH: gl.constexpr = o_tile.shape[1]
    o_tile.store(out)
    fence_async_shared()
    tma.async_copy_shared_to_global(
        o_desc,
        [BOUND, begin + length, BOUND - length + row, col],
        o_tile._reinterpret(o_tile.dtype, [1, 1, ROWS, WIDTH], o_desc.layout),
    )

"""What the Hopper kernels of ``jagged_flash_attention`` share on the device.

**Ragged descriptors.** One TMA descriptor serves all sequences of a packed (T, H·D) tensor, and
still reads rows outside a sequence as zero and never writes them. It describes the tensor as
(2^31, 2^31, 2^30, H·D) with strides (2^34 − r, r, r, 1) for a row stride r. The coordinates
(2^30, end, 2^30 − length + row) then reach the address of row ``begin + row``, because 2^64 wraps
around, while the third coordinate passes its bound 2^30 exactly where the sequence ends.

**Snake.** A persistent grid of P programs takes items in turns of P, forth and back, so that the
costliest items, which stand first, are spread evenly.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

# Rows of a ragged descriptor before its bound; see above.
BOUND = gl.constexpr(2**30)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# All warps of a partition meet; Triton 3.8 has renamed it.
warps_meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@builtin
def add_to_global(descriptor, coordinates, source, _semantic=None):
    """Add a tile of shared memory to global memory; Triton 3.6 has no public name for it."""
    places = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, places, source.handle)


@gluon.jit
def items_of(items, programs, program):
    """Return how many of the items a program gets."""
    turns = items // programs
    place = gl.where(turns % 2 == 0, program, programs - 1 - program)
    return turns + gl.where(place < items % programs, 1, 0)


@gluon.jit
def item_at(turn, programs, program):
    """Return the item that a program does in its turn."""
    place = gl.where(turn % 2 == 0, program, programs - 1 - program)
    return turn * programs + place


@gluon.jit
def sequence_rows(offsets, sequence, batch, tokens, TILED: gl.constexpr):
    """Return where a sequence begins and its length; the tail is sequence ``batch``.

    On the side that is cut into tiles the tail has rows; on the other side it has none.
    """
    # Clamped like the tile list, so that wrong offsets reach nothing outside.
    begin = gl.load(offsets + sequence)
    end = gl.load(offsets + gl.minimum(sequence + 1, batch))
    begin = gl.minimum(gl.maximum(begin, 0), tokens).to(gl.int32)
    end = gl.minimum(gl.maximum(end, 0), tokens).to(gl.int32)
    if TILED:
        end = gl.where(sequence == batch, tokens, end)
    return begin, gl.maximum(end - begin, 0)


@gluon.jit
def turns_of(lists, HEADS: gl.constexpr):
    """Return how many items this program does."""
    return items_of(gl.load(lists[1]) * HEADS, gl.num_programs(0), gl.program_id(0))


# What a consumer must know of an item are loads behind one another, and nothing would hide them
# before its first product. So the loading warp, which is ahead, leaves the numbers in shared memory
# before it asks for the operands whose arrival the consumers await.
@gluon.jit
def tell(smem, first, numbers, COUNT: gl.constexpr):
    """Leave numbers of an item from place ``first`` on; called by one warp."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(COUNT):
        smem.index(first + i).store(gl.full([1], numbers[i], gl.int32, ONE))


@gluon.jit
def told(smem, place):
    """Return the number at a place; called by a warpgroup."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(smem.index(place).load(ONE), 0)


@gluon.jit
def keys_seen(
    row,
    rows,
    q_length,
    k_length,
    left,
    right,
    BLOCK: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    """Return the first key tile that queries [row, row + rows) see, and the one after the last."""
    begin = 0
    end = k_length
    if LEFT:
        begin = gl.maximum(row + k_length - q_length - left, 0)
    if RIGHT:
        last = gl.minimum(row + rows, q_length) - 1
        end = gl.minimum(last + k_length - q_length + right + 1, k_length)
    first = begin // BLOCK
    return first, gl.where(end > begin, (end + BLOCK - 1) // BLOCK, first)


@gluon.jit
def queries_seeing(
    key,
    keys,
    q_length,
    k_length,
    left,
    right,
    BLOCK: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    """Return the first query tile that sees keys [key, key + keys), and the one after the last."""
    begin = 0
    end = q_length
    if RIGHT:
        begin = gl.maximum(key - (k_length - q_length) - right, 0)
    if LEFT:
        last = gl.minimum(key + keys, k_length) - 1
        end = gl.minimum(last - (k_length - q_length) + left + 1, q_length)
    first = begin // BLOCK
    return first, gl.where(end > begin, (end + BLOCK - 1) // BLOCK, first)


@gluon.jit
def padded_row(q_begin, sequence, ROWS: gl.constexpr):
    """Return where a sequence begins in buffers that pad each to tiles of ROWS rows."""
    return (q_begin // ROWS + sequence) * ROWS

"""Which item a program of the Hopper backward does, and where its part of dQ lies.

An item is one tile of keys of one key head. A launch does the items of some key heads and of one
part of the tile list; ``bounds`` (int32, on the device) says where the parts begin and end. The
items of one sequence and head lie in one part, so that after the launch its dQ is complete.

dQ is summed in fp32 in parts of 64 rows and 64 columns: first those of 64 rows of all heads of the
launch, then those of the next 64 rows of the padded sequences. A part is 128 rows of 32 numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_attention.hopper.device import sequence_rows

# Rows and columns of a part of dQ, and the rows of 32 numbers that hold it.
SIDE = gl.constexpr(64)
PART_ROWS = gl.constexpr(128)
# Rows of lse that shared memory holds, and of delta: at most two stages of 128.
LINES = gl.constexpr(256)


@gluon.jit
def item_of(lists, first, item, head_begin, KV_HEADS: gl.constexpr):
    """Return key head, sequence, tile, and begin and length of queries and keys.

    Args:
        lists: tile list and offsets.
        first: first entry of the launch's part of the list.
        item: number of the item; heads run fastest, so that neighbours share tiles in the cache.
        head_begin: first key head of the launch.
        KV_HEADS: key heads of the launch.
    """
    tiles, _bounds, q_offsets, k_offsets, batch, q_tokens, k_tokens = lists
    entry = tiles + 2 * (first + item // KV_HEADS)
    sequence = gl.load(entry)
    tile = gl.load(entry + 1)
    q_begin, q_length = sequence_rows(q_offsets, sequence, batch, q_tokens, False)
    k_begin, k_length = sequence_rows(k_offsets, sequence, batch, k_tokens, True)
    return head_begin + item % KV_HEADS, sequence, tile, q_begin, q_length, k_begin, k_length


@gluon.jit
def part_of(lists, part):
    """Return the first entry of a part of the tile list, and how many it has."""
    bounds = lists[1]
    first = gl.load(bounds + part)
    return first, gl.load(bounds + part + 1) - first


@gluon.jit
def writes_alone(
    k_length,
    KEYS: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SHARED: gl.constexpr,
):
    """Whether one tile holds all keys of a sequence, so that its item writes dq without a sum.

    Within windows it adds like others, because its keys need not be seen by all queries; and so it
    does where all sequences have the same queries.
    """
    if LEFT or RIGHT or SHARED:
        return False
    return k_length <= KEYS


@gluon.jit
def shared_row(sequence, q_length, copies, ROWS: gl.constexpr):
    """Return where the sums of queries begin that are the same for every sequence.

    The buffer holds them several times, and sequences take turns, so that fewer additions meet.
    """
    return sequence % copies * ((q_length + ROWS - 1) // ROWS * ROWS)


@gluon.jit
def part_place(
    padded,
    head,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """Return the number of a consumer's part of dQ: half of the columns, or of the rows.

    Args:
        padded: first row of the queries' tile among the padded sequences, a multiple of 64.
        head: query head, counted from the first of the launch.
        HALF: which consumer.
        HEADS: query heads of the launch.
        WIDTH: of a head; 128 is cut into two parts, and at 64 a tile has twice the rows.
    """
    PARTS: gl.constexpr = WIDTH // SIDE
    place = (padded // SIDE * HEADS + head) * PARTS
    return place + (HALF if PARTS == 2 else HALF * HEADS)

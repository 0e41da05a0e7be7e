"""Which item a program of the Hopper backward does, and where its part of dQ lies.

**Units.** All items of one sequence and key head are a unit and follow each other, so that they
share Q and dO in the cache and end together. Programs draw the next item from a counter: whoever
runs holds the lowest items, however many programs run at once.

**Ring.** dQ is summed in fp32 in blocks of 64 rows. Blocks are numbered in the order of the tile
list (``TileList.others``), and block v lies in slot v % R of a ring of R slots, which stays in the
L2 cache where a buffer for all rows would not. ``state`` counts, in int32::

    state[0]              items drawn
    state[1 + unit]       items of a unit that have ended; unit = sequence · key heads + key head,
                          the tail of the keys being the last sequence
    state[1 + units + s]  how often slot s was given back

Block v may use its slot once that was given back v // R times. An item waits for all slots of its
unit, hence for lower units alone; R is at least the longest unit, so the lowest unit waits for
nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gem_attention.hopper.device import sequence_rows

# Items that may be announced and not yet finished.
AHEAD = gl.constexpr(8)
# Numbers that an announcement holds at most.
_FIELDS = gl.constexpr(16)
ANNOUNCED = gl.constexpr(8 * 16)
# Stages of queries at most: lines of lse in shared memory, before as many of delta.
LINES = gl.constexpr(4)
# Columns of dQ in a block: a block is one such part of a head's width after the other.
COLUMNS = gl.constexpr(64)


@gluon.jit
def _say(item_smem, slot, field, value):
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    item_smem.index(slot * _FIELDS + field).store(gl.full([1], value, gl.int32, LINE))


@gluon.jit
def _hear(item_smem, slot, field):
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(item_smem.index(slot * _FIELDS + field).load(LINE), 0)


@gluon.jit
def announce_item(
    passed,
    lists,
    ring,
    total,
    turn,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    DESCENDING: gl.constexpr,
):
    """Draw an item, work out what it is, and tell it to the warps of the program as their next.

    Long before its turn, so that nobody waits for memory when that comes.
    """
    item_smem, item_full, item_free, _done = passed
    tiles, _count, q_offsets, k_offsets, batch, q_tokens, k_tokens = lists
    state, others, _most, _wanted = ring
    item = gl.atomic_add(state, 1, sem="relaxed")
    slot = turn % AHEAD
    mbarrier.wait(item_free.index(slot), ((turn // AHEAD) & 1) ^ 1)
    if item < total:
        entry = item // KV_HEADS
        sequence = gl.load(tiles + 2 * entry)
        tile = gl.load(tiles + 2 * entry + 1)
        before = gl.load(others + sequence)
        q_begin, q_length = sequence_rows(q_offsets, sequence, batch, q_tokens, False)
        k_begin, k_length = sequence_rows(k_offsets, sequence, batch, k_tokens, True)
        of_sequence = (k_length + KEYS - 1) // KEYS
        # The list has the tiles of a sequence one after the other; the items have heads outside.
        ahead = of_sequence - 1 - tile if DESCENDING else tile
        place = item - (entry - ahead) * KV_HEADS
        kv_head = place // of_sequence
        tile = place - kv_head * of_sequence
        if DESCENDING:
            tile = of_sequence - 1 - tile
        blocks = (q_length + ROWS - 1) // ROWS
        number = before * (KV_HEADS * GROUP) + kv_head * (GROUP * blocks)
        # Unsigned: wrong offsets may count more blocks than int32 holds.
        number = number.to(gl.uint32, bitcast=True)
        slots = ring_slots(ring, batch, GROUP).to(gl.uint32, bitcast=True)
        uses = number // slots
        start = number - uses * slots
        _say(item_smem, slot, 0, kv_head)
        _say(item_smem, slot, 1, sequence)
        _say(item_smem, slot, 2, tile)
        _say(item_smem, slot, 3, of_sequence)
        _say(item_smem, slot, 4, q_begin)
        _say(item_smem, slot, 5, q_length)
        _say(item_smem, slot, 6, k_begin)
        _say(item_smem, slot, 7, k_length)
        _say(item_smem, slot, 8, start.to(gl.int32))
        _say(item_smem, slot, 9, uses.to(gl.int32))
    else:
        _say(item_smem, slot, 0, -1)
    mbarrier.arrive(item_full.index(slot), count=1)


@gluon.jit
def hear_item(passed, turn):
    """Return the item of this turn.

    Returns:
        key head (negative after the last item), sequence, tile and number of tiles, begin and
        length of queries and of keys, and slot of the unit's first block.
    """
    item_smem, item_full, _free, _done = passed
    slot = turn % AHEAD
    mbarrier.wait(item_full.index(slot), (turn // AHEAD) & 1)
    return (
        _hear(item_smem, slot, 0),
        _hear(item_smem, slot, 1),
        _hear(item_smem, slot, 2),
        _hear(item_smem, slot, 3),
        _hear(item_smem, slot, 4),
        _hear(item_smem, slot, 5),
        _hear(item_smem, slot, 6),
        _hear(item_smem, slot, 7),
        _hear(item_smem, slot, 8),
    )


@gluon.jit
def uses_before(passed, turn):
    """Return how often the slot of the unit's first block must have been given back."""
    return _hear(passed[0], turn % AHEAD, 9)


@gluon.jit
def writes_alone(tiles, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Whether an item writes dq itself, as the only one of its unit; it has no blocks then.

    Within windows it adds like others, because its keys need not be seen by all queries.
    """
    if LEFT or RIGHT:
        return False
    return tiles == 1


@gluon.jit
def ring_slots(ring, batch, GROUP: gl.constexpr):
    """Return how many slots the ring has."""
    _state, others, most, wanted = ring
    return gl.minimum(gl.maximum(gl.load(others + batch) * GROUP, wanted), most)


@gluon.jit
def slot_of(start, block, slots):
    """Return the slot of one of a unit's blocks, from that of its first."""
    slot = start + block
    return gl.where(slot >= slots, slot - slots, slot)

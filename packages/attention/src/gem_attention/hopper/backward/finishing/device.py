"""What the finishing warps of the Hopper backward do: dQ from its fp32 blocks into rows of dq.

They work beside the products. Whoever ends the last item of a unit converts the unit's blocks,
writes zeros in their place and gives the slots back.

A block holds 64 rows, each part of 64 columns in the order of the accumulator's registers::

    row = 16·warp + 8·upper + lane // 4        column = 8·group + 2·(lane % 4) + odd
    part[warp, group, lane // 4, lane % 4, upper, odd]
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gem_attention.hopper.backward.items.device import (
    AHEAD,
    COLUMNS,
    hear_item,
    ring_slots,
    slot_of,
    writes_alone,
)
from gem_attention.hopper.device import warps_meet

# Rows of 32 numbers that are fetched at a time, and how many such fetches are under way.
PIECE = gl.constexpr(64)
PIECES = gl.constexpr(2)
WARPS = gl.constexpr(2)


@gluon.jit
def _fence(x):
    """Order what this thread did to memory before what TMA does there next, and the reverse."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;",
        "=r,r",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _fetch(piece, loaded, start, slots, desc, smem, full, PER_BLOCK: gl.constexpr):
    """Ask for a piece of a unit's blocks."""
    slot = slot_of(start, piece // PER_BLOCK, slots)
    row = slot * (PER_BLOCK * PIECE) + piece % PER_BLOCK * PIECE
    stage = loaded % PIECES
    mbarrier.expect(full.index(stage), PIECE * 32 * 4)
    tma.async_copy_global_to_shared(desc, [row, 0], full.index(stage), smem.index(stage))


@gluon.jit
def _convert(chunk, out, row, rows, scale, STRIDE: gl.constexpr):
    """Write 16 rows and 64 columns of dQ to their place; ``out`` points at the first, ``row``."""
    IN: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [WARPS, 1], [1, 0])
    # Eight neighbours of a row in a thread's registers: two stores of 16 bytes.
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]],
        [[0, 32]],
        [],
        [16, COLUMNS],
    )
    x = chunk.load(IN) * scale
    x = x.reshape([1, COLUMNS // 8, 8, 4, 2, 2]).permute([0, 4, 2, 1, 3, 5])
    x = x.reshape([16, COLUMNS]).to(out.dtype.element_ty)
    x = gl.convert_layout(x, LAYOUT, assert_trivial=True)
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(out + r[:, None] * STRIDE + c[None, :], x, mask=(row + r < rows)[:, None])


@gluon.jit
def finish_items(
    desc,
    ring_ptr,
    grad_q,
    smem,
    full,
    passed,
    lists,
    ring,
    scale,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    """Run the finishing warps until no item is left."""
    item_free = passed[2]
    item_done = passed[3]
    state = ring[0]
    batch = lists[4]
    HEADS: gl.constexpr = KV_HEADS * GROUP
    PER_BLOCK: gl.constexpr = ROWS * WIDTH // 32 // PIECE
    PER_PART: gl.constexpr = ROWS * COLUMNS // 32 // PIECE
    CHUNK: gl.constexpr = 16 * COLUMNS // 32
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    units = (batch + 1) * KV_HEADS
    slots = ring_slots(ring, batch, GROUP)
    loaded = 0
    turn = 0
    kv_head, sequence, _tile, of_sequence, q_begin, q_length, _k_begin, _k_length, start = (
        hear_item(passed, turn)
    )
    while kv_head >= 0:
        mbarrier.wait(item_done.index(turn % AHEAD), (turn // AHEAD) & 1)
        unit = state + 1 + sequence * KV_HEADS + kv_head
        ended = gl.atomic_add(unit, 1, sem="acq_rel", scope="gpu") + 1
        mbarrier.arrive(item_free.index(turn % AHEAD), count=1)
        if (ended == of_sequence) & (not writes_alone(of_sequence, LEFT, RIGHT)):
            _fence(ended)
            blocks = (q_length + ROWS - 1) // ROWS
            pieces = blocks * (GROUP * PER_BLOCK)
            for piece in range(gl.minimum(pieces, PIECES)):
                _fetch(piece, loaded + piece, start, slots, desc, smem, full, PER_BLOCK)
            for piece in range(pieces):
                stage = loaded % PIECES
                mbarrier.wait(full.index(stage), (loaded // PIECES) & 1)
                block = piece // PER_BLOCK
                part = piece % PER_BLOCK
                head = kv_head * GROUP + block // blocks
                row = block % blocks * ROWS + part % PER_PART * (ROWS // PER_PART)
                out = grad_q + (q_begin + row).to(gl.int64) * (HEADS * WIDTH)
                out += head * WIDTH + part // PER_PART * COLUMNS
                for i in gl.static_range(PIECE // CHUNK):
                    chunk = smem.index(stage).slice(i * CHUNK, CHUNK)
                    below = i * 16
                    to = out + below * (HEADS * WIDTH)
                    _convert(chunk, to, row + below, q_length, scale, HEADS * WIDTH)
                slot = slot_of(start, block, slots)
                at = ring_ptr + (slot * PER_BLOCK + part).to(gl.int64) * (PIECE * 32)
                at += gl.arange(0, PIECE * 32, layout=FLAT)
                gl.store(at, gl.zeros([PIECE * 32], gl.float32, FLAT))
                warps_meet()
                if piece + PIECES < pieces:
                    _fetch(
                        piece + PIECES,
                        loaded + PIECES,
                        start,
                        slots,
                        desc,
                        smem,
                        full,
                        PER_BLOCK,
                    )
                loaded += 1
            _fence(ended)
            warps_meet()
            for begin in range(0, GROUP * blocks, 32 * WARPS):
                block = begin + gl.arange(0, 32 * WARPS, layout=LINE)
                slot = slot_of(start, block, slots)
                gl.atomic_add(
                    state + 1 + units + slot,
                    gl.full([32 * WARPS], 1, gl.int32, LINE),
                    mask=block < GROUP * blocks,
                    sem="release",
                    scope="gpu",
                )
        turn += 1
        kv_head, sequence, _tile, of_sequence, q_begin, q_length, _k_begin, _k_length, start = (
            hear_item(passed, turn)
        )

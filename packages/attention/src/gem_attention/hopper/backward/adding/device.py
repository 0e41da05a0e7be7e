"""Adding dQ of a tile of queries to its blocks in the ring, by the warps that made it.

Or writing it to its rows, where one tile holds all keys of the sequence and nobody else adds.

At width 128 each consumer warpgroup makes half of dQ's columns. At width 64 an adding warpgroup of
its own makes all of them: registers allow it there, and the consumers need not wait for each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gem_attention.hopper.backward.items.device import (
    AHEAD,
    COLUMNS,
    hear_item,
    ring_slots,
    slot_of,
    writes_alone,
)
from gem_attention.hopper.device import BOUND, add_to_global, queries_seeing


@gluon.jit
def _to_registers_order(dq):
    """Order a tile as its registers lie: four neighbours a thread, threads in turn."""
    parts = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2])
    parts = parts.permute([0, 3, 2, 4, 1, 5])
    return parts.reshape([dq.shape[0] * COLUMNS // 32, 32])


@gluon.jit
def add_block(dq, smem, desc, row, PENDING: gl.constexpr):
    """Add a tile of dQ to the ring, once the addition that was in ``smem`` has left."""
    tma.store_wait(PENDING)
    smem.store(_to_registers_order(dq))
    fence_async_shared()
    add_to_global(desc, [row, 0], smem)


@gluon.jit
def put_block(dq, scale, smem, desc, place, PENDING: gl.constexpr, DTYPE: gl.constexpr):
    """Write a tile of dQ to its rows and columns, once what was in ``smem`` before has left."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ROWS: gl.constexpr = dq.shape[0]
    out = smem._reinterpret(DTYPE, [2, ROWS, COLUMNS], LAYOUT).index(0)
    tma.store_wait(PENDING)
    out.store((dq * scale).to(DTYPE))
    fence_async_shared()
    tma.async_copy_shared_to_global(
        desc, place, out._reinterpret(DTYPE, [1, 1, ROWS, COLUMNS], desc.layout)
    )


@gluon.jit
def await_additions(pending, LATER: gl.constexpr):
    """Wait until all additions are done, though not the ``LATER`` stores that came after them.

    ``store_wait`` would return as soon as they have left shared memory.
    """
    WAIT: gl.constexpr = (
        "cp.async.bulk.wait_group 2; fence.proxy.async; mov.b32 $0, $1;"
        if LATER == 2
        else "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;"
    )
    gl.inline_asm_elementwise(WAIT, "=r,r", [pending], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def row_of(start, offset, slots, SIZE: gl.constexpr):
    """Return the row of a block of SIZE rows in the ring, from the slot of the unit's first."""
    return slot_of(start, offset, slots) * SIZE


@gluon.jit
def row_place(
    begin,
    length,
    row,
    kv_head,
    offset,
    blocks,
    GROUP: gl.constexpr,
    WIDTH: gl.constexpr,
    COLUMN: gl.constexpr,
):
    """Return the coordinates of a tile of dq: rows of the sequence, a part of a head's columns."""
    head = kv_head * GROUP + (offset // blocks if GROUP > 1 else 0)
    return [BOUND, begin + length, BOUND - length + row, head * WIDTH + COLUMN]


@gluon.jit
def next_block(offset, tile, first, stop, blocks, GROUP: gl.constexpr):
    """Return block and tile of the next queries; after the last, those of the next head."""
    offset += 1
    tile += 1
    if GROUP > 1:  # noqa: SIM102 - known when compiled; the other when it runs
        if tile == stop:
            tile = first
            offset += blocks - (stop - first)
    return offset, tile


@gluon.jit
def _make(step, keys, ds_smem, ds_bars, zero, KEYS: gl.constexpr):
    """Return dQ of one tile of queries from dS of the first KEYS keys."""
    ds_full, ds_empty = ds_bars
    mbarrier.wait(ds_full.index(step & 1), (step >> 1) & 1)
    ds_t = ds_smem.index(step & 1).slice(0, KEYS).permute((1, 0))
    dq = warpgroup_mma(
        ds_t, keys.index(step >> 30).slice(0, KEYS), zero, use_acc=False, is_async=True
    )
    dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
    mbarrier.arrive(ds_empty.index(step & 1), count=1)
    return dq


@gluon.jit
def add_items(
    descs,
    k_smem,
    ds_smem,
    dq_smem,
    k_bars,
    ds_bars,
    passed,
    lists,
    ring,
    left,
    right,
    scale,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    """Run an adding warpgroup until no item is left."""
    desc, rows_desc = descs
    dtype: gl.constexpr = k_smem.dtype
    k_full, kv_empty = k_bars
    item_done = passed[3]
    SIZE: gl.constexpr = ROWS * COLUMNS // 32
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    slots = ring_slots(ring, lists[4], GROUP)
    step = 0
    turn = 0
    kv_head, _sequence, tile, tiles, q_begin, q_length, _k_begin, k_length, start = hear_item(
        passed, turn
    )
    while kv_head >= 0:
        first, stop = queries_seeing(
            tile * KEYS, KEYS, q_length, k_length, left, right, ROWS, LEFT, RIGHT
        )
        blocks = (q_length + ROWS - 1) // ROWS
        offset = first
        q_tile = first
        steps = (stop - first) * GROUP
        zero = gl.zeros([ROWS, COLUMNS], gl.float32, Q_LAYOUT)
        mbarrier.wait(k_full, turn & 1)
        if tile * KEYS + KEYS // 2 < k_length:
            for _step in range(steps):
                dq = _make(step, k_smem, ds_smem, ds_bars, zero, KEYS)
                if writes_alone(tiles, LEFT, RIGHT):
                    place = row_place(
                        q_begin,
                        q_length,
                        q_tile * ROWS,
                        kv_head,
                        offset,
                        blocks,
                        GROUP,
                        COLUMNS,
                        0,
                    )
                    put_block(dq, scale, dq_smem.index(step & 1), rows_desc, place, 1, dtype)
                else:
                    row = row_of(start, offset, slots, SIZE)
                    add_block(dq, dq_smem.index(step & 1), desc, row, 1)
                offset, q_tile = next_block(offset, q_tile, first, stop, blocks, GROUP)
                step += 1
        else:
            # The other half of the keys does not exist, and its dS was not written.
            for _step in range(steps):
                dq = _make(step, k_smem, ds_smem, ds_bars, zero, KEYS // 2)
                if writes_alone(tiles, LEFT, RIGHT):
                    place = row_place(
                        q_begin,
                        q_length,
                        q_tile * ROWS,
                        kv_head,
                        offset,
                        blocks,
                        GROUP,
                        COLUMNS,
                        0,
                    )
                    put_block(dq, scale, dq_smem.index(step & 1), rows_desc, place, 1, dtype)
                else:
                    row = row_of(start, offset, slots, SIZE)
                    add_block(dq, dq_smem.index(step & 1), desc, row, 1)
                offset, q_tile = next_block(offset, q_tile, first, stop, blocks, GROUP)
                step += 1
        mbarrier.arrive(kv_empty, count=1)
        await_additions(turn, 0)
        mbarrier.arrive(item_done.index(turn % AHEAD), count=1)
        turn += 1
        kv_head, _sequence, tile, tiles, q_begin, q_length, _k_begin, k_length, start = hear_item(
            passed, turn
        )
    tma.store_wait(0)

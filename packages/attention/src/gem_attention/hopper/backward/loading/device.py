"""What the loading warp of the Hopper backward does: draw items, and fetch their tiles by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gem_attention.hopper.backward.items.device import (
    LINES,
    announce_item,
    hear_item,
    ring_slots,
    slot_of,
    uses_before,
    writes_alone,
)
from gem_attention.hopper.device import BOUND, padded_row, queries_seeing


@gluon.jit
def await_slots(given_back, slots, start, uses, blocks):
    """Wait until every slot of a unit was given back by the unit that had it before."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for begin in range(0, blocks, 32):
        block = begin + gl.arange(0, 32, layout=LINE)
        slot = slot_of(start, block, slots)
        wanted = gl.where(start + block >= slots, uses + 1, uses)
        missing = 1
        while missing > 0:
            times = gl.load(given_back + slot, mask=block < blocks, other=2**31 - 1, volatile=True)
            missing = gl.max((times < wanted).to(gl.int32), 0)
    # What they wrote there comes before what is added to it, by whatever unit of the processor.
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; fence.proxy.async; mov.b32 $0, $1;",
        "=r,r",
        [blocks],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _load_rows(desc, place, smem, full, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Fetch all rows of K or V of an item."""
    mbarrier.expect(full, ROWS * WIDTH * 2)
    block = smem.index(0)._reinterpret(smem.dtype, [1, 1, ROWS, WIDTH], desc.layout)
    tma.async_copy_global_to_shared(desc, place, full, block)


@gluon.jit
def load_items(
    descs,
    smems,
    bars,
    passed,
    lists,
    ring,
    left,
    right,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SOFTMAX: gl.constexpr,
):
    """Run the loading warp until no item is left."""
    q_desc, k_desc, v_desc, g_desc, lse_desc, delta_desc = descs
    q_smem, k_smem, v_smem, g_smem, lines_smem = smems
    k_full, v_full, kv_empty, q_full, g_full, empty = bars
    state = ring[0]
    count = lists[1]
    batch = lists[4]
    dtype: gl.constexpr = q_smem.dtype
    TILE_BYTES: gl.constexpr = ROWS * WIDTH * 2 + (ROWS * 4 if SOFTMAX else 0)
    total = gl.load(count) * KV_HEADS
    slots = ring_slots(ring, batch, GROUP)
    given_back = state + 1 + (batch + 1) * KV_HEADS
    DESCENDING: gl.constexpr = LEFT and not RIGHT
    step = 0
    turn = 0
    announce_item(passed, lists, ring, total, turn, KV_HEADS, GROUP, ROWS, KEYS, DESCENDING)
    kv_head, sequence, tile, tiles, q_begin, q_length, k_begin, k_length, start = hear_item(
        passed, turn
    )
    while kv_head >= 0:
        padded = padded_row(q_begin, sequence)
        first, stop = queries_seeing(
            tile * KEYS, KEYS, q_length, k_length, left, right, ROWS, LEFT, RIGHT
        )
        if not writes_alone(tiles, LEFT, RIGHT):
            blocks = (q_length + ROWS - 1) // ROWS
            await_slots(given_back, slots, start, uses_before(passed, turn), GROUP * blocks)
        second = step + 1
        k_place = [BOUND, k_begin + k_length, BOUND - k_length + tile * KEYS, kv_head * WIDTH]
        mbarrier.wait(kv_empty, (turn & 1) ^ 1)
        _load_rows(k_desc, k_place, k_smem, k_full, KEYS, WIDTH)
        # V is needed after the first queries, and is asked for after them.
        if first == stop:
            _load_rows(v_desc, k_place, v_smem, v_full, KEYS, WIDTH)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            for q_tile in range(first, stop):
                stage = step % STAGES
                row = padded + q_tile * ROWS
                q_place = [
                    BOUND,
                    q_begin + q_length,
                    BOUND - q_length + q_tile * ROWS,
                    head * WIDTH,
                ]
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(q_full.index(stage), TILE_BYTES)
                if SOFTMAX:
                    line = lines_smem.index(stage)._reinterpret(
                        gl.float32, [1, ROWS], lse_desc.layout
                    )
                    tma.async_copy_global_to_shared(
                        lse_desc, [head, row], q_full.index(stage), line
                    )
                block = q_smem.index(stage)._reinterpret(dtype, [1, 1, ROWS, WIDTH], q_desc.layout)
                tma.async_copy_global_to_shared(q_desc, q_place, q_full.index(stage), block)
                if (member == 0) & (q_tile == first):
                    _load_rows(v_desc, k_place, v_smem, v_full, KEYS, WIDTH)
                mbarrier.expect(g_full.index(stage), TILE_BYTES)
                if SOFTMAX:
                    line = lines_smem.index(LINES + stage)._reinterpret(
                        gl.float32, [1, ROWS], delta_desc.layout
                    )
                    tma.async_copy_global_to_shared(
                        delta_desc, [head, row], g_full.index(stage), line
                    )
                block = g_smem.index(stage)._reinterpret(dtype, [1, 1, ROWS, WIDTH], g_desc.layout)
                tma.async_copy_global_to_shared(g_desc, q_place, g_full.index(stage), block)
                # The consumers have work now.
                if step == second:
                    announce_item(
                        passed,
                        lists,
                        ring,
                        total,
                        turn + 1,
                        KV_HEADS,
                        GROUP,
                        ROWS,
                        KEYS,
                        DESCENDING,
                    )
                step += 1
        if step <= second:
            announce_item(
                passed, lists, ring, total, turn + 1, KV_HEADS, GROUP, ROWS, KEYS, DESCENDING
            )
        turn += 1
        kv_head, sequence, tile, tiles, q_begin, q_length, k_begin, k_length, start = hear_item(
            passed, turn
        )

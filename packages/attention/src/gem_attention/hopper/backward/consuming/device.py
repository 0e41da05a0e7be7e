"""What a consumer warpgroup of the Hopper backward does: dK and dV of half of an item's keys.

And half of dQ, unless an adding warpgroup makes it (``backward.adding``).
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

from gem_attention.hopper.backward.adding.device import (
    add_block,
    await_additions,
    next_block,
    put_block,
    row_of,
    row_place,
)
from gem_attention.hopper.backward.items.device import (
    AHEAD,
    COLUMNS,
    LINES,
    hear_item,
    ring_slots,
    writes_alone,
)
from gem_attention.hopper.backward.weights.device import activation_weights, softmax_weights
from gem_attention.hopper.device import BOUND, LOG2_E, queries_seeing


# One function, because an accumulator in flight may not leave its loop.
@gluon.jit
def consume_items(  # noqa: PLR0915
    descs,
    smems,
    bars,
    ds_smem,
    out_smem,
    ds_bars,
    passed,
    lists,
    ring,
    left,
    right,
    scale,
    HALF: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    ACTIVATIONS: gl.constexpr,
):
    """Run a consumer warpgroup, which has half of each item's keys, until no item is left."""
    dq_desc, rows_desc, dk_desc, dv_desc = descs
    q_smem, k_smem, v_smem, g_smem, lines_smem = smems
    k_full, v_full, kv_empty, q_full, g_full, empty = bars
    ds_full, ds_empty = ds_bars
    item_done = passed[3]
    dtype: gl.constexpr = q_smem.dtype
    MINE: gl.constexpr = KEYS // 2
    # Who adds a part of dQ: each consumer one, or the adding warpgroup.
    ADDS: gl.constexpr = WIDTH == 2 * COLUMNS
    SIZE: gl.constexpr = ROWS * WIDTH // 32
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    COL: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    factor = scale * LOG2_E
    OUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dq_smem = out_smem.index(HALF)
    out = dq_smem._reinterpret(dtype, [MINE, WIDTH], OUT)
    slots = ring_slots(ring, lists[4], GROUP)
    step = 0
    turn = 0
    kv_head, _sequence, tile, tiles, q_begin, q_length, k_begin, k_length, start = hear_item(
        passed, turn
    )
    while kv_head >= 0:
        first, stop = queries_seeing(
            tile * KEYS, KEYS, q_length, k_length, left, right, ROWS, LEFT, RIGHT
        )
        key = tile * KEYS + HALF * MINE
        steps = (stop - first) * GROUP
        blocks = (q_length + ROWS - 1) // ROWS
        offset = first
        q_tile = first
        dk = gl.zeros([MINE, WIDTH], gl.float32, O_LAYOUT)
        dv = gl.zeros([MINE, WIDTH], gl.float32, O_LAYOUT)
        zero = gl.zeros([MINE, ROWS], gl.float32, S_LAYOUT)
        zero_q = gl.zeros([ROWS, COLUMNS], gl.float32, Q_LAYOUT)
        mbarrier.wait(k_full, turn & 1)
        if key < k_length:
            limits = (q_length, k_length, left, right)
            for _step in range(steps):
                stage = step % STAGES
                phase = (step // STAGES) & 1
                q = q_smem.index(stage)
                g = g_smem.index(stage)
                ds_now = ds_smem.index(step & 1)
                # Always 0, but not so that the compiler sees it: it would keep the address of each
                # part of K and V in registers of its own.
                only = step >> 30
                k_mine = k_smem.index(only).slice(HALF * MINE, MINE)
                v_mine = v_smem.index(only).slice(HALF * MINE, MINE)
                mbarrier.wait(q_full.index(stage), phase)
                x = warpgroup_mma(k_mine, q.permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.wait(g_full.index(stage), phase)
                mbarrier.wait(v_full, turn & 1)
                y = warpgroup_mma(v_mine, g.permute((1, 0)), zero, use_acc=False, is_async=True)
                x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
                if ACTIVATIONS == "softmax":
                    p = softmax_weights(
                        x,
                        key,
                        q_tile * ROWS,
                        limits,
                        lines_smem.index(stage),
                        factor,
                        LEFT,
                        RIGHT,
                        S_LAYOUT,
                    )
                    p_tile = gl.convert_layout(p.to(dtype), P_LAYOUT)
                    # P passes through the wait to stay before it; the assembler may still move
                    # its exponentials. Holding them back with a sleep that never fires cost 3 to
                    # 8 %.
                    y, p = warpgroup_mma_wait(num_outstanding=0, deps=(y, p))
                    ds = p * (y - lines_smem.index(LINES + stage).load(COL)[None, :])
                else:
                    head = kv_head * GROUP + (offset // blocks if GROUP > 1 else 0)
                    p, slope = activation_weights(
                        x,
                        key,
                        q_tile * ROWS,
                        limits,
                        head,
                        scale,
                        LEFT,
                        RIGHT,
                        ACTIVATIONS,
                        S_LAYOUT,
                    )
                    p_tile = gl.convert_layout(p.to(dtype), P_LAYOUT)
                    y, slope = warpgroup_mma_wait(num_outstanding=0, deps=(y, slope))
                    ds = slope * y
                dv = warpgroup_mma(p_tile, g, dv, is_async=True)
                ds_tile = ds.to(dtype)
                if not ADDS:
                    mbarrier.wait(ds_empty.index(step & 1), ((step >> 1) & 1) ^ 1)
                # Two buffers: where the consumers add, by the time one comes round the other half
                # has said, with the other buffer, that it is done with this one.
                ds_now.slice(HALF * MINE, MINE).store(ds_tile)
                fence_async_shared()
                mbarrier.arrive(ds_full.index(step & 1), count=1)
                if ADDS:
                    mbarrier.wait(ds_full.index(step & 1), (step >> 1) & 1)
                    ds_t = ds_now.permute((1, 0))
                    dq = warpgroup_mma(
                        ds_t,
                        k_smem.index(step >> 30).slice(HALF * COLUMNS, COLUMNS, dim=1),
                        zero_q,
                        use_acc=False,
                        is_async=True,
                    )
                    dk = warpgroup_mma(gl.convert_layout(ds_tile, P_LAYOUT), q, dk, is_async=True)
                    # dQ leaves for memory while dK is still being computed.
                    dv, dq = warpgroup_mma_wait(num_outstanding=1, deps=(dv, dq))
                    if writes_alone(tiles, LEFT, RIGHT):
                        place = row_place(
                            q_begin,
                            q_length,
                            q_tile * ROWS,
                            kv_head,
                            offset,
                            blocks,
                            GROUP,
                            WIDTH,
                            HALF * COLUMNS,
                        )
                        put_block(dq, scale, dq_smem, rows_desc, place, 0, dtype)
                    else:
                        row = row_of(start, offset, slots, SIZE) + HALF * (SIZE // 2)
                        add_block(dq, dq_smem, dq_desc, row, 0)
                    dk = warpgroup_mma_wait(num_outstanding=0, deps=(dk,))
                else:
                    dk = warpgroup_mma(gl.convert_layout(ds_tile, P_LAYOUT), q, dk, is_async=True)
                    dv, dk = warpgroup_mma_wait(num_outstanding=0, deps=(dv, dk))
                offset, q_tile = next_block(offset, q_tile, first, stop, blocks, GROUP)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
        else:
            # No key of this half exists: its dS is 0, and only its half of dQ is left to do.
            for _step in range(steps):
                stage = step % STAGES
                ds_now = ds_smem.index(step & 1)
                if ADDS:
                    ds_now.slice(HALF * MINE, MINE).store(gl.zeros([MINE, ROWS], dtype, S_LAYOUT))
                    fence_async_shared()
                else:
                    mbarrier.wait(ds_empty.index(step & 1), ((step >> 1) & 1) ^ 1)
                mbarrier.arrive(ds_full.index(step & 1), count=1)
                # "Full" first, or the next load could come too early.
                mbarrier.wait(q_full.index(stage), (step // STAGES) & 1)
                mbarrier.wait(g_full.index(stage), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                if ADDS:
                    mbarrier.wait(ds_full.index(step & 1), (step >> 1) & 1)
                    ds_t = ds_now.permute((1, 0))
                    dq = warpgroup_mma(
                        ds_t,
                        k_smem.index(step >> 30).slice(HALF * COLUMNS, COLUMNS, dim=1),
                        zero_q,
                        use_acc=False,
                        is_async=True,
                    )
                    dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
                    if writes_alone(tiles, LEFT, RIGHT):
                        place = row_place(
                            q_begin,
                            q_length,
                            q_tile * ROWS,
                            kv_head,
                            offset,
                            blocks,
                            GROUP,
                            WIDTH,
                            HALF * COLUMNS,
                        )
                        put_block(dq, scale, dq_smem, rows_desc, place, 0, dtype)
                    else:
                        row = row_of(start, offset, slots, SIZE) + HALF * (SIZE // 2)
                        add_block(dq, dq_smem, dq_desc, row, 0)
                    offset, q_tile = next_block(offset, q_tile, first, stop, blocks, GROUP)
                step += 1
        mbarrier.wait(v_full, turn & 1)
        mbarrier.arrive(kv_empty, count=1)
        coordinates = [BOUND, k_begin + k_length, BOUND - k_length + key, kv_head * WIDTH]
        tma.store_wait(0)
        out.store(dv.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(
            dv_desc, coordinates, out._reinterpret(dtype, [1, 1, MINE, WIDTH], dv_desc.layout)
        )
        tma.store_wait(0)
        out.store((dk * scale).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(
            dk_desc, coordinates, out._reinterpret(dtype, [1, 1, MINE, WIDTH], dk_desc.layout)
        )
        if ADDS:
            await_additions(turn, 2)
            mbarrier.arrive(item_done.index(turn % AHEAD), count=1)
        turn += 1
        kv_head, _sequence, tile, tiles, q_begin, q_length, k_begin, k_length, start = hear_item(
            passed, turn
        )
    tma.store_wait(0)

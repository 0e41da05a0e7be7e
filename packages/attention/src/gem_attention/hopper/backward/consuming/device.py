"""What a consumer warpgroup of the Hopper backward does: dK and dV of half of an item's keys.

And half of dQ of its queries: of the columns at width 128, of the rows at width 64, where a tile
has 128 queries.
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
    LINES,
    SIDE,
    item_of,
    part_of,
    part_place,
    shared_row,
    writes_alone,
)
from gem_attention.hopper.backward.leaving.device import add_part, next_queries, put_part
from gem_attention.hopper.backward.weights.device import activation_weights, softmax_weights
from gem_attention.hopper.device import (
    BOUND,
    LOG2_E,
    item_at,
    items_of,
    padded_row,
    queries_seeing,
)


# One function, because an accumulator in flight may not leave its loop.
@gluon.jit
def consume_items(  # noqa: PLR0915
    descs,
    smems,
    bars,
    ds_smem,
    dq_smem,
    ds_full,
    lists,
    head_begin,
    part,
    left,
    right,
    scale,
    copies,
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
    SHARED: gl.constexpr,
):
    """Run a consumer warpgroup, which has half of each item's keys, until no item is left."""
    dq_desc, rows_desc, dk_desc, dv_desc = descs
    q_smem, k_smem, v_smem, g_smem, lines_smem = smems
    k_full, v_full, kv_empty, q_full, g_full, empty = bars
    dtype: gl.constexpr = q_smem.dtype
    MINE: gl.constexpr = KEYS // 2
    PARTS: gl.constexpr = WIDTH // SIDE
    # Where the consumer's part of dQ begins in its tile.
    ROW: gl.constexpr = HALF * SIDE if PARTS == 1 else 0
    COLUMN: gl.constexpr = HALF * SIDE if PARTS == 2 else 0
    HEADS: gl.constexpr = KV_HEADS * GROUP
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    COL: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    factor = scale * LOG2_E
    dq_mine = dq_smem.index(HALF)
    first_entry, entries = part_of(lists, part)
    step = 0
    for turn in range(items_of(entries * KV_HEADS, programs, program)):
        kv_head, sequence, tile, q_begin, q_length, k_begin, k_length = item_of(
            lists, first_entry, item_at(turn, programs, program), head_begin, KV_HEADS
        )
        first, stop = queries_seeing(
            tile * KEYS, KEYS, q_length, k_length, left, right, ROWS, LEFT, RIGHT
        )
        key = tile * KEYS + HALF * MINE
        steps = (stop - first) * GROUP
        alone = writes_alone(k_length, KEYS, LEFT, RIGHT, SHARED)
        if SHARED:
            padded = shared_row(sequence, q_length, copies, ROWS) + first * ROWS
        else:
            padded = padded_row(q_begin, sequence, ROWS) + first * ROWS
        place = part_place(padded, (kv_head - head_begin) * GROUP, HALF, HEADS, WIDTH)
        q_tile = first
        head = kv_head * GROUP
        dk = gl.zeros([MINE, WIDTH], gl.float32, O_LAYOUT)
        dv = gl.zeros([MINE, WIDTH], gl.float32, O_LAYOUT)
        zero = gl.zeros([MINE, ROWS], gl.float32, S_LAYOUT)
        zero_q = gl.zeros([SIDE, SIDE], gl.float32, Q_LAYOUT)
        mbarrier.wait(k_full, turn & 1)
        if key < k_length:
            limits = (q_length, k_length, left, right)
            for _ in range(steps):
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
                k_cols = k_smem.index(only).slice(COLUMN, SIDE, dim=1)
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
                    ds = p * (y - lines_smem.index(LINES // ROWS + stage).load(COL)[None, :])
                else:
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
                # Two buffers: by the time one comes round, the other half has said, with the
                # other buffer, that it is done with this one.
                ds_now.slice(HALF * MINE, MINE).store(ds_tile)
                fence_async_shared()
                mbarrier.arrive(ds_full.index(step & 1), count=1)
                mbarrier.wait(ds_full.index(step & 1), (step >> 1) & 1)
                ds_t = ds_now.slice(ROW, SIDE, dim=1).permute((1, 0))
                dq = warpgroup_mma(ds_t, k_cols, zero_q, use_acc=False, is_async=True)
                dk = warpgroup_mma(gl.convert_layout(ds_tile, P_LAYOUT), q, dk, is_async=True)
                # dQ leaves for memory while dK is still being computed.
                dv, dq = warpgroup_mma_wait(num_outstanding=1, deps=(dv, dq))
                if alone:
                    row = q_tile * ROWS + ROW
                    to = [BOUND, q_begin + q_length, BOUND - q_length + row, head * WIDTH + COLUMN]
                    put_part(dq, scale, dq_mine, rows_desc, to, dtype)
                else:
                    add_part(dq, dq_mine, dq_desc, place)
                place, q_tile, head = next_queries(
                    place, q_tile, head, first, stop, HEADS, PARTS, GROUP
                )
                dk = warpgroup_mma_wait(num_outstanding=0, deps=(dk,))
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
        else:
            # No key of this half exists: its dS is 0, and only its half of dQ is left to do.
            for _ in range(steps):
                stage = step % STAGES
                ds_now = ds_smem.index(step & 1)
                k_cols = k_smem.index(step >> 30).slice(COLUMN, SIDE, dim=1)
                ds_now.slice(HALF * MINE, MINE).store(gl.zeros([MINE, ROWS], dtype, S_LAYOUT))
                fence_async_shared()
                mbarrier.arrive(ds_full.index(step & 1), count=1)
                # "Full" first, or the next load could come too early.
                mbarrier.wait(q_full.index(stage), (step // STAGES) & 1)
                mbarrier.wait(g_full.index(stage), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                mbarrier.wait(ds_full.index(step & 1), (step >> 1) & 1)
                ds_t = ds_now.slice(ROW, SIDE, dim=1).permute((1, 0))
                dq = warpgroup_mma(ds_t, k_cols, zero_q, use_acc=False, is_async=True)
                dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
                if alone:
                    row = q_tile * ROWS + ROW
                    to = [BOUND, q_begin + q_length, BOUND - q_length + row, head * WIDTH + COLUMN]
                    put_part(dq, scale, dq_mine, rows_desc, to, dtype)
                else:
                    add_part(dq, dq_mine, dq_desc, place)
                place, q_tile, head = next_queries(
                    place, q_tile, head, first, stop, HEADS, PARTS, GROUP
                )
                step += 1
        mbarrier.wait(v_full, turn & 1)
        mbarrier.arrive(kv_empty, count=1)
        OUT: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=128, element_bitwidth=16, rank=2
        )
        out = dq_mine._reinterpret(dtype, [SIDE * 2 // WIDTH, MINE, WIDTH], OUT).index(0)
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
    tma.store_wait(0)

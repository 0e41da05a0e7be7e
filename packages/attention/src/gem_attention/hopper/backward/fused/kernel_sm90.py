"""The backward of jagged attention on Hopper, in Gluon: one fused kernel.

One CTA per SM, persistent. An item is one tile of keys of one key head; two consumer warpgroups
hold dK and dV of half of its keys each in registers and loop over the query tiles that see it, for
every query head of the group::

    S = K Qᵀ    P = exp2(factor·S − lse)    dP = V dOᵀ    dS = P ∘ (dP − delta)
    dV += P dO     dK += dS Q     dQ += dSᵀ K

or, with activations, P = f(scale·S) and dS = f'(scale·S) ∘ dP.

dS of both halves meets in shared memory, and each warpgroup computes half of dQ's columns from the
whole of it. dQ is added to an fp32 buffer in global memory by TMA, in no fixed order, so its last
bit differs between runs. dK and dV have one owner and do not.

The buffer holds dQ in the order of the accumulator's registers (``gem_attention.hopper.gradients``
says which): 16-byte stores without bank conflicts, and one contiguous block a tile.
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

from gem_attention.hopper.backward.weights.device import activation_weights, softmax_weights
from gem_attention.hopper.device import (
    BOUND,
    LOG2_E,
    add_to_global,
    item_at,
    items_of,
    padded_row,
    queries_seeing,
    sequence_rows,
)


@gluon.jit
def _item(tiles, item, q_offsets, k_offsets, batch, q_tokens, k_tokens, KV_HEADS: gl.constexpr):
    """Return key head, sequence, tile, and begin and length of both sides."""
    entry = tiles + 2 * (item // KV_HEADS)
    sequence = gl.load(entry)
    tile = gl.load(entry + 1)
    q_begin, q_length = sequence_rows(q_offsets, sequence, batch, q_tokens, False)
    k_begin, k_length = sequence_rows(k_offsets, sequence, batch, k_tokens, True)
    return item % KV_HEADS, sequence, tile, q_begin, q_length, k_begin, k_length


@gluon.jit
def _produce(
    descs,
    smems,
    bars,
    lists,
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
    TILE_BYTES: gl.constexpr = ROWS * WIDTH * 2 + (ROWS * 4 if SOFTMAX else 0)
    q_desc, k_desc, v_desc, g_desc, lse_desc, delta_desc = descs
    q_smem, k_smem, v_smem, g_smem, lines_smem = smems
    k_full, v_full, kv_empty, q_full, g_full, empty = bars
    tiles, count, q_offsets, k_offsets, batch, q_tokens, k_tokens = lists
    dtype: gl.constexpr = q_smem.dtype
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    step = 0
    for turn in range(items_of(gl.load(count) * KV_HEADS, programs, program)):
        kv_head, sequence, tile, q_begin, q_length, k_begin, k_length = _item(
            tiles,
            item_at(turn, programs, program),
            q_offsets,
            k_offsets,
            batch,
            q_tokens,
            k_tokens,
            KV_HEADS,
        )
        padded = padded_row(q_begin, sequence)
        first, stop = queries_seeing(
            tile * KEYS, KEYS, q_length, k_length, left, right, ROWS, LEFT, RIGHT
        )
        k_place = [BOUND, k_begin + k_length, BOUND - k_length + tile * KEYS, kv_head * WIDTH]
        mbarrier.wait(kv_empty, (turn & 1) ^ 1)
        mbarrier.expect(k_full, KEYS * WIDTH * 2)
        k_block = k_smem.index(0)._reinterpret(dtype, [1, 1, KEYS, WIDTH], k_desc.layout)
        tma.async_copy_global_to_shared(k_desc, k_place, k_full, k_block)
        # V is needed after the first queries, and is asked for after them.
        if first == stop:
            mbarrier.expect(v_full, KEYS * WIDTH * 2)
            v_block = v_smem.index(0)._reinterpret(dtype, [1, 1, KEYS, WIDTH], v_desc.layout)
            tma.async_copy_global_to_shared(v_desc, k_place, v_full, v_block)
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
                    mbarrier.expect(v_full, KEYS * WIDTH * 2)
                    v_block = v_smem.index(0)._reinterpret(
                        dtype, [1, 1, KEYS, WIDTH], v_desc.layout
                    )
                    tma.async_copy_global_to_shared(v_desc, k_place, v_full, v_block)
                mbarrier.expect(g_full.index(stage), TILE_BYTES)
                if SOFTMAX:
                    line = lines_smem.index(4 + stage)._reinterpret(
                        gl.float32, [1, ROWS], delta_desc.layout
                    )
                    tma.async_copy_global_to_shared(
                        delta_desc, [head, row], g_full.index(stage), line
                    )
                block = g_smem.index(stage)._reinterpret(dtype, [1, 1, ROWS, WIDTH], g_desc.layout)
                tma.async_copy_global_to_shared(g_desc, q_place, g_full.index(stage), block)
                step += 1


@gluon.jit
def _to_registers_order(dq, ROWS: gl.constexpr, HALF_WIDTH: gl.constexpr):
    """Order a tile as its registers lie: four neighbours a thread, threads in turn."""
    parts = dq.reshape([4, 2, 8, HALF_WIDTH // 8, 4, 2])
    parts = parts.permute([0, 3, 2, 4, 1, 5])
    return parts.reshape([ROWS * HALF_WIDTH // 32, 32])


@gluon.jit
def _add_block(dq, dq_mine, dq_desc, row, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Add half a tile of dQ to its block in global memory, once the last addition has left."""
    tma.store_wait(0)
    dq_mine.store(_to_registers_order(dq, ROWS, COLS))
    fence_async_shared()
    add_to_global(dq_desc, [row, 0], dq_mine)


@gluon.jit
def _next_block(place, tile, head, first, stop, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Return block, tile and head of the next queries; after the last tile, of the next head."""
    place += HEADS * 2
    tile += 1
    if GROUP > 1:  # noqa: SIM102 - known when compiled; the other when it runs
        if tile == stop:
            tile = first
            head += 1
            place += 2 - (stop - first) * (HEADS * 2)
    return place, tile, head


# One function, because an accumulator in flight may not leave its loop.
@gluon.jit
def _consume(  # noqa: PLR0915
    descs,
    smems,
    bars,
    ds_smem,
    dq_smem,
    ds_full,
    lists,
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
    dq_desc, dk_desc, dv_desc = descs
    q_smem, k_smem, v_smem, g_smem, lines_smem = smems
    k_full, v_full, kv_empty, q_full, g_full, empty = bars
    tiles, count, q_offsets, k_offsets, batch, q_tokens, k_tokens = lists
    dtype: gl.constexpr = q_smem.dtype
    MINE: gl.constexpr = KEYS // 2
    COLS: gl.constexpr = WIDTH // 2
    BLOCK: gl.constexpr = ROWS * COLS // 32
    HEADS: gl.constexpr = KV_HEADS * GROUP
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    COL: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    factor = scale * LOG2_E
    dq_mine = dq_smem.index(HALF)
    step = 0
    for turn in range(items_of(gl.load(count) * KV_HEADS, programs, program)):
        kv_head, sequence, tile, q_begin, q_length, k_begin, k_length = _item(
            tiles,
            item_at(turn, programs, program),
            q_offsets,
            k_offsets,
            batch,
            q_tokens,
            k_tokens,
            KV_HEADS,
        )
        first, stop = queries_seeing(
            tile * KEYS, KEYS, q_length, k_length, left, right, ROWS, LEFT, RIGHT
        )
        key = tile * KEYS + HALF * MINE
        steps = (stop - first) * GROUP
        # Block of dQ: (tile of the padded rows, head, half).
        place = ((padded_row(q_begin, sequence) // ROWS + first) * (KV_HEADS * GROUP)) * 2 + HALF
        place += kv_head * (GROUP * 2)
        q_tile = first
        head = kv_head * GROUP
        dk = gl.zeros([MINE, WIDTH], gl.float32, O_LAYOUT)
        dv = gl.zeros([MINE, WIDTH], gl.float32, O_LAYOUT)
        zero = gl.zeros([MINE, ROWS], gl.float32, S_LAYOUT)
        zero_q = gl.zeros([ROWS, COLS], gl.float32, Q_LAYOUT)
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
                k_cols = k_smem.index(only).slice(HALF * COLS, COLS, dim=1)
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
                    ds = p * (y - lines_smem.index(4 + stage).load(COL)[None, :])
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
                ds_t = ds_now.permute((1, 0))
                dq = warpgroup_mma(ds_t, k_cols, zero_q, use_acc=False, is_async=True)
                dk = warpgroup_mma(gl.convert_layout(ds_tile, P_LAYOUT), q, dk, is_async=True)
                # dQ leaves for memory while dK is still being computed.
                dv, dq = warpgroup_mma_wait(num_outstanding=1, deps=(dv, dq))
                _add_block(dq, dq_mine, dq_desc, place * BLOCK, ROWS, COLS)
                place, q_tile, head = _next_block(place, q_tile, head, first, stop, HEADS, GROUP)
                dk = warpgroup_mma_wait(num_outstanding=0, deps=(dk,))
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
        else:
            # No key of this half exists: its dS is 0, and only its half of dQ is left to do.
            for _ in range(steps):
                stage = step % STAGES
                ds_now = ds_smem.index(step & 1)
                k_cols = k_smem.index(step >> 30).slice(HALF * COLS, COLS, dim=1)
                ds_now.slice(HALF * MINE, MINE).store(gl.zeros([MINE, ROWS], dtype, S_LAYOUT))
                fence_async_shared()
                mbarrier.arrive(ds_full.index(step & 1), count=1)
                # "Full" first, or the next load could come too early.
                mbarrier.wait(q_full.index(stage), (step // STAGES) & 1)
                mbarrier.wait(g_full.index(stage), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                mbarrier.wait(ds_full.index(step & 1), (step >> 1) & 1)
                ds_t = ds_now.permute((1, 0))
                dq = warpgroup_mma(ds_t, k_cols, zero_q, use_acc=False, is_async=True)
                dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
                _add_block(dq, dq_mine, dq_desc, place * BLOCK, ROWS, COLS)
                place, q_tile, head = _next_block(place, q_tile, head, first, stop, HEADS, GROUP)
                step += 1
        mbarrier.wait(v_full, turn & 1)
        mbarrier.arrive(kv_empty, count=1)
        OUT: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=128, element_bitwidth=16, rank=2
        )
        out = dq_mine._reinterpret(dtype, [MINE, WIDTH], OUT)
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


@gluon.jit(do_not_specialize=["batch", "q_tokens", "k_tokens", "left", "right"])
def backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    g_desc,
    lse_desc,
    delta_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    tiles,
    count,
    q_offsets,
    k_offsets,
    batch,
    q_tokens,
    k_tokens,
    left,
    right,
    scale,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    DTYPE: gl.constexpr,
    ACTIVATIONS: gl.constexpr,
):
    """Write dk and dv (S, G·D); add dq to its buffer of blocks."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, WIDTH], LAYOUT)
    g_smem = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, WIDTH], LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [1, KEYS, WIDTH], LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, KEYS, WIDTH], LAYOUT)
    ds_smem = gl.allocate_shared_memory(DTYPE, [2, KEYS, ROWS], LAYOUT)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS * WIDTH // 64, 32], WIDE)
    # TMA wants 128 bytes, which a flat layout alone does not get: lse in lines 0 to 3, then delta.
    lines_smem = gl.allocate_shared_memory(gl.float32, [2, 8, 32], WIDE)._reinterpret(
        gl.float32, [8, ROWS], FLAT
    )
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    bars = (k_full, v_full, kv_empty, q_full, g_full, empty)
    smems = (q_smem, k_smem, v_smem, g_smem, lines_smem)
    lists = (tiles, count, q_offsets, k_offsets, batch, q_tokens, k_tokens)
    outs = (dq_desc, dk_desc, dv_desc)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    outs,
                    smems,
                    bars,
                    ds_smem,
                    dq_smem,
                    ds_full,
                    lists,
                    left,
                    right,
                    scale,
                    0,
                    KV_HEADS,
                    GROUP,
                    ROWS,
                    KEYS,
                    WIDTH,
                    STAGES,
                    LEFT,
                    RIGHT,
                    ACTIVATIONS,
                ),
            ),
            (
                _consume,
                (
                    outs,
                    smems,
                    bars,
                    ds_smem,
                    dq_smem,
                    ds_full,
                    lists,
                    left,
                    right,
                    scale,
                    1,
                    KV_HEADS,
                    GROUP,
                    ROWS,
                    KEYS,
                    WIDTH,
                    STAGES,
                    LEFT,
                    RIGHT,
                    ACTIVATIONS,
                ),
            ),
            (
                _produce,
                (
                    (q_desc, k_desc, v_desc, g_desc, lse_desc, delta_desc),
                    smems,
                    bars,
                    lists,
                    left,
                    right,
                    KV_HEADS,
                    GROUP,
                    ROWS,
                    KEYS,
                    WIDTH,
                    STAGES,
                    LEFT,
                    RIGHT,
                    ACTIVATIONS == "softmax",
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )

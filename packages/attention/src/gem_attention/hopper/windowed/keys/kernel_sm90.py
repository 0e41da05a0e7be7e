"""dK and dV under a narrow window on Hopper, in Gluon: a tile of keys and the queries that see it.

One CTA per SM, persistent. An item is 128 keys of one key head; two consumer warpgroups hold dK
and dV of 64 of them each in registers and loop over the query tiles that see these, for every query
head of the group::

    S = K Qᵀ    P = exp2(factor·S − lse)    dP = V dOᵀ    dS = P ∘ (dP − delta)
    dV += P dO     dK += dS Q

The halves share the tiles of queries and nothing else. dK and dV leave through the memory of their
K and V, which is given back an item later.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gem_attention.hopper.backward.items.device import LINES
from gem_attention.hopper.backward.weights.device import softmax_weights
from gem_attention.hopper.device import (
    BOUND,
    LOG2_E,
    item_at,
    padded_row,
    queries_seeing,
    sequence_rows,
    tell,
    told,
    turns_of,
)
from gem_attention.hopper.forward.device import leave_rows, load_rows
from gem_attention.hopper.windowed.device import CONSUMERS, SLOTS, release, slot_of

# Numbers of an item that the consumers are told: tile, length of the queries, begin and length of
# the keys.
NUMBERS = gl.constexpr(4)


@gluon.jit
def _hand_back(bars, step, steps, STAGES: gl.constexpr):
    """Give query tiles back unread; "full" first, or their next load could come too early."""
    q_full, g_full, stage_empty = bars
    for _ in range(steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(q_full.index(stage), phase)
        mbarrier.wait(g_full.index(stage), phase)
        mbarrier.arrive(stage_empty.index(stage), count=1)
        step += 1
    return step


# One function, because an accumulator in flight may not leave its loop.
@gluon.jit
def _consume(  # noqa: PLR0915
    given,
    PART: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    """Make dK and dV of one part of each key tile of this program."""
    dk_desc, dv_desc, smems, bars, lists, window, scale = given
    k_smem, v_smem, q_smem, g_smem, lines_smem, numbers = smems
    k_full, v_full, empty, q_full, g_full, stage_empty = bars
    left, right = window
    queries = (q_full, g_full, stage_empty)
    dtype: gl.constexpr = q_smem.dtype
    KEYS: gl.constexpr = k_smem.shape[1]
    STAGES: gl.constexpr = q_smem.shape[0]
    ROWS: gl.constexpr = q_smem.shape[1]
    WIDTH: gl.constexpr = q_smem.shape[2]
    ALL_KEYS: gl.constexpr = CONSUMERS * KEYS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    COL: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    factor = scale * LOG2_E
    step = 0
    for turn in range(turns_of(lists, KV_HEADS)):
        slot = slot_of(turn, PART)
        mbarrier.wait(k_full.index(slot), (turn // SLOTS) & 1)
        tile = told(numbers, slot * NUMBERS)
        q_length = told(numbers, slot * NUMBERS + 1)
        k_begin = told(numbers, slot * NUMBERS + 2)
        k_length = told(numbers, slot * NUMBERS + 3)
        kv_head = item_at(turn, gl.num_programs(0), gl.program_id(0)) % KV_HEADS
        key = tile * ALL_KEYS + PART * KEYS
        # What the producer loads for both parts, and what this part needs of it.
        low, high = queries_seeing(
            tile * ALL_KEYS, ALL_KEYS, q_length, k_length, left, right, ROWS, LEFT, RIGHT
        )
        first, stop = queries_seeing(key, KEYS, q_length, k_length, left, right, ROWS, LEFT, RIGHT)
        k_mine = k_smem.index(slot)
        v_mine = v_smem.index(slot)
        mbarrier.wait(v_full.index(slot), (turn // SLOTS) & 1)
        if (key < k_length) & (first < stop):
            limits = (q_length, k_length, left, right)
            dk = gl.zeros([KEYS, WIDTH], gl.float32, O_LAYOUT)
            dv = gl.zeros([KEYS, WIDTH], gl.float32, O_LAYOUT)
            zero = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)
            for member in range(GROUP):
                step = _hand_back(queries, step, first - low, STAGES)
                for q_tile in range(first, stop):
                    stage = step % STAGES
                    phase = (step // STAGES) & 1
                    q = q_smem.index(stage)
                    g = g_smem.index(stage)
                    # The slot, but not so that the compiler sees that it stays: it would keep the
                    # address of each part of K and V in registers of its own.
                    now = slot + (step >> 30)
                    k_now = k_smem.index(now)
                    v_now = v_smem.index(now)
                    mbarrier.wait(q_full.index(stage), phase)
                    x = warpgroup_mma(k_now, q.permute((1, 0)), zero, use_acc=False, is_async=True)
                    mbarrier.wait(g_full.index(stage), phase)
                    y = warpgroup_mma(v_now, g.permute((1, 0)), zero, use_acc=False, is_async=True)
                    x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
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
                    y, p = warpgroup_mma_wait(num_outstanding=0, deps=(y, p))
                    dv = warpgroup_mma(p_tile, g, dv, is_async=True)
                    ds = p * (y - lines_smem.index(LINES // ROWS + stage).load(COL)[None, :])
                    ds_tile = gl.convert_layout(ds.to(dtype), P_LAYOUT)
                    dk = warpgroup_mma(ds_tile, q, dk, is_async=True)
                    if (member == 0) & (q_tile == first):
                        release(empty, turn, PART)
                    dv, dk = warpgroup_mma_wait(num_outstanding=0, deps=(dv, dk))
                    mbarrier.arrive(stage_empty.index(stage), count=1)
                    step += 1
                step = _hand_back(queries, step, high - stop, STAGES)
            leave_rows(dv_desc, v_mine, dv.to(dtype), k_begin, k_length, key, kv_head * WIDTH)
            out = (dk * scale).to(dtype)
            leave_rows(dk_desc, k_mine, out, k_begin, k_length, key, kv_head * WIDTH)
        else:
            release(empty, turn, PART)
            step = _hand_back(queries, step, (high - low) * GROUP, STAGES)
            if key < k_length:
                none = gl.zeros([KEYS, WIDTH], dtype, O_LAYOUT)
                leave_rows(dv_desc, v_mine, none, k_begin, k_length, key, kv_head * WIDTH)
                leave_rows(dk_desc, k_mine, none, k_begin, k_length, key, kv_head * WIDTH)
    tma.store_wait(0)


@gluon.jit
def _load_queries(descs, smem, lines, full, stage, place, line_place):
    """Load a tile of queries, or of their gradients, with its line of lse or delta."""
    desc, line_desc = descs
    ROWS: gl.constexpr = smem.shape[1]
    WIDTH: gl.constexpr = smem.shape[2]
    mbarrier.expect(full.index(stage), ROWS * WIDTH * 2 + ROWS * 4)
    tma.async_copy_global_to_shared(
        line_desc,
        line_place,
        full.index(stage),
        lines._reinterpret(gl.float32, [1, ROWS], line_desc.layout),
    )
    tma.async_copy_global_to_shared(
        desc,
        place,
        full.index(stage),
        smem.index(stage)._reinterpret(smem.dtype, [1, 1, ROWS, WIDTH], desc.layout),
    )


@gluon.jit
def _produce(
    given,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    """Load the tiles of K and V, and the query tiles that see them."""
    descs, smems, bars, lists, window = given
    k_desc, v_desc, q_desc, g_desc, lse_desc, delta_desc = descs
    k_smem, v_smem, q_smem, g_smem, lines_smem, numbers = smems
    k_full, v_full, empty, q_full, g_full, stage_empty = bars
    tiles, _, q_offsets, k_offsets, batch, q_tokens, k_tokens = lists
    left, right = window
    KEYS: gl.constexpr = k_smem.shape[1]
    STAGES: gl.constexpr = q_smem.shape[0]
    ROWS: gl.constexpr = q_smem.shape[1]
    WIDTH: gl.constexpr = q_smem.shape[2]
    ALL_KEYS: gl.constexpr = CONSUMERS * KEYS
    step = 0
    for turn in range(turns_of(lists, KV_HEADS)):
        item = item_at(turn, gl.num_programs(0), gl.program_id(0))
        sequence = gl.load(tiles + 2 * (item // KV_HEADS))
        tile = gl.load(tiles + 2 * (item // KV_HEADS) + 1)
        kv_head = item % KV_HEADS
        q_begin, q_length = sequence_rows(q_offsets, sequence, batch, q_tokens, False)
        k_begin, k_length = sequence_rows(k_offsets, sequence, batch, k_tokens, True)
        padded = padded_row(q_begin, sequence, ROWS)
        for part in gl.static_range(CONSUMERS):
            slot = slot_of(turn, part)
            key = tile * ALL_KEYS + part * KEYS
            col = kv_head * WIDTH
            mbarrier.wait(empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
            tell(numbers, slot * NUMBERS, (tile, q_length, k_begin, k_length), NUMBERS)
            load_rows(k_desc, k_smem.index(slot), k_full.index(slot), k_begin, k_length, key, col)
            load_rows(v_desc, v_smem.index(slot), v_full.index(slot), k_begin, k_length, key, col)
        first, stop = queries_seeing(
            tile * ALL_KEYS, ALL_KEYS, q_length, k_length, left, right, ROWS, LEFT, RIGHT
        )
        for member in range(GROUP):
            head = kv_head * GROUP + member
            for q_tile in range(first, stop):
                stage = step % STAGES
                row = q_tile * ROWS
                place = [BOUND, q_begin + q_length, BOUND - q_length + row, head * WIDTH]
                line_place = [head, padded + row]
                mbarrier.wait(stage_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                _load_queries(
                    (q_desc, lse_desc),
                    q_smem,
                    lines_smem.index(stage),
                    q_full,
                    stage,
                    place,
                    line_place,
                )
                _load_queries(
                    (g_desc, delta_desc),
                    g_smem,
                    lines_smem.index(LINES // ROWS + stage),
                    g_full,
                    stage,
                    place,
                    line_place,
                )
                step += 1


@gluon.jit(do_not_specialize=["batch", "q_tokens", "k_tokens", "left", "right"])
def grad_keys_kernel(
    q_desc,
    g_desc,
    k_desc,
    v_desc,
    lse_desc,
    delta_desc,
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
):
    """Write dk and dv (S, G·D)."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_smem = gl.allocate_shared_memory(DTYPE, [SLOTS * CONSUMERS, KEYS, WIDTH], LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [SLOTS * CONSUMERS, KEYS, WIDTH], LAYOUT)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, WIDTH], LAYOUT)
    g_smem = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, WIDTH], LAYOUT)
    # TMA wants 128 bytes, which a flat layout alone does not get. The first half is for lse.
    lines_smem = gl.allocate_shared_memory(gl.float32, [2, 8, 32], WIDE)._reinterpret(
        gl.float32, [2 * LINES // ROWS, ROWS], FLAT
    )
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS * CONSUMERS * NUMBERS, 1], FLAT)
    k_full = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(SLOTS * CONSUMERS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(stage_empty.index(i), count=CONSUMERS)
    bars = (k_full, v_full, empty, q_full, g_full, stage_empty)
    smems = (k_smem, v_smem, q_smem, g_smem, lines_smem, numbers)
    lists = (tiles, count, q_offsets, k_offsets, batch, q_tokens, k_tokens)
    window = (left, right)
    mine = (dk_desc, dv_desc, smems, bars, lists, window, scale)
    loaded = ((k_desc, v_desc, q_desc, g_desc, lse_desc, delta_desc), smems, bars, lists, window)
    gl.warp_specialize(
        [
            (_consume, (mine, 0, KV_HEADS, GROUP, LEFT, RIGHT)),
            (_consume, (mine, 1, KV_HEADS, GROUP, LEFT, RIGHT)),
            (_produce, (loaded, KV_HEADS, GROUP, LEFT, RIGHT)),
        ],
        [4, 1],
        [240, 24],
    )

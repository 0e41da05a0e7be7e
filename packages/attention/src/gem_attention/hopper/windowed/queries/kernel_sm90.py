"""dQ under a narrow window on Hopper, in Gluon: a tile of queries and all keys that it sees.

One CTA per SM, persistent. An item is 128 queries of one head; two consumer warpgroups hold dQ of
64 of them each in registers and loop over the key tiles that these see::

    S = Q Kᵀ    P = exp2(factor·S − lse)    dP = dO Vᵀ    dS = P ∘ (dP − delta)    dQ += dS K

S and dP of a key tile are under way together with dQ of the tile before. dQ leaves through the
memory of its Q, which is given back an item later.

delta = rowsum(dO ∘ out) − dlse is made here as well, and left with the logsumexp for the kernel of
the keys. The output comes through the memory of the key tiles, before the first of them: that of
one consumer as a tile of K, that of the other as one of V.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gem_attention.hopper.backward.weights.device import on_edge
from gem_attention.hopper.device import (
    LOG2_E,
    item_at,
    keys_seen,
    padded_row,
    sequence_rows,
    tell,
    told,
    turns_of,
)
from gem_attention.hopper.forward.device import load_rows, store_rows
from gem_attention.hopper.forward.streaming.device import hand_back
from gem_attention.hopper.forward.weights.device import masked
from gem_attention.hopper.windowed.device import CONSUMERS, SLOTS, release, slot_of

# Numbers of an item that the consumers are told: first padded row and tile, begin and length of the
# queries, length of the keys.
NUMBERS = gl.constexpr(5)


@gluon.jit
def _weights(
    x_tk, key, limits, lse_t, factor, LEFT: gl.constexpr, RIGHT: gl.constexpr, LAYOUT: gl.constexpr
):
    """Turn scores into softmax weights; mask only tiles on an edge."""
    ROWS: gl.constexpr = x_tk.shape[0]
    KEYS: gl.constexpr = x_tk.shape[1]
    row, q_length, k_length, left, right = limits
    if on_edge(key, row, (q_length, k_length, left, right), KEYS, ROWS, LEFT, RIGHT):
        x_tk = masked(x_tk, key, limits, KEYS, ROWS, LEFT, RIGHT, "softmax", LAYOUT)
    return gl.exp2(x_tk * factor - lse_t[:, None])


# One function, because an accumulator in flight may not leave its loop.
@gluon.jit
def _sum_over_keys(
    tiles_of_queries,
    kv,
    step,
    limits,
    lse_t,
    delta_t,
    first,
    stop,
    empty,
    turn,
    factor,
    PART: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    """Return dQ of 64 queries without its scale, from key tiles [first, stop)."""
    q_tile, g_tile = tiles_of_queries
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = kv
    dtype: gl.constexpr = k_smem.dtype
    ROWS: gl.constexpr = q_tile.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    WIDTH: gl.constexpr = k_smem.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    dq = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
    zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    stage = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    k_t = k_smem.index(stage).permute((1, 0))
    x = warpgroup_mma(q_tile, k_t, zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    v_t = v_smem.index(stage).permute((1, 0))
    y = warpgroup_mma(g_tile, v_t, zero, use_acc=False, is_async=True)
    release(empty, turn, PART)
    x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
    p = _weights(x, first * KEYS, limits, lse_t, factor, LEFT, RIGHT, S_LAYOUT)
    y = warpgroup_mma_wait(num_outstanding=0, deps=(y,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    ds = p * (y - delta_t[:, None])
    ds_tile = gl.convert_layout(ds.to(dtype), P_LAYOUT)
    for tile in range(first + 1, stop):
        stage = step % STAGES
        after = (step + 1) % STAGES
        phase = ((step + 1) // STAGES) & 1
        mbarrier.wait(k_full.index(after), phase)
        k_t = k_smem.index(after).permute((1, 0))
        x = warpgroup_mma(q_tile, k_t, zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(after), phase)
        v_t = v_smem.index(after).permute((1, 0))
        y = warpgroup_mma(g_tile, v_t, zero, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds_tile, k_smem.index(stage), dq, is_async=True)
        x = warpgroup_mma_wait(num_outstanding=2, deps=(x,))
        p = _weights(x, tile * KEYS, limits, lse_t, factor, LEFT, RIGHT, S_LAYOUT)
        y = warpgroup_mma_wait(num_outstanding=1, deps=(y,))
        mbarrier.arrive(v_empty.index(after), count=1)
        ds = p * (y - delta_t[:, None])
        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        ds_tile = gl.convert_layout(ds.to(dtype), P_LAYOUT)
        step += 1
    stage = step % STAGES
    dq = warpgroup_mma(ds_tile, k_smem.index(stage), dq, is_async=True)
    dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    return step + 1, dq


@gluon.jit
def _lines_of(
    out_tile,
    g_tile,
    lse,
    grad_lse,
    places,
    there,
    HAS_GRAD_LSE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Return lse in base 2 and delta = rowsum(dO ∘ out) − dlse of the rows of a tile.

    Rows that see no key, and padding, get +inf and 0: their softmax weights are 0.
    """
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, g_tile.shape[1], 16])
    lse_t = gl.load(lse + places, mask=there, other=float("-inf"))
    both = out_tile.load(O_LAYOUT).to(gl.float32) * g_tile.load(O_LAYOUT).to(gl.float32)
    delta_t = gl.convert_layout(gl.sum(both, 1), LAYOUT)
    if HAS_GRAD_LSE:
        delta_t -= gl.load(grad_lse + places, mask=there, other=0.0)
    seeing = lse_t != float("-inf")
    return gl.where(seeing, lse_t * LOG2_E, float("inf")), gl.where(seeing, delta_t, 0.0)


@gluon.jit
def _consume(
    given,
    PART: gl.constexpr,
    HEADS: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    HAS_GRAD_LSE: gl.constexpr,
):
    """Make dQ of one part of each query tile of this program."""
    dq_desc, lse, grad_lse, lines, smems, bars, lists, window, scale = given
    lse_lines, delta_lines, padded_tokens = lines
    q_smem, g_smem, k_smem, v_smem, numbers = smems
    q_full, g_full, empty, k_full, k_empty, v_full, v_empty = bars
    left, right = window
    kv = (k_smem, v_smem, k_full, k_empty, v_full, v_empty)
    dtype: gl.constexpr = q_smem.dtype
    ROWS: gl.constexpr = q_smem.shape[1]
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    WIDTH: gl.constexpr = k_smem.shape[2]
    ALL_ROWS: gl.constexpr = CONSUMERS * ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    step = 0
    for turn in range(turns_of(lists, HEADS)):
        slot = slot_of(turn, PART)
        mbarrier.wait(q_full.index(slot), (turn // SLOTS) & 1)
        padded_first = told(numbers, slot * NUMBERS)
        tile = told(numbers, slot * NUMBERS + 1)
        q_begin = told(numbers, slot * NUMBERS + 2)
        q_length = told(numbers, slot * NUMBERS + 3)
        k_length = told(numbers, slot * NUMBERS + 4)
        head = item_at(turn, gl.num_programs(0), gl.program_id(0)) % HEADS
        row = tile * ALL_ROWS + PART * ROWS
        # What the producer loads for both parts, and what this part needs of it.
        low, high = keys_seen(
            tile * ALL_ROWS, ALL_ROWS, q_length, k_length, left, right, KEYS, LEFT, RIGHT
        )
        first, stop = keys_seen(row, ROWS, q_length, k_length, left, right, KEYS, LEFT, RIGHT)
        q_tile = q_smem.index(slot)
        rows = row + gl.arange(0, ROWS, layout=S_ROWS)
        at = head.to(gl.int64) * padded_tokens + padded_first + rows
        if (row < q_length) & (first < stop):
            mbarrier.wait(g_full.index(slot), (turn // SLOTS) & 1)
            stage = step % STAGES
            out_tile = k_smem.index(stage) if PART == 0 else v_smem.index(stage)
            out_full = k_full.index(stage) if PART == 0 else v_full.index(stage)
            mbarrier.wait(out_full, (step // STAGES) & 1)
            places = (q_begin + rows).to(gl.int64) * HEADS + head
            lse_t, delta_t = _lines_of(
                out_tile,
                g_smem.index(slot),
                lse,
                grad_lse,
                places,
                rows < q_length,
                HAS_GRAD_LSE,
                S_ROWS,
            )
            gl.store(lse_lines + at, lse_t)
            gl.store(delta_lines + at, delta_t)
            for _ in range(first - low + 1):
                step = hand_back(kv, step, STAGES)
            step, dq = _sum_over_keys(
                (q_tile, g_smem.index(slot)),
                kv,
                step,
                (row, q_length, k_length, left, right),
                lse_t,
                delta_t,
                first,
                stop,
                empty,
                turn,
                scale * LOG2_E,
                PART,
                LEFT,
                RIGHT,
            )
            for _ in range(high - stop):
                step = hand_back(kv, step, STAGES)
            out = (dq * scale).to(dtype)
            store_rows(dq_desc, q_tile, out, q_begin, q_length, row, head * WIDTH)
        else:
            mbarrier.wait(g_full.index(slot), (turn // SLOTS) & 1)
            release(empty, turn, PART)
            for _ in range(high - low + 1):
                step = hand_back(kv, step, STAGES)
            if row < q_length:
                gl.store(lse_lines + at, gl.full([ROWS], float("inf"), gl.float32, S_ROWS))
                gl.store(delta_lines + at, gl.zeros([ROWS], gl.float32, S_ROWS))
                out = gl.zeros([ROWS, WIDTH], dtype, O_LAYOUT)
                store_rows(dq_desc, q_tile, out, q_begin, q_length, row, head * WIDTH)
    tma.store_wait(0)


@gluon.jit
def _produce(
    given, HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr
):
    """Load the tiles of Q and dO, and the key tiles that they see."""
    descs, smems, bars, lists, window = given
    q_desc, g_desc, k_desc, v_desc, out_desc = descs
    q_smem, g_smem, k_smem, v_smem, numbers = smems
    q_full, g_full, empty, k_full, k_empty, v_full, v_empty = bars
    tiles, _, q_offsets, k_offsets, batch, q_tokens, k_tokens = lists
    left, right = window
    ROWS: gl.constexpr = q_smem.shape[1]
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    WIDTH: gl.constexpr = k_smem.shape[2]
    ALL_ROWS: gl.constexpr = CONSUMERS * ROWS
    step = 0
    for turn in range(turns_of(lists, HEADS)):
        item = item_at(turn, gl.num_programs(0), gl.program_id(0))
        sequence = gl.load(tiles + 2 * (item // HEADS))
        tile = gl.load(tiles + 2 * (item // HEADS) + 1)
        head = item % HEADS
        q_begin, q_length = sequence_rows(q_offsets, sequence, batch, q_tokens, True)
        k_begin, k_length = sequence_rows(k_offsets, sequence, batch, k_tokens, False)
        k_col = (head // GROUP) * WIDTH
        for part in gl.static_range(CONSUMERS):
            slot = slot_of(turn, part)
            row = tile * ALL_ROWS + part * ROWS
            mbarrier.wait(empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
            known = (padded_row(q_begin, sequence, ROWS), tile, q_begin, q_length, k_length)
            tell(numbers, slot * NUMBERS, known, NUMBERS)
            load_rows(
                q_desc,
                q_smem.index(slot),
                q_full.index(slot),
                q_begin,
                q_length,
                row,
                head * WIDTH,
            )
            load_rows(
                g_desc,
                g_smem.index(slot),
                g_full.index(slot),
                q_begin,
                q_length,
                row,
                head * WIDTH,
            )
        first, stop = keys_seen(
            tile * ALL_ROWS, ALL_ROWS, q_length, k_length, left, right, KEYS, LEFT, RIGHT
        )
        row = tile * ALL_ROWS
        stage = step % STAGES
        phase = ((step // STAGES) & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), phase)
        o_col = head * WIDTH
        load_rows(out_desc, k_smem.index(stage), k_full.index(stage), q_begin, q_length, row, o_col)
        row += ROWS
        mbarrier.wait(v_empty.index(stage), phase)
        load_rows(out_desc, v_smem.index(stage), v_full.index(stage), q_begin, q_length, row, o_col)
        step += 1
        for key_tile in range(first, stop):
            stage = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            key = key_tile * KEYS
            mbarrier.wait(k_empty.index(stage), phase)
            load_rows(
                k_desc, k_smem.index(stage), k_full.index(stage), k_begin, k_length, key, k_col
            )
            mbarrier.wait(v_empty.index(stage), phase)
            load_rows(
                v_desc, v_smem.index(stage), v_full.index(stage), k_begin, k_length, key, k_col
            )
            step += 1


@gluon.jit(do_not_specialize=["batch", "q_tokens", "k_tokens", "padded_tokens", "left", "right"])
def grad_queries_kernel(
    q_desc,
    g_desc,
    k_desc,
    v_desc,
    out_desc,
    dq_desc,
    lse,
    grad_lse,
    lse_lines,
    delta_lines,
    tiles,
    count,
    q_offsets,
    k_offsets,
    batch,
    q_tokens,
    k_tokens,
    padded_tokens,
    left,
    right,
    scale,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    DTYPE: gl.constexpr,
    HAS_GRAD_LSE: gl.constexpr,
):
    """Write dq (T, H·D); and lse (base 2) and delta, both (H, padded rows), for the other kernel.

    Padding, and rows that see no key, get delta 0 and lse +inf: their softmax weights are 0.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(DTYPE, [SLOTS * CONSUMERS, ROWS, WIDTH], LAYOUT)
    g_smem = gl.allocate_shared_memory(DTYPE, [SLOTS * CONSUMERS, ROWS, WIDTH], LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, WIDTH], LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, WIDTH], LAYOUT)
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS * CONSUMERS * NUMBERS, 1], FLAT)
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], BARRIER)
    g_full = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(SLOTS * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    bars = (q_full, g_full, empty, k_full, k_empty, v_full, v_empty)
    smems = (q_smem, g_smem, k_smem, v_smem, numbers)
    lists = (tiles, count, q_offsets, k_offsets, batch, q_tokens, k_tokens)
    window = (left, right)
    lines = (lse_lines, delta_lines, padded_tokens)
    mine = (dq_desc, lse, grad_lse, lines, smems, bars, lists, window, scale)
    loaded = ((q_desc, g_desc, k_desc, v_desc, out_desc), smems, bars, lists, window)
    gl.warp_specialize(
        [
            (_consume, (mine, 0, HEADS, LEFT, RIGHT, HAS_GRAD_LSE)),
            (_consume, (mine, 1, HEADS, LEFT, RIGHT, HAS_GRAD_LSE)),
            (_produce, (loaded, HEADS, GROUP, LEFT, RIGHT)),
        ],
        [4, 1],
        [240, 24],
    )

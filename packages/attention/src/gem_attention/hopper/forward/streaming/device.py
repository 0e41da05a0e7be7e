"""The two roles of the streaming forward: the producer's loads, and 64 queries of each item.

A consumer whose rows do not exist, or see no key, hands the tiles back unread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gem_attention.hopper.device import LN_2, item_at, keys_seen, tell, told, turns_of
from gem_attention.hopper.forward.device import NUMBERS, item_of, load_rows, store_rows
from gem_attention.hopper.forward.weights.device import (
    first_weights,
    folds,
    masked,
    next_weights,
    scaled_sum,
)


@gluon.jit
def take_tiles(
    q_tile,
    kv,
    state,
    limits,
    tile,
    tiles,
    zero,
    scale,
    STAGES: gl.constexpr,
    EDGE: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
):
    """Take key tiles down from ``tile``: S of each, P·V of the one before, weights in between."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = kv
    step, acc, p_tile, peak, total = state
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = zero.shape[0]
    KEYS: gl.constexpr = zero.shape[1]
    FOLD: gl.constexpr = folds(v_smem.dtype, LEFT, RIGHT)
    for back in range(tiles):
        stage = step % STAGES
        after = (step + 1) % STAGES
        mbarrier.wait(k_full.index(after), ((step + 1) // STAGES) & 1)
        k_t = k_smem.index(after).permute((1, 0))
        x = warpgroup_mma(q_tile, k_t, zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        acc = warpgroup_mma(p_tile, v_smem.index(stage), acc, is_async=True)
        x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
        mbarrier.arrive(k_empty.index(after), count=1)
        if EDGE:
            key = (tile - back) * KEYS
            x = masked(x, key, limits, KEYS, ROWS, LEFT, RIGHT, ACTIVATION, S_LAYOUT)
        p, peak, total, shrink = next_weights(x, peak, total, scale, EDGE, ACTIVATION, FOLD)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        if ACTIVATION == "softmax":
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p_tile = gl.convert_layout(p.to(v_smem.dtype), P_LAYOUT)
        step += 1
    return step, acc, p_tile, peak, total


# One function, because an accumulator in flight may not leave its loop.
@gluon.jit
def attend(
    q_tile,
    q_empty,
    kv,
    step,
    limits,
    low,
    high,
    first,
    stop,
    scale,
    STAGES: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    EVEN: gl.constexpr,
):
    """Attend from 64 rows to key tiles [first, stop) of the loaded [low, high)."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = kv
    row, q_length, k_length, left, right = limits
    ROWS: gl.constexpr = q_tile.shape[0]
    WINDOW: gl.constexpr = LEFT or RIGHT
    FOLD: gl.constexpr = folds(v_smem.dtype, LEFT, RIGHT)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    acc = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
    zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    if WINDOW:
        for _ in range(high - stop):
            step = hand_back(kv, step, STAGES)
    stage = step % STAGES
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    k_t = k_smem.index(stage).permute((1, 0))
    x = warpgroup_mma(q_tile, k_t, zero, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(num_outstanding=0, deps=(x,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    key = (stop - 1) * KEYS
    if EVEN:
        if key + KEYS > k_length:
            x = masked(x, key, limits, KEYS, ROWS, LEFT, RIGHT, ACTIVATION, S_LAYOUT)
    else:
        x = masked(x, key, limits, KEYS, ROWS, LEFT, RIGHT, ACTIVATION, S_LAYOUT)
    p, peak, total = first_weights(x, scale, WINDOW, ACTIVATION, FOLD)
    p_tile = gl.convert_layout(p.to(v_smem.dtype), P_LAYOUT)
    state = (step, acc, p_tile, peak, total)
    # Key tiles below `clear` lie wholly left of the window's right edge, those from `bare` on
    # wholly right of its left edge.
    clear = stop - 1
    bare = first
    if RIGHT:
        edge = gl.maximum(row + k_length - q_length + right + 1, 0) // KEYS
        clear = gl.maximum(gl.minimum(clear, edge), first)
    if LEFT:
        edge = gl.maximum(row + ROWS - 1 + k_length - q_length - left + KEYS - 1, 0) // KEYS
        bare = gl.minimum(gl.maximum(first, edge), clear)
    if RIGHT:
        state = take_tiles(
            q_tile,
            kv,
            state,
            limits,
            stop - 2,
            stop - 1 - clear,
            zero,
            scale,
            STAGES,
            True,
            LEFT,
            RIGHT,
            ACTIVATION,
            S_LAYOUT,
            O_LAYOUT,
        )
    state = take_tiles(
        q_tile,
        kv,
        state,
        limits,
        clear - 1,
        clear - bare,
        zero,
        scale,
        STAGES,
        False,
        LEFT,
        RIGHT,
        ACTIVATION,
        S_LAYOUT,
        O_LAYOUT,
    )
    if LEFT:
        state = take_tiles(
            q_tile,
            kv,
            state,
            limits,
            bare - 1,
            bare - first,
            zero,
            scale,
            STAGES,
            True,
            LEFT,
            RIGHT,
            ACTIVATION,
            S_LAYOUT,
            O_LAYOUT,
        )
    step, acc, p_tile, peak, total = state
    mbarrier.arrive(q_empty, count=1)
    stage = step % STAGES
    mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
    acc = warpgroup_mma(p_tile, v_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    step += 1
    if WINDOW:
        for _ in range(first - low):
            step = hand_back(kv, step, STAGES)
    if ACTIVATION == "softmax":
        # A row without keys: 0 and -inf; a NaN stays one.
        share = gl.where(total == 0.0, 0.0, 1.0 / total)
        acc = acc * gl.convert_layout(share, gl.SliceLayout(1, O_LAYOUT))[:, None]
        total = (peak + gl.log2(total)) * LN_2
    else:
        acc = scaled_sum(acc, scale, ACTIVATION, FOLD)
    return step, acc, total


@gluon.jit
def hand_back(kv, step, STAGES: gl.constexpr):
    """Give a key tile back unread; "full" first, or its next load could come too early."""
    _, _, k_full, k_empty, v_full, v_empty = kv
    stage = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.wait(v_full.index(stage), phase)
    mbarrier.arrive(v_empty.index(stage), count=1)
    return step + 1


@gluon.jit
def produce(
    given,
    CONSUMERS: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SHARED: gl.constexpr,
):
    """Load the query tiles, and the key tiles that each sees from the last to the first."""
    descs, smems, bars, lists, window = given
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem, _, numbers = smems
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    left, right = window
    SLOTS: gl.constexpr = q_smem.shape[0] // CONSUMERS
    ROWS: gl.constexpr = q_smem.shape[1]
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    WIDTH: gl.constexpr = k_smem.shape[2]
    ALL_ROWS: gl.constexpr = CONSUMERS * ROWS
    step = 0
    for turn in range(turns_of(lists, HEADS)):
        head, tile, q_begin, q_length, k_begin, k_length = item_of(turn, lists, HEADS)
        row = tile * ALL_ROWS
        k_col = (head // GROUP) * WIDTH
        for part in gl.static_range(CONSUMERS):
            slot = (turn % SLOTS) * CONSUMERS + part
            mbarrier.wait(q_empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
            tell(numbers, slot * NUMBERS, (tile, q_begin, q_length, k_length), NUMBERS)
            load_rows(
                q_desc,
                q_smem.index(slot),
                q_full.index(slot),
                0 if SHARED else q_begin,
                q_length,
                row + part * ROWS,
                head * WIDTH,
            )
        first, stop = keys_seen(row, ALL_ROWS, q_length, k_length, left, right, KEYS, LEFT, RIGHT)
        for back in range(stop - first):
            stage = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            key = (stop - 1 - back) * KEYS
            mbarrier.wait(k_empty.index(stage), phase)
            load_rows(
                k_desc, k_smem.index(stage), k_full.index(stage), k_begin, k_length, key, k_col
            )
            mbarrier.wait(v_empty.index(stage), phase)
            load_rows(
                v_desc, v_smem.index(stage), v_full.index(stage), k_begin, k_length, key, k_col
            )
            step += 1


@gluon.jit
def consume(
    given,
    PART: gl.constexpr,
    CONSUMERS: gl.constexpr,
    HEADS: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    EVEN: gl.constexpr,
):
    """Attend from one part of each query tile of this program."""
    o_desc, lse, smems, bars, lists, window, scale = given
    q_smem, k_smem, v_smem, o_smem, numbers = smems
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    left, right = window
    kv = (k_smem, v_smem, k_full, k_empty, v_full, v_empty)
    SLOTS: gl.constexpr = q_smem.shape[0] // CONSUMERS
    ROWS: gl.constexpr = q_smem.shape[1]
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    WIDTH: gl.constexpr = k_smem.shape[2]
    ALL_ROWS: gl.constexpr = CONSUMERS * ROWS
    WINDOW: gl.constexpr = LEFT or RIGHT
    SOFTMAX: gl.constexpr = ACTIVATION == "softmax"
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    o_tile = o_smem.index(PART)
    dtype: gl.constexpr = q_smem.dtype
    step = 0
    for turn in range(turns_of(lists, HEADS)):
        slot = (turn % SLOTS) * CONSUMERS + PART
        mbarrier.wait(q_full.index(slot), (turn // SLOTS) & 1)
        tile = told(numbers, slot * NUMBERS)
        q_begin = told(numbers, slot * NUMBERS + 1)
        q_length = told(numbers, slot * NUMBERS + 2)
        k_length = told(numbers, slot * NUMBERS + 3)
        head = item_at(turn, gl.num_programs(0), gl.program_id(0)) % HEADS
        row = tile * ALL_ROWS + PART * ROWS
        # What the producer loads for all parts, and what this part needs of it.
        low, high = keys_seen(
            tile * ALL_ROWS, ALL_ROWS, q_length, k_length, left, right, KEYS, LEFT, RIGHT
        )
        first, stop = low, high
        if WINDOW:
            first, stop = keys_seen(row, ROWS, q_length, k_length, left, right, KEYS, LEFT, RIGHT)
        limits = (row, q_length, k_length, left, right)
        rows = row + gl.arange(0, ROWS, layout=S_ROWS)
        lse_rows = lse + (q_begin + rows).to(gl.int64) * HEADS + head
        there = rows < q_length
        q_tile = q_smem.index(slot)
        if (row < q_length) & (first < stop):
            step, acc, row_lse = attend(
                q_tile,
                q_empty.index(slot),
                kv,
                step,
                limits,
                low,
                high,
                first,
                stop,
                scale,
                STAGES,
                KEYS,
                WIDTH,
                LEFT,
                RIGHT,
                ACTIVATION,
                EVEN,
            )
            if SOFTMAX:
                gl.store(lse_rows, row_lse, mask=there)
            out = acc.to(dtype)
            store_rows(o_desc, o_tile, out, q_begin, q_length, row, head * WIDTH)
        else:
            mbarrier.arrive(q_empty.index(slot), count=1)
            for _ in range(high - low):
                step = hand_back(kv, step, STAGES)
            if row < q_length:
                if SOFTMAX:
                    none = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
                    gl.store(lse_rows, none, mask=there)
                out = gl.zeros([ROWS, WIDTH], dtype, O_LAYOUT)
                store_rows(o_desc, o_tile, out, q_begin, q_length, row, head * WIDTH)
    tma.store_wait(0)

"""The forward of ``jagged_flash_attention`` on Hopper, in Gluon.

One CTA per SM, persistent. A producer warp loads tiles of Q, K and V with TMA; two consumer
warpgroups of 64 query rows each keep the product S of one key tile and P·V of the one before it
in flight together, and compute the softmax meanwhile. Key tiles are taken from the last to the
first: the last is the only one that a full pattern must mask, and it is the prologue of the
pipeline anyway. Under a window only tiles on its edges are masked.

A consumer whose rows do not exist, or see no key, hands the tiles back unread.
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

from gem_attention.hopper.device import (
    BOUND,
    LN_2,
    LOG2_E,
    item_at,
    items_of,
    keys_seen,
    sequence_rows,
)


@gluon.jit
def _item(tiles, item, q_offsets, k_offsets, batch, q_tokens, k_tokens, HEADS: gl.constexpr):
    """Return head, first row of the tile, and begin and length of both sides."""
    entry = tiles + 2 * (item // HEADS)
    sequence = gl.load(entry)
    tile = gl.load(entry + 1)
    q_begin, q_length = sequence_rows(q_offsets, sequence, batch, q_tokens, True)
    k_begin, k_length = sequence_rows(k_offsets, sequence, batch, k_tokens, False)
    return item % HEADS, tile, q_begin, q_length, k_begin, k_length


@gluon.jit
def _produce(
    q_desc,
    k_desc,
    v_desc,
    q_smem,
    k_smem,
    v_smem,
    q_bars,
    kv_bars,
    lists,
    left,
    right,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    q_full, q_empty = q_bars
    k_full, k_empty, v_full, v_empty = kv_bars
    tiles, count, q_offsets, k_offsets, batch, q_tokens, k_tokens = lists
    dtype: gl.constexpr = q_smem.dtype
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    step = 0
    for turn in range(items_of(gl.load(count) * HEADS, programs, program)):
        head, tile, q_begin, q_length, k_begin, k_length = _item(
            tiles,
            item_at(turn, programs, program),
            q_offsets,
            k_offsets,
            batch,
            q_tokens,
            k_tokens,
            HEADS,
        )
        row = tile * (2 * ROWS)
        q_col = head * WIDTH
        k_col = (head // GROUP) * WIDTH
        for half in gl.static_range(2):
            slot = (turn & 1) * 2 + half
            mbarrier.wait(q_empty.index(slot), ((turn >> 1) & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), ROWS * WIDTH * 2)
            tma.async_copy_global_to_shared(
                q_desc,
                [BOUND, q_begin + q_length, BOUND - q_length + row + half * ROWS, q_col],
                q_full.index(slot),
                q_smem.index(slot)._reinterpret(dtype, [1, 1, ROWS, WIDTH], q_desc.layout),
            )
        first, stop = keys_seen(row, 2 * ROWS, q_length, k_length, left, right, KEYS, LEFT, RIGHT)
        for back in range(stop - first):
            stage = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            place = BOUND - k_length + (stop - 1 - back) * KEYS
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), KEYS * WIDTH * 2)
            tma.async_copy_global_to_shared(
                k_desc,
                [BOUND, k_begin + k_length, place, k_col],
                k_full.index(stage),
                k_smem.index(stage)._reinterpret(dtype, [1, 1, KEYS, WIDTH], k_desc.layout),
            )
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), KEYS * WIDTH * 2)
            tma.async_copy_global_to_shared(
                v_desc,
                [BOUND, k_begin + k_length, place, k_col],
                v_full.index(stage),
                v_smem.index(stage)._reinterpret(dtype, [1, 1, KEYS, WIDTH], v_desc.layout),
            )
            step += 1


@gluon.jit
def _masked(
    x_tk,
    key,
    limits,
    KEYS: gl.constexpr,
    ROWS: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):
    """Set the scores of keys behind the end or outside the window to -inf."""
    row, q_length, k_length, left, right = limits
    k = key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, S_LAYOUT))
    x_tk = gl.where((k < k_length)[None, :], x_tk, float("-inf"))
    if LEFT or RIGHT:
        place = row + k_length - q_length + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        if RIGHT:
            x_tk = gl.where(k[None, :] <= (place + right)[:, None], x_tk, float("-inf"))
        if LEFT:
            x_tk = gl.where(k[None, :] >= (place - left)[:, None], x_tk, float("-inf"))
    return x_tk


@gluon.jit
def _take_tiles(
    q_tile,
    k_smem,
    v_smem,
    kv_bars,
    state,
    limits,
    tile,
    tiles,
    zero,
    factor,
    STAGES: gl.constexpr,
    EDGE: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
):
    """Take key tiles down from ``tile``: S of each, P·V of the one before, softmax in between."""
    k_full, k_empty, v_full, v_empty = kv_bars
    step, acc, p_tile, peak, total = state
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = zero.shape[0]
    KEYS: gl.constexpr = zero.shape[1]
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
            x = _masked(x, key, limits, KEYS, ROWS, LEFT, RIGHT, S_LAYOUT)
        higher = gl.maximum(peak, gl.max(x, 1) * factor)
        base = higher
        if EDGE:
            # A row that has seen no key yet has a peak of -inf.
            base = gl.where(higher == float("-inf"), 0.0, higher)
        p = gl.exp2(x * factor - base[:, None])
        shrink = gl.exp2(peak - base)
        total = total * shrink + gl.sum(p, 1)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p_tile = gl.convert_layout(p.to(v_smem.dtype), P_LAYOUT)
        peak = higher
        step += 1
    return step, acc, p_tile, peak, total


# One function, because an accumulator in flight may not leave its loop.
@gluon.jit
def _consume(  # noqa: PLR0915
    o_desc,
    lse,
    q_smem,
    k_smem,
    v_smem,
    o_smem,
    q_bars,
    kv_bars,
    lists,
    left,
    right,
    scale,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    q_full, q_empty = q_bars
    k_full, k_empty, v_full, v_empty = kv_bars
    tiles, count, q_offsets, k_offsets, batch, q_tokens, k_tokens = lists
    WINDOW: gl.constexpr = LEFT or RIGHT
    dtype: gl.constexpr = q_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    o_tile = o_smem.index(HALF)
    factor = scale * LOG2_E
    step = 0
    for turn in range(items_of(gl.load(count) * HEADS, programs, program)):
        head, tile, q_begin, q_length, _, k_length = _item(
            tiles,
            item_at(turn, programs, program),
            q_offsets,
            k_offsets,
            batch,
            q_tokens,
            k_tokens,
            HEADS,
        )
        row = tile * (2 * ROWS) + HALF * ROWS
        # What the producer loads for both halves, and what this half needs of it.
        low, high = keys_seen(
            tile * (2 * ROWS), 2 * ROWS, q_length, k_length, left, right, KEYS, LEFT, RIGHT
        )
        first, stop = low, high
        if WINDOW:
            first, stop = keys_seen(row, ROWS, q_length, k_length, left, right, KEYS, LEFT, RIGHT)
        limits = (row, q_length, k_length, left, right)
        rows = row + gl.arange(0, ROWS, layout=S_ROWS)
        lse_rows = lse + (q_begin + rows).to(gl.int64) * HEADS + head
        there = rows < q_length
        slot = (turn & 1) * 2 + HALF
        q_tile = q_smem.index(slot)
        mbarrier.wait(q_full.index(slot), (turn >> 1) & 1)
        if (row < q_length) & (first < stop):
            acc = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
            zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
            if WINDOW:
                for _ in range(high - stop):
                    step = _hand_back(kv_bars, step, STAGES)
            stage = step % STAGES
            mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
            k_t = k_smem.index(stage).permute((1, 0))
            x = warpgroup_mma(q_tile, k_t, zero, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(num_outstanding=0, deps=(x,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            x = _masked(x, (stop - 1) * KEYS, limits, KEYS, ROWS, LEFT, RIGHT, S_LAYOUT)
            peak = gl.max(x, 1) * factor
            base = peak
            if WINDOW:
                base = gl.where(peak == float("-inf"), 0.0, peak)
            p = gl.exp2(x * factor - base[:, None])
            total = gl.sum(p, 1)
            p_tile = gl.convert_layout(p.to(dtype), P_LAYOUT)
            state = (step, acc, p_tile, peak, total)
            # Key tiles below `clear` lie wholly left of the window's right edge, those from
            # `bare` on wholly right of its left edge.
            clear = stop - 1
            bare = first
            if RIGHT:
                edge = gl.maximum(row + k_length - q_length + right + 1, 0) // KEYS
                clear = gl.maximum(gl.minimum(clear, edge), first)
            if LEFT:
                edge = gl.maximum(row + ROWS - 1 + k_length - q_length - left + KEYS - 1, 0) // KEYS
                bare = gl.minimum(gl.maximum(first, edge), clear)
            if RIGHT:
                state = _take_tiles(
                    q_tile,
                    k_smem,
                    v_smem,
                    kv_bars,
                    state,
                    limits,
                    stop - 2,
                    stop - 1 - clear,
                    zero,
                    factor,
                    STAGES,
                    True,
                    LEFT,
                    RIGHT,
                    S_LAYOUT,
                    O_LAYOUT,
                )
            state = _take_tiles(
                q_tile,
                k_smem,
                v_smem,
                kv_bars,
                state,
                limits,
                clear - 1,
                clear - bare,
                zero,
                factor,
                STAGES,
                False,
                LEFT,
                RIGHT,
                S_LAYOUT,
                O_LAYOUT,
            )
            if LEFT:
                state = _take_tiles(
                    q_tile,
                    k_smem,
                    v_smem,
                    kv_bars,
                    state,
                    limits,
                    bare - 1,
                    bare - first,
                    zero,
                    factor,
                    STAGES,
                    True,
                    LEFT,
                    RIGHT,
                    S_LAYOUT,
                    O_LAYOUT,
                )
            step, acc, p_tile, peak, total = state
            mbarrier.arrive(q_empty.index(slot), count=1)
            stage = step % STAGES
            mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
            acc = warpgroup_mma(p_tile, v_smem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(v_empty.index(stage), count=1)
            step += 1
            if WINDOW:
                for _ in range(first - low):
                    step = _hand_back(kv_bars, step, STAGES)
            # A row without keys: 0 and -inf; a NaN stays one.
            share = gl.where(total == 0.0, 0.0, 1.0 / total)
            acc = acc * gl.convert_layout(share, O_ROWS)[:, None]
            gl.store(lse_rows, (peak + gl.log2(total)) * LN_2, mask=there)
            tma.store_wait(0)
            o_tile.store(acc.to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(
                o_desc,
                [BOUND, q_begin + q_length, BOUND - q_length + row, head * WIDTH],
                o_tile._reinterpret(dtype, [1, 1, ROWS, WIDTH], o_desc.layout),
            )
        else:
            mbarrier.arrive(q_empty.index(slot), count=1)
            for _ in range(high - low):
                step = _hand_back(kv_bars, step, STAGES)
            if row < q_length:
                gl.store(lse_rows, gl.full([ROWS], float("-inf"), gl.float32, S_ROWS), mask=there)
                tma.store_wait(0)
                o_tile.store(gl.zeros([ROWS, WIDTH], dtype, O_LAYOUT))
                fence_async_shared()
                tma.async_copy_shared_to_global(
                    o_desc,
                    [BOUND, q_begin + q_length, BOUND - q_length + row, head * WIDTH],
                    o_tile._reinterpret(dtype, [1, 1, ROWS, WIDTH], o_desc.layout),
                )
    tma.store_wait(0)


@gluon.jit
def _hand_back(kv_bars, step, STAGES: gl.constexpr):
    """Give a key tile back unread; "full" first, or its next load could come too early."""
    k_full, k_empty, v_full, v_empty = kv_bars
    stage = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.wait(v_full.index(stage), phase)
    mbarrier.arrive(v_empty.index(stage), count=1)
    return step + 1


@gluon.jit(do_not_specialize=["batch", "q_tokens", "k_tokens", "left", "right"])
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse,
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
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Write out (T, H·D) and lse (T, H); one query tile of 2·ROWS rows and one head an item."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(DTYPE, [4, ROWS, WIDTH], LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, WIDTH], LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, WIDTH], LAYOUT)
    o_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, WIDTH], LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(4):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    q_bars = (q_full, q_empty)
    kv_bars = (k_full, k_empty, v_full, v_empty)
    lists = (tiles, count, q_offsets, k_offsets, batch, q_tokens, k_tokens)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    o_desc,
                    lse,
                    q_smem,
                    k_smem,
                    v_smem,
                    o_smem,
                    q_bars,
                    kv_bars,
                    lists,
                    left,
                    right,
                    scale,
                    0,
                    HEADS,
                    ROWS,
                    KEYS,
                    WIDTH,
                    STAGES,
                    LEFT,
                    RIGHT,
                ),
            ),
            (
                _consume,
                (
                    o_desc,
                    lse,
                    q_smem,
                    k_smem,
                    v_smem,
                    o_smem,
                    q_bars,
                    kv_bars,
                    lists,
                    left,
                    right,
                    scale,
                    1,
                    HEADS,
                    ROWS,
                    KEYS,
                    WIDTH,
                    STAGES,
                    LEFT,
                    RIGHT,
                ),
            ),
            (
                _produce,
                (
                    q_desc,
                    k_desc,
                    v_desc,
                    q_smem,
                    k_smem,
                    v_smem,
                    q_bars,
                    kv_bars,
                    lists,
                    left,
                    right,
                    HEADS,
                    GROUP,
                    ROWS,
                    KEYS,
                    WIDTH,
                    STAGES,
                    LEFT,
                    RIGHT,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )

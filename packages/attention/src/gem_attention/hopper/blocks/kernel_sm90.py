"""Block attention on Hopper, in Gluon, for blocks of more than 64 tokens.

The portable kernels have each tile of a block arrive before they ask for the next, and of blocks of
128 tokens a multiprocessor holds so few that nothing else happens meanwhile. Here all tiles of a
block are under way at once.

**Forward.** One block and head a program, two programs a multiprocessor. The output leaves through
the memory of the queries.

**Backward.** One program a multiprocessor, persistent; q and k of the next block arrive while this
one is computed, and dO and v as soon as their memory is free. Of seven tiles of shared memory two
pairs hold q and k of this block and of the next, two hold dO and v, one holds dS::

    S = q kᵀ     dP = dO vᵀ     P to the memory of v, dS to its own
    dv = Pᵀ dO   dk = dSᵀ q     dq = dS k

dv leaves through the memory of P, dk through that of q, dq through that of k.
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

from gem_attention.hopper.blocks.device import (
    block_of,
    block_weights,
    load_block,
    pairs_of,
    store_block,
    turn_in_place,
    turn_of,
    turned,
)
from gem_attention.hopper.device import item_at, turns_of, warps_meet

_UNSPECIALISED = ["batch", "tokens", "block_tokens"]


@gluon.jit(do_not_specialize=_UNSPECIALISED)
def block_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    turns_ptr,
    gap_ptr,
    tiles,
    count,
    offsets,
    batch,
    tokens,
    block_tokens,
    factor,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    ROTARY: gl.constexpr,
    HAS_GAP: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Write the output of one block and head."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, WIDTH, 16])
    item = gl.program_id(0)
    if item // HEADS < gl.load(count):
        lists = (tiles, count, offsets, batch, tokens, block_tokens)
        first, rows, seen = block_of(item, lists, HEADS)
        head = item % HEADS
        column = head // GROUP * WIDTH
        smem = gl.allocate_shared_memory(DTYPE, [3, ROWS, WIDTH], LAYOUT)
        full = gl.allocate_shared_memory(gl.int64, [3, 1], BARRIER)
        for i in gl.static_range(3):
            mbarrier.init(full.index(i), count=1)
        q = smem.index(0)
        k = smem.index(1)
        v = smem.index(2)
        load_block(q_desc, q, full.index(0), first, seen, head * WIDTH, True)
        load_block(k_desc, k, full.index(1), first, seen, column, True)
        load_block(v_desc, v, full.index(2), first, seen, column, True)
        mbarrier.wait(full.index(0), 0)
        mbarrier.wait(full.index(1), 0)
        if ROTARY:
            angles = (turns_ptr, gap_ptr, WIDTH // 2)
            turn_in_place(q, k, first, seen, angles, HAS_GAP, 64)
        zero = gl.zeros([ROWS, ROWS], gl.float32, S_LAYOUT)
        score = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(num_outstanding=0, deps=(score,))
        weight, total = block_weights(score, factor, seen)
        weight = gl.convert_layout(weight.to(DTYPE), gl.DotOperandLayout(0, O_LAYOUT, 2))
        mbarrier.wait(full.index(2), 0)
        none = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
        out = warpgroup_mma(weight, v, none, use_acc=False, is_async=True)
        out = warpgroup_mma_wait(num_outstanding=0, deps=(out,))
        total = gl.convert_layout(total, gl.SliceLayout(1, O_LAYOUT))
        warps_meet()
        q.store((out / total[:, None]).to(DTYPE))
        fence_async_shared()
        warps_meet()
        store_block(out_desc, q, first, rows, head * WIDTH)
        tma.store_wait(0)


# One function, because an accumulator in flight may not leave its loop.
@gluon.jit(do_not_specialize=_UNSPECIALISED)
def block_backward_kernel(  # noqa: PLR0915
    q_desc,
    k_desc,
    v_desc,
    g_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    turns_ptr,
    gap_ptr,
    tiles,
    count,
    offsets,
    batch,
    tokens,
    block_tokens,
    scale,
    factor,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    ROTARY: gl.constexpr,
    HAS_GAP: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Write the gradients of the blocks of this program, for as many key heads as query heads."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, WIDTH, 16])
    lists = (tiles, count, offsets, batch, tokens, block_tokens)
    angles = (turns_ptr, gap_ptr, WIDTH // 2)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, WIDTH], LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, WIDTH], LAYOUT)
    v = gl.allocate_shared_memory(DTYPE, [ROWS, WIDTH], LAYOUT)
    g = gl.allocate_shared_memory(DTYPE, [ROWS, WIDTH], LAYOUT)
    ds_tile = gl.allocate_shared_memory(DTYPE, [ROWS, ROWS], LAYOUT)
    p_tile = v if WIDTH == ROWS else gl.allocate_shared_memory(DTYPE, [ROWS, ROWS], LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    vg_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(vg_full.index(i), count=1)
    v_full = vg_full.index(0)
    g_full = vg_full.index(1)
    turns = turns_of(lists, HEADS)
    some = turns > 0
    item = item_at(0, gl.num_programs(0), gl.program_id(0))
    first, rows, seen = block_of(gl.where(some, item, 0), lists, HEADS)
    column = item % HEADS * WIDTH
    load_block(q_desc, q_smem.index(0), q_full.index(0), first, seen, column, some)
    load_block(k_desc, k_smem.index(0), k_full.index(0), first, seen, column, some)
    load_block(v_desc, v, v_full, first, seen, column, some)
    load_block(g_desc, g, g_full, first, seen, column, some)
    zero = gl.zeros([ROWS, ROWS], gl.float32, S_LAYOUT)
    none = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
    for turn in range(turns):
        stage = turn & 1
        q = q_smem.index(stage)
        k = k_smem.index(stage)
        # Where the next block lies are loads behind one another: asked for before it matters.
        more = turn + 1 < turns
        after = item_at(gl.where(more, turn + 1, turn), gl.num_programs(0), gl.program_id(0))
        after_first, after_rows, after_seen = block_of(after, lists, HEADS)
        after_column = after % HEADS * WIDTH
        mbarrier.wait(q_full.index(stage), (turn >> 1) & 1)
        mbarrier.wait(k_full.index(stage), (turn >> 1) & 1)
        if ROTARY:
            turn_in_place(q, k, first, seen, angles, HAS_GAP, WIDTH)
        x = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full, turn & 1)
        mbarrier.wait(g_full, turn & 1)
        y = warpgroup_mma(g, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        # The gradients of the block before have left their memory.
        tma.store_wait(0)
        other = stage ^ 1
        load_block(
            q_desc, q_smem.index(other), q_full.index(other), after_first, after_seen,
            after_column, more,
        )  # fmt: skip
        load_block(
            k_desc, k_smem.index(other), k_full.index(other), after_first, after_seen,
            after_column, more,
        )  # fmt: skip
        x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
        p, total = block_weights(x, factor, seen)
        p = p * (1.0 / total)[:, None]
        y = warpgroup_mma_wait(num_outstanding=0, deps=(y,))
        ds = p * (y - gl.sum(p * y, 1)[:, None])
        warps_meet()  # all have read v
        p_tile.store(p.to(DTYPE))
        ds_tile.store(ds.to(DTYPE))
        fence_async_shared()
        warps_meet()
        dv = warpgroup_mma(p_tile.permute((1, 0)), g, none, use_acc=False, is_async=True)
        dk = warpgroup_mma(ds_tile.permute((1, 0)), q, none, use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(num_outstanding=1, deps=(dv,))
        warps_meet()  # all have read P and dO
        load_block(g_desc, g, g_full, after_first, after_seen, after_column, more)
        v.store(dv.to(DTYPE))
        # Behind the store: three sums at once are more than the registers hold.
        dq = warpgroup_mma(ds_tile, k, none, use_acc=False, is_async=True)
        fence_async_shared()
        warps_meet()
        store_block(dv_desc, v, first, rows, column)
        dk, dq = warpgroup_mma_wait(num_outstanding=0, deps=(dk, dq))
        warps_meet()  # all have read dS, q and k
        if ROTARY:
            even, odd = pairs_of(dk * scale)
            sine, cosine = turn_of(even, 0, first, seen, angles, HAS_GAP)
            q.store(turned(even, odd, -sine, cosine, DTYPE, O_LAYOUT))
            even, odd = pairs_of(dq * scale)
            k.store(turned(even, odd, -sine, cosine, DTYPE, O_LAYOUT))
        else:
            q.store((dk * scale).to(DTYPE))
            k.store((dq * scale).to(DTYPE))
        fence_async_shared()
        warps_meet()
        store_block(dk_desc, q, first, rows, column)
        store_block(dq_desc, k, first, rows, column)
        # dv has left its memory.
        tma.store_wait(2)
        load_block(v_desc, v, v_full, after_first, after_seen, after_column, more)
        first, rows, seen, column = after_first, after_rows, after_seen, after_column
    tma.store_wait(0)

"""The forward of ``normed_attention`` for heads of 128 on Hopper, in Gluon: one fused kernel.

One CTA per SM, persistent. An item is one head of a stretch of tokens of one sequence; its at most
128 keys and values lie in shared memory, those of the next item beside them. A loading warp fetches
tiles of 64 tokens for two consumer warpgroups in turn, each of which does its own::

    S = q Kᵀ      P = f(scale·S)      a = P V + q

With one head (NORMS) q is LayerNorm of what was fetched, and besides a, if it is kept, RmsNorm(a)
plus the tokens leave. Of several heads q is what is fetched, and a alone leaves: their rows are
wider than an item. Rows beyond the end are read as 0 and never written, so nothing is masked:
f(0) = 0.
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

from gem_attention.hopper.activations.device import value, weight
from gem_attention.hopper.device import BOUND, tell, told, turns_of, warps_meet
from gem_attention.hopper.forward.device import NUMBERS, item_of, load_rows
from gem_attention.hopper.forward.weights.device import folds, scaled_sum
from gem_attention.hopper.normed.device import PASS_ROWS, normalise


@gluon.jit
def _tiles(tile, q_length, STRETCH: gl.constexpr, ROWS: gl.constexpr):
    """Return how many tiles of tokens an item has."""
    rows = gl.minimum(q_length - tile * STRETCH, STRETCH)
    return (rows + ROWS - 1) // ROWS


@gluon.jit
def _leave(out, smem, desc, place, column):
    """Store rows by TMA through a buffer that is free."""
    smem.store(out.to(smem.dtype))
    fence_async_shared()
    warps_meet()
    tma.async_copy_shared_to_global(
        desc,
        [BOUND, place[0], place[1], column],
        smem._reinterpret(smem.dtype, [1, 1, smem.shape[0], smem.shape[1]], desc.layout),
    )


# One function, because an accumulator in flight may not leave its loop.
@gluon.jit
def _consume(  # noqa: PLR0915
    given,
    WHICH: gl.constexpr,
    HEADS: gl.constexpr,
    STRETCH: gl.constexpr,
    NORMS: gl.constexpr,
    KEEPS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Do every other tile of each item."""
    descs, smems, bars, lists, scale, eps, out_eps = given
    a_desc, out_desc = descs
    x_smem, k_smem, v_smem, own_smem, rstd_smem, numbers = smems
    x_full, x_empty, kv_full, kv_empty = bars
    dtype: gl.constexpr = x_smem.dtype
    SLOTS: gl.constexpr = x_smem.shape[0] // 2
    ROWS: gl.constexpr = x_smem.shape[1]
    WIDTH: gl.constexpr = x_smem.shape[2]
    KEYS: gl.constexpr = k_smem.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    FOLD: gl.constexpr = folds(dtype, False, False)
    zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    none = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
    own = own_smem.index(WHICH)
    step = 0
    for turn in range(turns_of(lists, HEADS)):
        stage = turn & 1
        mbarrier.wait(kv_full.index(stage), (turn >> 1) & 1)
        head = told(numbers, stage * NUMBERS)
        tile = told(numbers, stage * NUMBERS + 1)
        q_begin = told(numbers, stage * NUMBERS + 2)
        q_length = told(numbers, stage * NUMBERS + 3)
        k_t = k_smem.index(stage).permute((1, 0))
        v = v_smem.index(stage)
        for i in range(WHICH, _tiles(tile, q_length, STRETCH, ROWS), 2):
            slot = WHICH * SLOTS + step % SLOTS
            x_tile = x_smem.index(slot)
            mbarrier.wait(x_full.index(slot), (step // SLOTS) & 1)
            q_tile = x_tile
            # What was in the buffer has left.
            tma.store_wait(0)
            warps_meet()
            if NORMS:
                normalise(x_tile, own, rstd_smem, ROWS // PASS_ROWS * WHICH, eps)
                fence_async_shared()
                warps_meet()
                q_tile = own
            x = warpgroup_mma(q_tile, k_t, zero, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(num_outstanding=0, deps=(x,))
            p = weight(x, scale, ACTIVATION) if FOLD else value(x, scale, 0, ACTIVATION)
            p_tile = gl.convert_layout(p.to(dtype), P_LAYOUT)
            acc = warpgroup_mma(p_tile, v, none, use_acc=False, is_async=True)
            q_td = q_tile.load(O_LAYOUT)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            a_td = scaled_sum(acc, scale, ACTIVATION, FOLD) + q_td.to(gl.float32)
            place = (q_begin + q_length, BOUND - q_length + tile * STRETCH + i * ROWS)
            if NORMS:
                warps_meet()  # all have read q
                if KEEPS:
                    _leave(a_td, own, a_desc, place, 0)
                rstd_t = gl.rsqrt(gl.sum(a_td * a_td, 1) / WIDTH + out_eps)
                out_td = a_td * rstd_t[:, None] + x_tile.load(O_LAYOUT).to(gl.float32)
                mbarrier.arrive(x_empty.index(slot), count=1)
                if KEEPS:
                    tma.store_wait(0)
                    warps_meet()
                _leave(out_td, own, out_desc, place, 0)
            else:
                mbarrier.arrive(x_empty.index(slot), count=1)
                _leave(a_td, own, a_desc, place, head * WIDTH)
            step += 1
        mbarrier.arrive(kv_empty.index(stage), count=1)
    tma.store_wait(0)


@gluon.jit
def _produce(given, HEADS: gl.constexpr, STRETCH: gl.constexpr):
    """Load keys and values of an item, and its tiles of tokens for both consumers in turn."""
    x_desc, k_desc, v_desc, smems, bars, lists = given
    x_smem, k_smem, v_smem, _, _, numbers = smems
    x_full, x_empty, kv_full, kv_empty = bars
    SLOTS: gl.constexpr = x_smem.shape[0] // 2
    ROWS: gl.constexpr = x_smem.shape[1]
    WIDTH: gl.constexpr = x_smem.shape[2]
    KEYS: gl.constexpr = k_smem.shape[1]
    steps_0 = 0
    steps_1 = 0
    for turn in range(turns_of(lists, HEADS)):
        head, tile, q_begin, q_length, k_begin, k_length = item_of(turn, lists, HEADS)
        column = head * WIDTH
        stage = turn & 1
        mbarrier.wait(kv_empty.index(stage), ((turn >> 1) & 1) ^ 1)
        tell(numbers, stage * NUMBERS, (head, tile, q_begin, q_length), NUMBERS)
        mbarrier.expect(kv_full.index(stage), 2 * KEYS * WIDTH * 2)
        for i in gl.static_range(2):
            desc = k_desc if i == 0 else v_desc
            smem = k_smem if i == 0 else v_smem
            tma.async_copy_global_to_shared(
                desc,
                [BOUND, k_begin + k_length, BOUND - k_length, column],
                kv_full.index(stage),
                smem.index(stage)._reinterpret(smem.dtype, [1, 1, KEYS, WIDTH], desc.layout),
            )
        for i in range(_tiles(tile, q_length, STRETCH, ROWS)):
            which = i & 1
            step = gl.where(which == 0, steps_0, steps_1)
            slot = which * SLOTS + step % SLOTS
            mbarrier.wait(x_empty.index(slot), ((step // SLOTS) & 1) ^ 1)
            row = tile * STRETCH + i * ROWS
            to = x_smem.index(slot)
            load_rows(x_desc, to, x_full.index(slot), q_begin, q_length, row, column)
            steps_0 += 1 - which
            steps_1 += which


@gluon.jit(do_not_specialize=["batch", "q_tokens", "k_tokens"])
def normed_forward_kernel(
    x_desc,
    k_desc,
    v_desc,
    a_desc,
    out_desc,
    tiles,
    count,
    q_offsets,
    k_offsets,
    batch,
    q_tokens,
    k_tokens,
    scale,
    eps,
    out_eps,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STRETCH: gl.constexpr,
    SLOTS: gl.constexpr,
    DTYPE: gl.constexpr,
    HEADS: gl.constexpr,
    NORMS: gl.constexpr,
    KEEPS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Write out and, with KEEPS, a (T, H·K), every row; without NORMS a from q, and no out."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(DTYPE, [2 * SLOTS, ROWS, WIDTH], LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [2, KEYS, WIDTH], LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [2, KEYS, WIDTH], LAYOUT)
    own_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, WIDTH], LAYOUT)
    rstd_smem = gl.allocate_shared_memory(gl.float32, [2 * ROWS // PASS_ROWS, PASS_ROWS], FLAT)
    numbers = gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], FLAT)
    x_full = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], BARRIER)
    x_empty = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(2 * SLOTS):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    bars = (x_full, x_empty, kv_full, kv_empty)
    smems = (x_smem, k_smem, v_smem, own_smem, rstd_smem, numbers)
    lists = (tiles, count, q_offsets, k_offsets, batch, q_tokens, k_tokens)
    mine = ((a_desc, out_desc), smems, bars, lists, scale, eps, out_eps)
    gl.warp_specialize(
        [
            (_consume, (mine, 0, HEADS, STRETCH, NORMS, KEEPS, ACTIVATION)),
            (_consume, (mine, 1, HEADS, STRETCH, NORMS, KEEPS, ACTIVATION)),
            (_produce, ((x_desc, k_desc, v_desc, smems, bars, lists), HEADS, STRETCH)),
        ],
        [4, 1],
        [240, 24],
    )

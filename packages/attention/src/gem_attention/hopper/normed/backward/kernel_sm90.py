"""The backward of ``normed_attention`` for heads of 128 on Hopper, in Gluon: one fused kernel.

One CTA per SM, persistent. An item is one head of a sequence of at most 128 keys, with all its
tokens. Two consumer warpgroups hold dK and dV of half of its keys each in registers and loop over
tiles of 64 tokens, of which a loading warp fetches x, a (what the second norm divides) and dO by
TMA. With one head (NORMS) all is done here::

    q = LayerNorm(x), where x lies            da from a and dO, where a lies
    S = K qᵀ      P = f(scale·S)              dP = V daᵀ     dS = f'(scale·S) ∘ dP
    dV += P da    dK += dS q                  dq = scale · dSᵀ K + da
    dx = r (dq − mean(dq) − q · mean(dq ∘ q)) + dO

The first warpgroup makes q of a tile and the second da. dS of both halves meets in shared memory;
each warpgroup then has half of the columns of dq, and the halves of its row sums meet there too.
Of several heads q and da are what is loaded, and dq what leaves: their rows are wider than an item.

Rows beyond the end are read as 0 and never written, so nothing is masked: f(0) = 0. Sequences
without keys, and the rows behind the last one, are items whose keys are all 0.
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

from gem_attention.hopper.activations.device import value_and_slope
from gem_attention.hopper.device import BOUND, item_at, items_of
from gem_attention.hopper.normed.device import PASS_ROWS, go_through_norm, normalise, sequence_of

# Columns of a warpgroup's part of dq, and of a piece of dK and dV that leaves.
SIDE = gl.constexpr(64)


@gluon.jit
def _put(x, smem, desc, place, column):
    """Write 64 rows and 64 columns by TMA, once what was in ``smem`` before has left."""
    tma.store_wait(0)
    smem.store(x.to(smem.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(
        desc,
        [BOUND, place[0], place[1], column],
        smem._reinterpret(smem.dtype, [1, 1, SIDE, SIDE], desc.layout),
    )


@gluon.jit
def _prepare(smems, bars, step, eps, out_eps, HALF: gl.constexpr):
    """Make q or da of a tile when it has arrived."""
    x_smem, a_smem, g_smem, _, _, _, _, rstd_smem, _ = smems
    _, _, _, x_full, a_full, _, ready, _, _ = bars
    STAGES: gl.constexpr = x_smem.shape[0]
    stage = step % STAGES
    phase = (step // STAGES) & 1
    if HALF == 0:
        mbarrier.wait(x_full.index(stage), phase)
        PASSES: gl.constexpr = x_smem.shape[1] // PASS_ROWS
        rstds = rstd_smem._reinterpret(gl.float32, [STAGES * PASSES, PASS_ROWS], rstd_smem.layout)
        normalise(x_smem.index(stage), x_smem.index(stage), rstds, PASSES * stage, eps)
    else:
        mbarrier.wait(a_full.index(stage), phase)
        go_through_norm(a_smem.index(stage), g_smem.index(stage), out_eps)
    fence_async_shared()
    mbarrier.arrive(ready.index(stage), count=1)


# One function, because an accumulator in flight may not leave its loop.
@gluon.jit
def _consume(  # noqa: PLR0915
    given,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    NORMS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Run a consumer warpgroup, which has half of each item's keys, until no item is left."""
    descs, smems, bars, lists, items, scale, eps, out_eps = given
    dx_desc, dk_desc, dv_desc = descs
    x_smem, a_smem, g_smem, k_smem, v_smem, ds_smem, out_smem, rstd_smem, sums_smem = smems
    k_full, v_full, kv_empty, x_full, a_full, empty, ready, ds_full, sums_full = bars
    dtype: gl.constexpr = x_smem.dtype
    STAGES: gl.constexpr = x_smem.shape[0]
    ROWS: gl.constexpr = x_smem.shape[1]
    WIDTH: gl.constexpr = x_smem.shape[2]
    MINE: gl.constexpr = k_smem.shape[0] // 2
    COLUMN: gl.constexpr = HALF * SIDE
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    Q_ROWS: gl.constexpr = gl.SliceLayout(1, Q_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    out_tile = out_smem.index(HALF)
    step = 0
    for turn in range(items_of(items, programs, program)):
        item = item_at(turn, programs, program)
        first = item % HEADS * WIDTH
        q_begin, q_length, k_begin, k_length, key = sequence_of(item // HEADS, lists)
        steps = (q_length + ROWS - 1) // ROWS
        dk = gl.zeros([MINE, WIDTH], gl.float32, O_LAYOUT)
        dv = gl.zeros([MINE, WIDTH], gl.float32, O_LAYOUT)
        zero = gl.zeros([MINE, ROWS], gl.float32, S_LAYOUT)
        zero_q = gl.zeros([ROWS, SIDE], gl.float32, Q_LAYOUT)
        if NORMS:  # noqa: SIM102 - known when compiled; the other when it runs
            if steps > 0:
                _prepare(smems, bars, step, eps, out_eps, HALF)
        mbarrier.wait(k_full, turn & 1)
        mbarrier.wait(v_full, turn & 1)
        for tile in range(steps):
            stage = step % STAGES
            phase = (step // STAGES) & 1
            q = x_smem.index(stage)
            da = a_smem.index(stage)
            ds_now = ds_smem.index(step & 1)
            k_mine = k_smem.slice(HALF * MINE, MINE)
            v_mine = v_smem.slice(HALF * MINE, MINE)
            if NORMS:
                mbarrier.wait(ready.index(stage), phase)
            else:
                mbarrier.wait(x_full.index(stage), phase)
            x = warpgroup_mma(k_mine, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            if not NORMS:
                mbarrier.wait(a_full.index(stage), phase)
            y = warpgroup_mma(v_mine, da.permute((1, 0)), zero, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
            p, slope = value_and_slope(x, scale, 0, ACTIVATION)
            p_tile = gl.convert_layout(p.to(dtype), P_LAYOUT)
            y, slope = warpgroup_mma_wait(num_outstanding=0, deps=(y, slope))
            ds_tile = (slope * y).to(dtype)
            dv = warpgroup_mma(p_tile, da, dv, is_async=True)
            # Two buffers: by the time one comes round, the other half has said, with the other
            # buffer, that it is done with this one.
            ds_now.slice(HALF * MINE, MINE).store(ds_tile)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(step & 1), count=1)
            mbarrier.wait(ds_full.index(step & 1), (step >> 1) & 1)
            k_cols = k_smem.slice(COLUMN, SIDE, dim=1)
            dq = warpgroup_mma(ds_now.permute((1, 0)), k_cols, zero_q, use_acc=False, is_async=True)
            dk = warpgroup_mma(gl.convert_layout(ds_tile, P_LAYOUT), q, dk, is_async=True)
            # dq leaves while dK is still being computed.
            dv, dq = warpgroup_mma_wait(num_outstanding=1, deps=(dv, dq))
            dq = dq * scale + da.slice(COLUMN, SIDE, dim=1).load(Q_LAYOUT).to(gl.float32)
            if NORMS:
                q_td = q.slice(COLUMN, SIDE, dim=1).load(Q_LAYOUT).to(gl.float32)
                sum_t = gl.sum(dq, 1)
                along_t = gl.sum(dq * q_td, 1)
                place = 4 * (step & 1)
                sums_smem.index(place + 2 * HALF).store(sum_t)
                sums_smem.index(place + 2 * HALF + 1).store(along_t)
                mbarrier.arrive(sums_full.index(step & 1), count=1)
                mbarrier.wait(sums_full.index(step & 1), (step >> 1) & 1)
                sum_t += sums_smem.index(place + 2 - 2 * HALF).load(Q_ROWS)
                along_t += sums_smem.index(place + 3 - 2 * HALF).load(Q_ROWS)
                rstd_t = rstd_smem.index(stage).load(Q_ROWS)
                # Loaded again rather than held: registers are what is short here.
                q_td = q.slice(COLUMN, SIDE, dim=1).load(Q_LAYOUT).to(gl.float32)
                dq = dq - (sum_t / WIDTH)[:, None] - q_td * (along_t / WIDTH)[:, None]
                # It has arrived, as the second warpgroup knows, and this one asks for itself.
                mbarrier.wait(a_full.index(stage), phase)
                grad_td = g_smem.index(stage).slice(COLUMN, SIDE, dim=1).load(Q_LAYOUT)
                dq = dq * rstd_t[:, None] + grad_td.to(gl.float32)
            to = (q_begin + q_length, BOUND - q_length + tile * ROWS)
            _put(dq, out_tile, dx_desc, to, first + COLUMN)
            dk = warpgroup_mma_wait(num_outstanding=0, deps=(dk,))
            mbarrier.arrive(empty.index(stage), count=1)
            step += 1
            if NORMS:  # noqa: SIM102
                if tile + 1 < steps:
                    _prepare(smems, bars, step, eps, out_eps, HALF)
        mbarrier.arrive(kv_empty, count=1)
        to = (k_begin + k_length, BOUND - k_length + key * (2 * MINE) + HALF * MINE)
        dvs = dv.reshape([MINE, 2, SIDE]).permute((0, 2, 1)).split()
        dks = (dk * scale).reshape([MINE, 2, SIDE]).permute((0, 2, 1)).split()
        for i in gl.static_range(2):
            _put(gl.convert_layout(dvs[i], Q_LAYOUT), out_tile, dv_desc, to, first + i * SIDE)
            _put(gl.convert_layout(dks[i], Q_LAYOUT), out_tile, dk_desc, to, first + i * SIDE)
    tma.store_wait(0)


@gluon.jit
def _load(desc, smem, full, place, column):
    """Load a tile of rows of a sequence."""
    tma.async_copy_global_to_shared(
        desc,
        [BOUND, place[0], place[1], column],
        full,
        smem._reinterpret(smem.dtype, [1, 1, smem.shape[0], smem.shape[1]], desc.layout),
    )


@gluon.jit
def _produce(given, HEADS: gl.constexpr, NORMS: gl.constexpr):
    """Run the loading warp until no item is left."""
    descs, smems, bars, lists, items = given
    x_desc, a_desc, g_desc, k_desc, v_desc = descs
    x_smem, a_smem, g_smem, k_smem, v_smem, _, _, _, _ = smems
    k_full, v_full, kv_empty, x_full, a_full, empty, _, _, _ = bars
    STAGES: gl.constexpr = x_smem.shape[0]
    ROWS: gl.constexpr = x_smem.shape[1]
    WIDTH: gl.constexpr = x_smem.shape[2]
    KEYS: gl.constexpr = k_smem.shape[0]
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    step = 0
    for turn in range(items_of(items, programs, program)):
        item = item_at(turn, programs, program)
        first = item % HEADS * WIDTH
        q_begin, q_length, k_begin, k_length, key = sequence_of(item // HEADS, lists)
        keys = (k_begin + k_length, BOUND - k_length + key * KEYS)
        steps = (q_length + ROWS - 1) // ROWS
        # The first tokens are normalised while the keys of the item before are still in use.
        for tile in range(steps + 1):
            if tile == gl.minimum(steps, 1):
                mbarrier.wait(kv_empty, (turn & 1) ^ 1)
                mbarrier.expect(k_full, KEYS * WIDTH * 2)
                _load(k_desc, k_smem, k_full, keys, first)
                mbarrier.expect(v_full, KEYS * WIDTH * 2)
                _load(v_desc, v_smem, v_full, keys, first)
            if tile < steps:
                stage = step % STAGES
                rows = (q_begin + q_length, BOUND - q_length + tile * ROWS)
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(x_full.index(stage), ROWS * WIDTH * 2)
                _load(x_desc, x_smem.index(stage), x_full.index(stage), rows, first)
                mbarrier.expect(a_full.index(stage), (1 + NORMS) * ROWS * WIDTH * 2)
                _load(a_desc, a_smem.index(stage), a_full.index(stage), rows, first)
                if NORMS:
                    _load(g_desc, g_smem.index(stage), a_full.index(stage), rows, first)
                step += 1


@gluon.jit(do_not_specialize=["batch", "q_tokens", "k_tokens"])
def normed_backward_kernel(
    x_desc,
    a_desc,
    g_desc,
    k_desc,
    v_desc,
    dx_desc,
    dk_desc,
    dv_desc,
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
    STAGES: gl.constexpr,
    DTYPE: gl.constexpr,
    HEADS: gl.constexpr,
    NORMS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Write dx (T, H·K), dk and dv (S, H·K), every row of them; without NORMS dq in place of dx.

    Then ``x_desc`` is q and ``a_desc`` the gradient of a, and ``g_desc`` is not read.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, WIDTH], LAYOUT)
    a_smem = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, WIDTH], LAYOUT)
    g_smem = gl.allocate_shared_memory(DTYPE, [STAGES if NORMS else 1, ROWS, WIDTH], LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [KEYS, WIDTH], LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [KEYS, WIDTH], LAYOUT)
    ds_smem = gl.allocate_shared_memory(DTYPE, [2, KEYS, ROWS], LAYOUT)
    out_smem = gl.allocate_shared_memory(DTYPE, [2, SIDE, SIDE], LAYOUT)
    rstd_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    sums_smem = gl.allocate_shared_memory(gl.float32, [8, ROWS], FLAT)
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    x_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    a_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    sums_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(a_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(ready.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(sums_full.index(i), count=2)
    bars = (k_full, v_full, kv_empty, x_full, a_full, empty, ready, ds_full, sums_full)
    smems = (
        x_smem, a_smem, g_smem, k_smem, v_smem, ds_smem, out_smem, rstd_smem, sums_smem
    )  # fmt: skip
    lists = (tiles, count, q_offsets, k_offsets, batch, q_tokens, k_tokens)
    items = (gl.load(count) + batch + 1) * HEADS
    mine = ((dx_desc, dk_desc, dv_desc), smems, bars, lists, items, scale, eps, out_eps)
    loaded = ((x_desc, a_desc, g_desc, k_desc, v_desc), smems, bars, lists, items)
    gl.warp_specialize(
        [
            (_consume, (mine, 0, HEADS, NORMS, ACTIVATION)),
            (_consume, (mine, 1, HEADS, NORMS, ACTIVATION)),
            (_produce, (loaded, HEADS, NORMS)),
        ],
        [4, 1],
        [240, 24],
    )

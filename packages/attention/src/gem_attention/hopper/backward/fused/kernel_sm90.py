"""The backward of jagged attention on Hopper, in Gluon: one fused kernel.

One CTA per SM, persistent. An item is one tile of keys of one key head; two consumer warpgroups
hold dK and dV of half of its keys each in registers and loop over the query tiles that see it, for
every query head of the group::

    S = K Qᵀ    P = exp2(factor·S − lse)    dP = V dOᵀ    dS = P ∘ (dP − delta)
    dV += P dO     dK += dS Q     dQ += dSᵀ K

or, with activations, P = f(scale·S) and dS = f'(scale·S) ∘ dP. dS of both halves meets in shared
memory, and each warpgroup computes half of dQ's columns from the whole of it. dQ is added to a
ring of fp32 blocks (``backward.items``) by TMA, in no fixed order, so its last bit differs between
runs. dK and dV have one owner and do not.

A block holds dQ in the order of the accumulator's registers (``backward.finishing`` says which):
16-byte stores without bank conflicts, and contiguous memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gem_attention.hopper.backward.adding.device import add_items
from gem_attention.hopper.backward.consuming.device import consume_items
from gem_attention.hopper.backward.finishing.device import PIECE, PIECES, WARPS, finish_items
from gem_attention.hopper.backward.items.device import AHEAD, ANNOUNCED, COLUMNS, LINES
from gem_attention.hopper.backward.loading.device import load_items


@gluon.jit(do_not_specialize=["batch", "q_tokens", "k_tokens", "left", "right", "slots", "wanted"])
def backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    g_desc,
    lse_desc,
    delta_desc,
    dq_desc,
    dq_piece_desc,
    dq_rows_desc,
    dk_desc,
    dv_desc,
    ring_ptr,
    grad_q,
    state,
    tiles,
    count,
    others,
    q_offsets,
    k_offsets,
    batch,
    q_tokens,
    k_tokens,
    left,
    right,
    slots,
    wanted,
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
    """Write dk and dv (S, G·D), and dq of every sequence that has keys."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, WIDTH], LAYOUT)
    g_smem = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, WIDTH], LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [1, KEYS, WIDTH], LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, KEYS, WIDTH], LAYOUT)
    ds_smem = gl.allocate_shared_memory(DTYPE, [2, KEYS, ROWS], LAYOUT)
    SPLIT: gl.constexpr = WIDTH == COLUMNS
    # Of width 128 each consumer has one part of dQ, and dK and dV leave through the same memory.
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS * COLUMNS // 32, 32], WIDE)
    out_smem = dq_smem
    if SPLIT:
        out_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS * COLUMNS // 64, 32], WIDE)
    piece_smem = gl.allocate_shared_memory(gl.float32, [PIECES, PIECE, 32], WIDE)
    # TMA wants 128 bytes, which a flat layout alone does not get: lse in lines 0 to 3, then delta.
    lines_smem = gl.allocate_shared_memory(gl.float32, [2, 8, 32], WIDE)._reinterpret(
        gl.float32, [2 * LINES, ROWS], FLAT
    )
    item_smem = gl.allocate_shared_memory(gl.int32, [ANNOUNCED, 1], FLAT)
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    piece_full = gl.allocate_shared_memory(gl.int64, [PIECES, 1], BARRIER)
    item_full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], BARRIER)
    item_free = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], BARRIER)
    item_done = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], BARRIER)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(kv_empty, count=3 if SPLIT else 2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(PIECES):
        mbarrier.init(piece_full.index(i), count=1)
    for i in gl.static_range(AHEAD):
        mbarrier.init(item_full.index(i), count=1)
        mbarrier.init(item_free.index(i), count=1)
        mbarrier.init(item_done.index(i), count=1 if SPLIT else 2)
    bars = (k_full, v_full, kv_empty, q_full, g_full, empty)
    smems = (q_smem, k_smem, v_smem, g_smem, lines_smem)
    lists = (tiles, count, q_offsets, k_offsets, batch, q_tokens, k_tokens)
    ring = (state, others, slots, wanted)
    passed = (item_smem, item_full, item_free, item_done)
    outs = (dq_desc, dq_rows_desc, dk_desc, dv_desc)
    if SPLIT:
        gl.warp_specialize(
            [
                (
                    consume_items,
                    (
                        outs,
                        smems,
                        bars,
                        ds_smem,
                        out_smem,
                        (ds_full, ds_empty),
                        passed,
                        lists,
                        ring,
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
                    consume_items,
                    (
                        outs,
                        smems,
                        bars,
                        ds_smem,
                        out_smem,
                        (ds_full, ds_empty),
                        passed,
                        lists,
                        ring,
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
                    add_items,
                    (
                        (dq_desc, dq_rows_desc),
                        k_smem,
                        ds_smem,
                        dq_smem,
                        (k_full, kv_empty),
                        (ds_full, ds_empty),
                        passed,
                        lists,
                        ring,
                        left,
                        right,
                        scale,
                        KV_HEADS,
                        GROUP,
                        ROWS,
                        KEYS,
                        LEFT,
                        RIGHT,
                    ),
                ),
                (
                    load_items,
                    (
                        (q_desc, k_desc, v_desc, g_desc, lse_desc, delta_desc),
                        smems,
                        bars,
                        passed,
                        lists,
                        ring,
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
                (
                    finish_items,
                    (
                        dq_piece_desc,
                        ring_ptr,
                        grad_q,
                        piece_smem,
                        piece_full,
                        passed,
                        lists,
                        ring,
                        scale,
                        KV_HEADS,
                        GROUP,
                        ROWS,
                        WIDTH,
                        LEFT,
                        RIGHT,
                    ),
                ),
            ],
            [4, 4, 1, WARPS],
            [176, 120, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    consume_items,
                    (
                        outs,
                        smems,
                        bars,
                        ds_smem,
                        out_smem,
                        (ds_full, ds_empty),
                        passed,
                        lists,
                        ring,
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
                    consume_items,
                    (
                        outs,
                        smems,
                        bars,
                        ds_smem,
                        out_smem,
                        (ds_full, ds_empty),
                        passed,
                        lists,
                        ring,
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
                    load_items,
                    (
                        (q_desc, k_desc, v_desc, g_desc, lse_desc, delta_desc),
                        smems,
                        bars,
                        passed,
                        lists,
                        ring,
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
                (
                    finish_items,
                    (
                        dq_piece_desc,
                        ring_ptr,
                        grad_q,
                        piece_smem,
                        piece_full,
                        passed,
                        lists,
                        ring,
                        scale,
                        KV_HEADS,
                        GROUP,
                        ROWS,
                        WIDTH,
                        LEFT,
                        RIGHT,
                    ),
                ),
            ],
            [4, 1, WARPS],
            [240, 24, 24],
        )

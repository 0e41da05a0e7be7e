"""The backward of jagged attention on Hopper, in Gluon: one fused kernel.

One CTA per SM, persistent. An item is one tile of keys of one key head; two consumer warpgroups
hold dK and dV of half of its keys each in registers and loop over the query tiles that see it, for
every query head of the group::

    S = K Qᵀ    P = exp2(factor·S − lse)    dP = V dOᵀ    dS = P ∘ (dP − delta)
    dV += P dO     dK += dS Q     dQ += dSᵀ K

or, with activations, P = f(scale·S) and dS = f'(scale·S) ∘ dP.

dS of both halves meets in shared memory, and each warpgroup computes half of dQ from the whole of
it. Where one tile holds all keys of a sequence, that is dq, and is written. Elsewhere it is added
to an fp32 buffer in global memory by TMA, in no fixed order, so its last bit differs between runs.
dK and dV have one owner and do not.

The buffer holds dQ in the order of the accumulator's registers (``backward.converting`` says
which): 16-byte stores without bank conflicts, and one contiguous block a tile. It is that of some
key heads alone, and a launch does these heads, of all sequences or of half of them. In the latter
case two warps that the products do not need turn the sums of the launch before into dq meanwhile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gem_attention.hopper.backward.consuming.device import consume_items
from gem_attention.hopper.backward.converting.device import PIECE, PIECES, WARPS, convert_items
from gem_attention.hopper.backward.items.device import LINES, PART_ROWS
from gem_attention.hopper.backward.loading.device import load_items


@gluon.jit(
    do_not_specialize=[
        "batch",
        "q_tokens",
        "k_tokens",
        "left",
        "right",
        "head_begin",
        "part",
        "head_before",
        "part_before",
        "zeros",
        "copies",
    ]
)
def backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    g_desc,
    lse_desc,
    delta_desc,
    dq_desc,
    piece_desc,
    rows_desc,
    dk_desc,
    dv_desc,
    sums,
    grad_q,
    tiles,
    bounds,
    q_offsets,
    k_offsets,
    batch,
    q_tokens,
    k_tokens,
    left,
    right,
    head_begin,
    part,
    head_before,
    part_before,
    zeros,
    copies,
    scale,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ALL_HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    DTYPE: gl.constexpr,
    ACTIVATIONS: gl.constexpr,
    SHARED: gl.constexpr,
):
    """Do the items of some key heads and one part of the list, and convert the launch before.

    Writes dk and dv (S, G·D), and dq of sequences whose keys fill no more than one tile; adds dq of
    the others to ``sums``. Where SHARED, every sequence has the queries of ``q_desc``, and all add
    to ``sums``, which holds these ``copies`` times.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, WIDTH], LAYOUT)
    g_smem = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, WIDTH], LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [1, KEYS, WIDTH], LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, KEYS, WIDTH], LAYOUT)
    ds_smem = gl.allocate_shared_memory(DTYPE, [2, KEYS, ROWS], LAYOUT)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, PART_ROWS, 32], WIDE)
    piece_smem = gl.allocate_shared_memory(gl.float32, [PIECES, PIECE, 32], WIDE)
    # TMA wants 128 bytes, which a flat layout alone does not get. The first half is for lse.
    lines_smem = gl.allocate_shared_memory(gl.float32, [2, 8, 32], WIDE)._reinterpret(
        gl.float32, [2 * LINES // ROWS, ROWS], FLAT
    )
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    piece_full = gl.allocate_shared_memory(gl.int64, [PIECES, 1], BARRIER)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(PIECES):
        mbarrier.init(piece_full.index(i), count=1)
    bars = (k_full, v_full, kv_empty, q_full, g_full, empty)
    smems = (q_smem, k_smem, v_smem, g_smem, lines_smem)
    lists = (tiles, bounds, q_offsets, k_offsets, batch, q_tokens, k_tokens)
    outs = (dq_desc, rows_desc, dk_desc, dv_desc)
    gl.warp_specialize(
        [
            (
                consume_items,
                (
                    outs,
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
                    SHARED,
                ),
            ),
            (
                consume_items,
                (
                    outs,
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
                    SHARED,
                ),
            ),
            (
                load_items,
                (
                    (q_desc, k_desc, v_desc, g_desc, lse_desc, delta_desc),
                    smems,
                    bars,
                    lists,
                    head_begin,
                    part,
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
                    SHARED,
                ),
            ),
            (
                convert_items,
                (
                    piece_desc,
                    sums,
                    grad_q,
                    piece_smem,
                    piece_full,
                    lists,
                    (head_before, part_before, zeros),
                    scale,
                    KV_HEADS,
                    GROUP,
                    ALL_HEADS,
                    ROWS,
                    KEYS,
                    WIDTH,
                    LEFT,
                    RIGHT,
                ),
            ),
        ],
        [4, 1, WARPS],
        [240, 24, 24],
    )

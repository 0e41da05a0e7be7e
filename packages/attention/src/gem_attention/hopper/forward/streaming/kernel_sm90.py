"""The forward of jagged attention on Hopper, in Gluon: softmax, or an activation of the scores.

One CTA per SM, persistent. A producer warp loads tiles of Q, K and V with TMA; two or three
consumer warpgroups of 64 query rows each keep the product S of one key tile and P·V of the one
before it in flight together, and compute the weights P meanwhile. Key tiles are taken from the last
to the first: the last is the only one that a full softmax must mask, and it is the prologue of the
pipeline anyway. Under a window only tiles on its edges are masked.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gem_attention.hopper.forward.device import NUMBERS
from gem_attention.hopper.forward.streaming.device import consume, produce


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
    ACTIVATION: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SLOTS: gl.constexpr,
    EVEN: gl.constexpr,
    SHARED: gl.constexpr,
):
    """Write out (T, H·D), and under softmax lse (T, H).

    One query tile of CONSUMERS·ROWS rows and one head an item; SLOTS of these tiles have room.
    ACTIVATION is "softmax" or a name of ``gem_attention.activations``. With EVEN the last keys are
    masked only where they do not fill their tile, a branch that pays if most do. With SHARED the
    queries are those of one sequence, and every sequence has them.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(DTYPE, [SLOTS * CONSUMERS, ROWS, WIDTH], LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, WIDTH], LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, WIDTH], LAYOUT)
    o_smem = gl.allocate_shared_memory(DTYPE, [CONSUMERS, ROWS, WIDTH], LAYOUT)
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS * CONSUMERS * NUMBERS, 1], FLAT)
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(SLOTS * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    smems = (q_smem, k_smem, v_smem, o_smem, numbers)
    lists = (tiles, count, q_offsets, k_offsets, batch, q_tokens, k_tokens)
    window = (left, right)
    mine = (o_desc, lse, smems, bars, lists, window, scale)
    loaded = ((q_desc, k_desc, v_desc), smems, bars, lists, window)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (mine, 0, CONSUMERS, HEADS, LEFT, RIGHT, ACTIVATION, EVEN)),
                (consume, (mine, 1, CONSUMERS, HEADS, LEFT, RIGHT, ACTIVATION, EVEN)),
                (produce, (loaded, CONSUMERS, HEADS, GROUP, LEFT, RIGHT, SHARED)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (mine, 0, CONSUMERS, HEADS, LEFT, RIGHT, ACTIVATION, EVEN)),
                (consume, (mine, 1, CONSUMERS, HEADS, LEFT, RIGHT, ACTIVATION, EVEN)),
                (consume, (mine, 2, CONSUMERS, HEADS, LEFT, RIGHT, ACTIVATION, EVEN)),
                (produce, (loaded, CONSUMERS, HEADS, GROUP, LEFT, RIGHT, SHARED)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )

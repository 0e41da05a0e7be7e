"""What the loading warp of the Hopper backward does: fetch the tiles of its items by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gem_attention.hopper.backward.items.device import LINES, item_of, part_of
from gem_attention.hopper.device import BOUND, item_at, items_of, padded_row, queries_seeing


@gluon.jit
def load_items(
    descs,
    smems,
    bars,
    lists,
    head_begin,
    part,
    left,
    right,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SOFTMAX: gl.constexpr,
    SHARED: gl.constexpr,
):
    """Run the loading warp until no item is left."""
    TILE_BYTES: gl.constexpr = ROWS * WIDTH * 2 + (ROWS * 4 if SOFTMAX else 0)
    q_desc, k_desc, v_desc, g_desc, lse_desc, delta_desc = descs
    q_smem, k_smem, v_smem, g_smem, lines_smem = smems
    k_full, v_full, kv_empty, q_full, g_full, empty = bars
    dtype: gl.constexpr = q_smem.dtype
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    first_entry, entries = part_of(lists, part)
    step = 0
    for turn in range(items_of(entries * KV_HEADS, programs, program)):
        kv_head, sequence, tile, q_begin, q_length, k_begin, k_length = item_of(
            lists, first_entry, item_at(turn, programs, program), head_begin, KV_HEADS
        )
        padded = padded_row(q_begin, sequence, ROWS)
        first, stop = queries_seeing(
            tile * KEYS, KEYS, q_length, k_length, left, right, ROWS, LEFT, RIGHT
        )
        k_place = [BOUND, k_begin + k_length, BOUND - k_length + tile * KEYS, kv_head * WIDTH]
        mbarrier.wait(kv_empty, (turn & 1) ^ 1)
        mbarrier.expect(k_full, KEYS * WIDTH * 2)
        k_block = k_smem.index(0)._reinterpret(dtype, [1, 1, KEYS, WIDTH], k_desc.layout)
        tma.async_copy_global_to_shared(k_desc, k_place, k_full, k_block)
        # V is needed after the first queries, and is asked for after them.
        if first == stop:
            mbarrier.expect(v_full, KEYS * WIDTH * 2)
            v_block = v_smem.index(0)._reinterpret(dtype, [1, 1, KEYS, WIDTH], v_desc.layout)
            tma.async_copy_global_to_shared(v_desc, k_place, v_full, v_block)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            for q_tile in range(first, stop):
                stage = step % STAGES
                row = padded + q_tile * ROWS
                below = BOUND - q_length + q_tile * ROWS
                g_place = [BOUND, q_begin + q_length, below, head * WIDTH]
                q_place = g_place
                if SHARED:
                    q_place = [BOUND, q_length, below, head * WIDTH]
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(q_full.index(stage), TILE_BYTES)
                if SOFTMAX:
                    line = lines_smem.index(stage)._reinterpret(
                        gl.float32, [1, ROWS], lse_desc.layout
                    )
                    tma.async_copy_global_to_shared(
                        lse_desc, [head, row], q_full.index(stage), line
                    )
                block = q_smem.index(stage)._reinterpret(dtype, [1, 1, ROWS, WIDTH], q_desc.layout)
                tma.async_copy_global_to_shared(q_desc, q_place, q_full.index(stage), block)
                if (member == 0) & (q_tile == first):
                    mbarrier.expect(v_full, KEYS * WIDTH * 2)
                    v_block = v_smem.index(0)._reinterpret(
                        dtype, [1, 1, KEYS, WIDTH], v_desc.layout
                    )
                    tma.async_copy_global_to_shared(v_desc, k_place, v_full, v_block)
                mbarrier.expect(g_full.index(stage), TILE_BYTES)
                if SOFTMAX:
                    line = lines_smem.index(LINES // ROWS + stage)._reinterpret(
                        gl.float32, [1, ROWS], delta_desc.layout
                    )
                    tma.async_copy_global_to_shared(
                        delta_desc, [head, row], g_full.index(stage), line
                    )
                block = g_smem.index(stage)._reinterpret(dtype, [1, 1, ROWS, WIDTH], g_desc.layout)
                tma.async_copy_global_to_shared(g_desc, g_place, g_full.index(stage), block)
                step += 1

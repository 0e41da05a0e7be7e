"""What the converting warps of the Hopper backward do: dQ of the launch before into rows of dq.

They work beside the products: they fetch the sums that the launch before has left, write dq, and
write zeros in their place where a later launch adds there again. Each item of that launch brings an
equal share of its sequence's rows, so that the work is spread as the items are.

A part holds 64 rows and 64 columns in the order of the accumulator's registers::

    row = 16·warp + 8·upper + lane // 4        column = 8·group + 2·(lane % 4) + odd
    part[warp, group, lane // 4, lane % 4, upper, odd]
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gem_attention.hopper.backward.items.device import (
    PART_ROWS,
    SIDE,
    item_of,
    part_of,
    writes_alone,
)
from gem_attention.hopper.device import item_at, items_of, padded_row, warps_meet

# Rows of 32 numbers that are fetched at a time, and how many such fetches are under way.
PIECE = gl.constexpr(128)
PIECES = gl.constexpr(2)
WARPS = gl.constexpr(2)


@gluon.jit
def _fetch(row, loaded, desc, smem, full):
    """Ask for a piece."""
    stage = loaded % PIECES
    mbarrier.expect(full.index(stage), PIECE * 32 * 4)
    tma.async_copy_global_to_shared(desc, [row, 0], full.index(stage), smem.index(stage))


@gluon.jit
def _convert(chunk, out, row, rows, scale, STRIDE: gl.constexpr):
    """Write 16 rows and 64 columns of dQ to their place; ``out`` points at the first, ``row``."""
    IN: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [WARPS, 1], [1, 0])
    # Eight neighbours of a row in a thread's registers: two stores of 16 bytes.
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]],
        [[0, 32]],
        [],
        [16, SIDE],
    )
    x = chunk.load(IN) * scale
    x = x.reshape([1, SIDE // 8, 8, 4, 2, 2]).permute([0, 4, 2, 1, 3, 5])
    x = x.reshape([16, SIDE]).to(out.dtype.element_ty)
    x = gl.convert_layout(x, LAYOUT, assert_trivial=True)
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, SIDE, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(out + r[:, None] * STRIDE + c[None, :], x, mask=(row + r < rows)[:, None])


@gluon.jit
def convert_items(
    desc,
    sums,
    grad_q,
    smem,
    full,
    lists,
    before,
    scale,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ALL_HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    """Convert what the launch before has added.

    Args:
        desc: of ``sums``, a piece.
        sums: the buffer.
        grad_q: dq.
        smem: for PIECES pieces.
        full: a barrier a piece.
        lists: tile list and offsets.
        before: first key head and part of that launch, the part -1 where there was none; and
            whether zeros are wanted.
        scale: factor of dq.
        KV_HEADS: key heads of a launch.
        GROUP: query heads of a key head.
        ALL_HEADS: query heads of grad_q.
        ROWS: to which sequences are padded.
        KEYS: of a tile.
        WIDTH: of a head.
        LEFT: whether the window is bounded there.
        RIGHT: likewise.
    """
    head_begin, part, zeros = before
    HEADS: gl.constexpr = KV_HEADS * GROUP
    PARTS: gl.constexpr = WIDTH // SIDE
    PER_PART: gl.constexpr = PART_ROWS // PIECE
    PER_BLOCK: gl.constexpr = PARTS * PER_PART
    CHUNK: gl.constexpr = 16 * SIDE // 32
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    first, entries = part_of(lists, gl.maximum(part, 0))
    items = gl.where(part < 0, 0, entries * KV_HEADS)
    loaded = 0
    for turn in range(items_of(items, programs, program)):
        kv_head, sequence, tile, q_begin, q_length, _k_begin, k_length = item_of(
            lists, first, item_at(turn, programs, program), head_begin, KV_HEADS
        )
        tiles = (k_length + KEYS - 1) // KEYS
        blocks = (q_length + SIDE - 1) // SIDE
        mine = (gl.maximum(blocks - tile, 0) + tiles - 1) // tiles
        if writes_alone(k_length, KEYS, LEFT, RIGHT, False):
            mine = mine * 0
        pieces = mine * (GROUP * PER_BLOCK)
        # Pieces of one block, then of the next head's, then of the next block.
        above = (padded_row(q_begin, sequence, ROWS) // SIDE + tile) * HEADS
        above = (above + (kv_head - head_begin) * GROUP) * PER_BLOCK
        stride = tiles * (HEADS * PER_BLOCK)
        for piece in range(gl.minimum(pieces, PIECES)):
            row = above + piece // (GROUP * PER_BLOCK) * stride + piece % (GROUP * PER_BLOCK)
            _fetch(row * PIECE, loaded + piece, desc, smem, full)
        for piece in range(pieces):
            stage = loaded % PIECES
            mbarrier.wait(full.index(stage), (loaded // PIECES) & 1)
            number = piece // (GROUP * PER_BLOCK)
            rest = piece % (GROUP * PER_BLOCK)
            side = rest % PER_BLOCK
            head = kv_head * GROUP + rest // PER_BLOCK
            row = (tile + number * tiles) * SIDE + side % PER_PART * (SIDE // PER_PART)
            out = grad_q + (q_begin + row).to(gl.int64) * (ALL_HEADS * WIDTH)
            out += head * WIDTH + side // PER_PART * SIDE
            for i in gl.static_range(PIECE // CHUNK):
                chunk = smem.index(stage).slice(i * CHUNK, CHUNK)
                to = out + i * 16 * (ALL_HEADS * WIDTH)
                _convert(chunk, to, row + i * 16, q_length, scale, ALL_HEADS * WIDTH)
            if zeros:
                at = sums + (above + number * stride + rest).to(gl.int64) * (PIECE * 32)
                at += gl.arange(0, PIECE * 32, layout=FLAT)
                gl.store(at, gl.zeros([PIECE * 32], gl.float32, FLAT))
            warps_meet()
            later = piece + PIECES
            if later < pieces:
                row = above + later // (GROUP * PER_BLOCK) * stride + later % (GROUP * PER_BLOCK)
                _fetch(row * PIECE, loaded + PIECES, desc, smem, full)
            loaded += 1

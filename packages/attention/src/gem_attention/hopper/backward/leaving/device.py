"""How dQ of a tile of queries leaves the warps that made it: into its sum, or to its rows of dq."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from gem_attention.hopper.backward.items.device import PART_ROWS, SIDE
from gem_attention.hopper.device import add_to_global


@gluon.jit
def _to_registers_order(dq):
    """Order a part as its registers lie: four neighbours a thread, threads in turn."""
    parts = dq.reshape([4, 2, 8, SIDE // 8, 4, 2])
    parts = parts.permute([0, 3, 2, 4, 1, 5])
    return parts.reshape([PART_ROWS, 32])


@gluon.jit
def add_part(dq, smem, desc, place):
    """Add a part of dQ to its sum, once what was in ``smem`` before has left."""
    tma.store_wait(0)
    smem.store(_to_registers_order(dq))
    fence_async_shared()
    add_to_global(desc, [place * PART_ROWS, 0], smem)


@gluon.jit
def put_part(dq, scale, smem, desc, place, DTYPE: gl.constexpr):
    """Write a part of dQ to its rows and columns, once what was in ``smem`` before has left."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    out = smem._reinterpret(DTYPE, [2, SIDE, SIDE], LAYOUT).index(0)
    tma.store_wait(0)
    out.store((dq * scale).to(DTYPE))
    fence_async_shared()
    tma.async_copy_shared_to_global(
        desc, place, out._reinterpret(DTYPE, [1, 1, SIDE, SIDE], desc.layout)
    )


@gluon.jit
def next_queries(
    place, tile, head, first, stop, HEADS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr
):
    """Return part, tile and head of the next queries; after the last tile, of the next head."""
    place += HEADS * 2
    tile += 1
    if GROUP > 1:  # noqa: SIM102 - known when compiled; the other when it runs
        if tile == stop:
            tile = first
            head += 1
            place += PARTS - (stop - first) * (HEADS * 2)
    return place, tile, head

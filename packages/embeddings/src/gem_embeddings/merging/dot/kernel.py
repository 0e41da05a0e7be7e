"""Kernel of the products of rows and gradients, by which weights of ids learn. Private."""

import torch
import triton
import triton.language as tl

from gem_embeddings.merging.device import place_of
from gem_embeddings.merging.lines.kernel import FEATURE_BIT, PLACE, keys_of
from gem_jagged.launching import on_device

_TILE_ELEMENTS = 1024  # of a program, which is one warp
_WIDEST_BLOCK = 512


@triton.jit(do_not_specialize=["ids", "features"])
def _dot_kernel(
    weights_ptr, grad_ptr, keys_ptr, sources_ptr, scales_ptr, out_ptr, table_ptr, ids, features,
    SCALED: tl.constexpr, LAST: tl.constexpr, CLASS: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, T: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    mine = i < ids
    key = tl.load(keys_ptr + i, mask=mine, other=LAST)
    packed = tl.load(sources_ptr + i, mask=mine, other=0)
    f = packed >> FEATURE_BIT
    if CLASS >= 0:
        mine = mine & (tl.load(table_ptr + 5 * features + f) == CLASS)
    inside = mine & (key != LAST)
    place, width = place_of(table_ptr, f, key, features, WIDTH, ALIGN)
    source = tl.multiple_of(packed & PLACE, (ALIGN,))
    products = tl.zeros((T, BLOCK_E), dtype=tl.float32)
    for first in tl.static_range(0, COLUMNS, BLOCK_E):
        columns = first + tl.arange(0, BLOCK_E)
        mask = inside[:, None] & (columns[None, :] < width[:, None])
        x = tl.load(weights_ptr + place[:, None] + columns[None, :], mask=mask, other=0.0)
        g = tl.load(grad_ptr + source[:, None] + columns[None, :], mask=mask, other=0.0)
        products += x.to(tl.float32) * g.to(tl.float32)
    total = tl.sum(products, axis=1)
    if SCALED:
        total *= tl.load(scales_ptr + i, mask=inside, other=0.0)
    tl.store(out_ptr + i, total, mask=mine)


def launch_dot(weights_N, ids_I, bags_O, grad, places):
    """Return the product of the row of each id and of its gradient, summed over the columns."""
    ids = ids_I.shape[0]
    out = torch.empty(ids, dtype=torch.float32, device=weights_N.device)
    if ids == 0:
        return out
    keys, sources, scales, last = keys_of(ids_I, bags_O, None, places, 1.0)
    with on_device(out):
        for of in places.classes:
            block_e = min(of.columns, _WIDEST_BLOCK)
            block_t = min(128, _TILE_ELEMENTS // block_e)
            # One warp: lanes of several would write copies of a sum to the same place.
            _dot_kernel[(triton.cdiv(ids, block_t),)](
                weights_N, grad, keys, sources, scales, out, places.table, ids, places.features,
                SCALED=scales.shape[0] > 0, LAST=last,
                CLASS=of.number if len(places.classes) > 1 else -1, WIDTH=of.width,
                ALIGN=places.align, T=block_t, COLUMNS=of.columns, BLOCK_E=block_e, num_warps=1,
            )  # fmt: skip
    return out

"""Kernel and launchers of ``jagged_index_select``; the forward is a move of ``gem_jagged.moves``.

The backward is driven by its output too: every token reads the gradients of its copies in the
order in which its sequence was chosen. So nothing is added by atomics and every run has the same
bits.
"""

import torch
import triton
import triton.language as tl

from gem_jagged.device import last_sequence, rows_of_tile
from gem_jagged.launching import in_a_row, on_device
from gem_jagged.moves.kernel import launch_select


@triton.jit(do_not_specialize=["rows", "batch"])
def _backward_kernel(
    grad_ptr, stride_t, stride_d, offsets_ptr, copies_ptr, begins_ptr, ends_ptr, out_ptr, rows,
    batch, width,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    first = last_sequence(offsets_ptr, offsets_ptr, start, batch, 0, False)
    row, in_row, b, known, _ = rows_of_tile(
        offsets_ptr, offsets_ptr, start, first, rows, batch, False, BLOCK_ROWS
    )
    place = row - tl.load(offsets_ptr + b, mask=known, other=0).to(tl.int64)
    copy = tl.load(copies_ptr + b, mask=known, other=0)
    copies = tl.load(copies_ptr + b + 1, mask=known, other=0) - copy
    most = tl.max(copies, axis=0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = (d < width)[None, :]
    at_d = d.to(tl.int64)[None, :] * stride_d
    total = tl.zeros((BLOCK_ROWS, BLOCK_D), dtype=tl.float64 if WIDE else tl.float32)
    for k in range(0, most, 4):
        # Four copies at once, so that their loads do not wait for each other.
        for i in tl.static_range(4):
            has = known & (k + i < copies)
            begin = tl.load(begins_ptr + copy + k + i, mask=has, other=0).to(tl.int64)
            end = tl.load(ends_ptr + copy + k + i, mask=has, other=0).to(tl.int64)
            has = has & (begin + place < end)
            at = grad_ptr + ((begin + place) * stride_t)[:, None] + at_d
            total += tl.load(at, mask=has[:, None] & in_d, other=0.0).to(total.dtype)
    tl.store(out_ptr + row[:, None] * width + d[None, :], total, mask=in_row[:, None] & in_d)


def launch_forward(values_TD, offsets_O, indices_I, selected_offsets_O, selected_tokens):
    """Gather whole sequences."""
    return launch_select(values_TD, offsets_O, indices_I, selected_offsets_O, selected_tokens)


def launch_backward(grad_SD, offsets_O, indices_I, selected_offsets_O, total_tokens):
    """Add up the gradients of the copies of each token."""
    batch, width = offsets_O.shape[0] - 1, grad_SD.shape[1]
    out = grad_SD.new_empty((total_tokens, width))
    if out.numel() == 0:
        return out
    offsets_O, selected_offsets_O = in_a_row(offsets_O, selected_offsets_O)
    # Few bits, so that sorting passes over them few times; an index that names no sequence stays
    # one. Stable, so that copies are added in the order in which they were chosen.
    bits = torch.int16 if batch < 2**15 - 1 else torch.int32 if batch < 2**31 - 1 else torch.int64
    chosen, order = torch.sort(indices_I.clamp(-1, batch).to(bits), stable=True)
    names = torch.arange(batch + 1, device=chosen.device, dtype=chosen.dtype)
    copies = torch.searchsorted(chosen, names)
    begins, ends = selected_offsets_O[:-1][order], selected_offsets_O[1:][order]
    block_d = min(triton.next_power_of_2(width), 512)
    block_rows = max(1, 8192 // out.element_size() // block_d)
    with on_device(out):
        _backward_kernel[(triton.cdiv(total_tokens, block_rows), triton.cdiv(width, block_d))](
            grad_SD, *grad_SD.stride(), offsets_O, copies, begins, ends, out, total_tokens,
            batch, width,
            WIDE=out.dtype == torch.float64,
            BLOCK_ROWS=block_rows, BLOCK_D=block_d,
        )  # fmt: skip
    return out

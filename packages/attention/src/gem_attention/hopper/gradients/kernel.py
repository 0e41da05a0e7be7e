"""What stands before and after the fused backward on Hopper, in plain Triton.

Before: delta and the logsumexp of each row, into buffers in which every sequence begins at a
multiple of 64 rows, so that the backward reads them with TMA and never meets the next sequence.
After: dQ from its fp32 buffer of blocks into rows of the gradient.

A block holds 64 rows and half of a head's columns in the order of the accumulator's registers::

    row = 16·warp + 8·upper + lane // 4        column = 8·group + 2·(lane % 4) + odd
    block[warp, group, lane // 4, lane % 4, upper, odd]
"""

import triton
import triton.language as tl


@triton.jit
def _rows_of(tiles, q_offsets, batch, q_tokens, entry):
    sequence = tl.load(tiles + 2 * entry)
    tile = tl.load(tiles + 2 * entry + 1)
    begin = tl.load(q_offsets + sequence)
    end = tl.load(q_offsets + tl.minimum(sequence + 1, batch))
    begin = tl.minimum(tl.maximum(begin, 0), q_tokens).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), q_tokens).to(tl.int32)
    end = tl.where(sequence == batch, q_tokens, end)
    return sequence, tile, begin, tl.maximum(end - begin, 0)


@triton.jit(do_not_specialize=["batch", "q_tokens", "padded_tokens"])
def prepare_kernel(
    out,
    grad_out,
    lse,
    grad_lse,
    delta_HP,
    lse_HP,
    tiles,
    count,
    q_offsets,
    batch,
    q_tokens,
    padded_tokens,
    stride_gt,
    stride_gh,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
):
    """Write delta and lse (base 2) of one tile of 2·ROWS rows and one head.

    delta = rowsum(dO ∘ out) − dlse. Padding, and rows that see no key, get delta 0 and lse +inf,
    so that their softmax weights are 0.
    """
    entry = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    if entry >= tl.load(count):
        return
    sequence, tile, begin, length = _rows_of(tiles, q_offsets, batch, q_tokens, entry)
    padded = ((begin >> 6) + sequence) << 6
    col = tl.arange(0, WIDTH)
    for half in tl.static_range(2):
        row = tile * (2 * ROWS) + half * ROWS + tl.arange(0, ROWS)
        there = row < length
        at = (begin + row).to(tl.int64)
        o = tl.load(
            out + at[:, None] * (HEADS * WIDTH) + head * WIDTH + col[None, :],
            mask=there[:, None],
            other=0.0,
        )
        g = tl.load(
            grad_out + at[:, None] * stride_gt + head * stride_gh + col[None, :],
            mask=there[:, None],
            other=0.0,
        )
        delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
        if HAS_GRAD_LSE:
            delta -= tl.load(grad_lse + at * HEADS + head, mask=there, other=0.0)
        natural = tl.load(lse + at * HEADS + head, mask=there, other=float("inf"))
        seeing = natural != float("-inf")
        to = head.to(tl.int64) * padded_tokens + padded + row
        in_pad = row < (length + ROWS - 1) // ROWS * ROWS
        tl.store(delta_HP + to, tl.where(seeing, delta, 0.0), mask=in_pad)
        tl.store(
            lse_HP + to,
            tl.where(seeing, natural * 1.4426950408889634, float("inf")),
            mask=in_pad,
        )


@triton.jit(do_not_specialize=["batch", "q_tokens"])
def finish_kernel(
    blocks,
    grad_q,
    tiles,
    count,
    q_offsets,
    batch,
    q_tokens,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write dq of one tile of 2·ROWS rows and one head from its blocks."""
    HALF: tl.constexpr = WIDTH // 2
    entry = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    if entry >= tl.load(count):
        return
    sequence, tile, begin, length = _rows_of(tiles, q_offsets, batch, q_tokens, entry)
    padded_tile = (begin >> 6) + sequence + tile * 2
    inner = tl.arange(0, ROWS * HALF)
    col = tl.arange(0, HALF)
    for half in tl.static_range(2):
        row = (tile * 2 + half) * ROWS + tl.arange(0, ROWS)
        there = row < length
        in_use = (tile * 2 + half) * ROWS < length
        for side in tl.static_range(2):
            block = ((padded_tile + half).to(tl.int64) * HEADS + head) * 2 + side
            x = tl.load(blocks + block * (ROWS * HALF) + inner, mask=in_use & (inner >= 0))
            x = tl.reshape(x, [4, HALF // 8, 8, 4, 2, 2])
            x = tl.reshape(tl.permute(x, [0, 4, 2, 1, 3, 5]), [ROWS, HALF])
            to = (begin + row).to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH
            tl.store(
                grad_q + to + side * HALF + col[None, :],
                (x * scale).to(grad_q.dtype.element_ty),
                mask=there[:, None],
            )

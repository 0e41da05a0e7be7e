"""What stands before the fused backward on Hopper, in plain Triton.

Delta and the logsumexp of each row go into buffers in which every sequence begins at a multiple of
64 rows, so that the backward reads them with TMA and never meets the next sequence. The ring of dQ
(``gem_attention.hopper.backward.items``) and its counters are cleared, as far as they are used, and
dq of rows that no key sees is set to 0, because no item will.
"""

import triton
import triton.language as tl


@triton.jit
def _rows_of(offsets, batch, tokens, sequence, TILED: tl.constexpr):
    begin = tl.load(offsets + sequence)
    end = tl.load(offsets + tl.minimum(sequence + 1, batch))
    begin = tl.minimum(tl.maximum(begin, 0), tokens).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), tokens).to(tl.int32)
    if TILED:
        end = tl.where(sequence == batch, tokens, end)
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def _clear(values, size, BLOCK: tl.constexpr):
    """Set numbers to 0, a share in each program."""
    inner = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], values.dtype.element_ty)
    for i in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        at = values + i.to(tl.int64) * BLOCK
        tl.store(at + inner, zeros, mask=inner < size - i * BLOCK)


@triton.jit(do_not_specialize=["batch", "q_tokens", "k_tokens", "padded_tokens", "slots", "wanted"])
def prepare_kernel(
    out,
    grad_out,
    lse,
    grad_lse,
    delta_HP,
    lse_HP,
    grad_q,
    ring,
    state,
    others,
    tiles,
    count,
    q_offsets,
    k_offsets,
    batch,
    q_tokens,
    k_tokens,
    padded_tokens,
    slots,
    wanted,
    stride_gt,
    stride_gh,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
):
    """Clear the ring, and write delta and lse (base 2) of one tile of 2·ROWS rows and one head.

    delta = rowsum(dO ∘ out) − dlse. Padding, and rows that see no key, get delta 0 and lse +inf,
    so that their softmax weights are 0. Without SOFTMAX there are neither.
    """
    used = tl.minimum(tl.maximum(tl.load(others + batch) * GROUP, wanted), slots)
    _clear(state, 1 + (batch + 1) * (HEADS // GROUP) + used, 1024)
    for i in range(tl.program_id(0), used, tl.num_programs(0)):
        at = ring + i.to(tl.int64) * (ROWS * WIDTH)
        tl.store(at + tl.arange(0, ROWS * WIDTH), tl.zeros([ROWS * WIDTH], tl.float32))
    entry = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    if entry >= tl.load(count):
        return
    sequence = tl.load(tiles + 2 * entry)
    tile = tl.load(tiles + 2 * entry + 1)
    begin, length = _rows_of(q_offsets, batch, q_tokens, sequence, True)
    _keys_begin, keys = _rows_of(k_offsets, batch, k_tokens, sequence, False)
    padded = ((begin >> 6) + sequence) << 6
    col = tl.arange(0, WIDTH)
    for half in tl.static_range(2):
        row = tile * (2 * ROWS) + half * ROWS + tl.arange(0, ROWS)
        there = row < length
        at = (begin + row).to(tl.int64)
        mine = at[:, None] * (HEADS * WIDTH) + head * WIDTH + col[None, :]
        if keys == 0:
            nothing = tl.zeros([ROWS, WIDTH], grad_q.dtype.element_ty)
            tl.store(grad_q + mine, nothing, mask=there[:, None])
        if SOFTMAX:
            o = tl.load(out + mine, mask=there[:, None], other=0.0)
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

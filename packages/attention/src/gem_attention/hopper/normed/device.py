"""What the Hopper kernels of ``normed_attention`` do beside products: items, and both norms."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_attention.hopper.device import sequence_rows

# Rows that a warpgroup normalises at a time: as many as registers hold beside two accumulators.
PASS_ROWS = gl.constexpr(16)


@gluon.jit
def sequence_of(item, lists):
    """Return the first token and key of an item, their number, and its first key in the sequence.

    Items before the number of the list's entries are its tiles of keys; the others are sequences,
    of which those without keys have tokens here, and the rows behind the last one.
    """
    tiles, count, q_offsets, k_offsets, batch, q_tokens, k_tokens = lists
    entries = gl.load(count)
    listed = item < entries
    entry = tiles + 2 * gl.where(listed, item, 0)
    sequence = gl.where(listed, gl.load(entry), item - entries)
    key = gl.where(listed, gl.load(entry + 1), 0)
    q_begin, q_length = sequence_rows(q_offsets, sequence, batch, q_tokens, True)
    k_begin, k_length = sequence_rows(k_offsets, sequence, batch, k_tokens, True)
    is_tail = sequence == batch
    reads = gl.where(listed, is_tail == 0, is_tail | (k_length == 0))
    return q_begin, gl.where(reads, q_length, 0), k_begin, gl.where(listed, k_length, 0), key


@gluon.jit
def normalise(x_tile, to_tile, rstds, place, eps):
    """Write LayerNorm of 64 rows to a tile, that of x too, and 1/deviation to four places."""
    WIDTH: gl.constexpr = x_tile.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in gl.static_range(x_tile.shape[0] // PASS_ROWS):
        x_td = x_tile.slice(i * PASS_ROWS, PASS_ROWS).load(LAYOUT).to(gl.float32)
        x_td = x_td - (gl.sum(x_td, 1) / WIDTH)[:, None]
        rstd_t = gl.rsqrt(gl.sum(x_td * x_td, 1) / WIDTH + eps)
        rstds.index(place + i).store(rstd_t)
        to_tile.slice(i * PASS_ROWS, PASS_ROWS).store((x_td * rstd_t[:, None]).to(x_tile.dtype))


@gluon.jit
def go_through_norm(a_tile, grad_tile, eps):
    """Turn 64 rows a into the gradient of a, from that of RmsNorm(a), where they lie."""
    WIDTH: gl.constexpr = a_tile.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in gl.static_range(a_tile.shape[0] // PASS_ROWS):
        part = a_tile.slice(i * PASS_ROWS, PASS_ROWS)
        a_td = part.load(LAYOUT).to(gl.float32)
        grad_td = grad_tile.slice(i * PASS_ROWS, PASS_ROWS).load(LAYOUT).to(gl.float32)
        along_t = gl.sum(a_td * grad_td, 1) / WIDTH
        rstd_t = gl.rsqrt(gl.sum(a_td * a_td, 1) / WIDTH + eps)
        along_t = along_t * (rstd_t * rstd_t * rstd_t)
        part.store((grad_td * rstd_t[:, None] - a_td * along_t[:, None]).to(a_tile.dtype))

"""``normed_attention`` of tokens with one head and few keys: a forward alone, in one pass.

A program keeps the keys and values of a sequence and walks over a stretch of its tokens: a row is
read once, both norms see it whole in registers, and one row is written.

f(0) = 0, and rows beyond the end are read as 0, so no score is masked.
"""

import triton
import triton.language as tl

from gem_attention.portable.activations.device import activated
from gem_attention.portable.device import PRECISION
from gem_attention.tiling.device import load_rows, sequence, store_rows

_COUNTS = ["q_tokens", "k_tokens", "batch"]


@triton.jit
def _statistics(x_td, eps, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the mean of each row and one over its standard deviation."""
    mean_t = tl.sum(x_td, 1) / WIDTH
    centred = _used(x_td - mean_t[:, None], WIDTH, BLOCK_D)
    return mean_t, 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / WIDTH + eps)


@triton.jit
def _used(x_td, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the rows with 0 in the columns behind their width."""
    if WIDTH != BLOCK_D:
        x_td = tl.where((tl.arange(0, BLOCK_D) < WIDTH)[None, :], x_td, 0.0)
    return x_td


@triton.jit
def _rows_again(
    ptr, stride, row, rows, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load rows that were loaded before, from the cache, instead of holding them in registers."""
    r = tl.arange(0, BLOCK_T)
    w = tl.arange(0, BLOCK_D)
    at = ptr + tl.cast(row, tl.int64) * stride + (r[:, None] * stride + w[None, :])
    used = (row + r < rows)[:, None] & (w < WIDTH)[None, :]
    # Another policy than the first load has: of two equal loads the compiler would make one.
    return tl.load(at, mask=used, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit(do_not_specialize=_COUNTS)
def normed_attention_forward_kernel(
    x_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    entries_ptr,
    count_ptr,
    q_offsets_ptr,
    k_offsets_ptr,
    q_tokens,
    k_tokens,
    batch,
    scale,
    eps,
    out_eps,
    stride_x_t,
    stride_k_s,
    stride_v_s,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the output of a stretch of tokens of one sequence."""
    item = tl.program_id(0)
    if item >= tl.load(count_ptr):
        return
    b = tl.load(entries_ptr + item * 2)
    first = tl.load(entries_ptr + item * 2 + 1) * STRETCH
    q_begin, ql = sequence(q_offsets_ptr, b, batch, q_tokens, True)
    k_begin, kl = sequence(k_offsets_ptr, b, batch, k_tokens, False)
    k_sk = load_rows(k_ptr, stride_k_s, k_begin, k_begin + kl, True, BLOCK_S, WIDTH, BLOCK_D)
    v_sk = load_rows(v_ptr, stride_v_s, k_begin, k_begin + kl, True, BLOCK_S, WIDTH, BLOCK_D)
    x_ptr += q_begin * stride_x_t
    out_ptr += q_begin * WIDTH
    for t0 in tl.range(first, tl.minimum(first + STRETCH, ql), BLOCK_T, num_stages=STAGES):
        x_td = load_rows(x_ptr, stride_x_t, t0, ql, True, BLOCK_T, WIDTH, BLOCK_D).to(tl.float32)
        mean_t, rstd_t = _statistics(x_td, eps, WIDTH, BLOCK_D)
        q_td = _used((x_td - mean_t[:, None]) * rstd_t[:, None], WIDTH, BLOCK_D)
        score_ts = tl.dot(q_td.to(k_sk.dtype), tl.trans(k_sk), input_precision=PRECISION)
        p_ts = activated(score_ts, scale, 0, ACTIVATION, FAST).to(v_sk.dtype)
        a_td = tl.dot(p_ts, v_sk, q_td, input_precision=PRECISION)
        rstd_t = 1.0 / tl.sqrt_rn(tl.sum(a_td * a_td, 1) / WIDTH + out_eps)
        x_td = _rows_again(x_ptr, stride_x_t, t0, ql, BLOCK_T, WIDTH, BLOCK_D)
        out_td = a_td * rstd_t[:, None] + x_td
        store_rows(out_ptr, WIDTH, t0, ql, out_td, BLOCK_T, WIDTH, BLOCK_D)

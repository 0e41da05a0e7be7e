"""``normed_attention`` of tokens with several heads: what lies around attention, row by row.

Keys and values of all heads do not fit a multiprocessor, and the norms run over all heads, so that
attention is a kernel of its own here (``generalized_attention``). What is saved is passes: the last
norm forms q again from x, which it reads for the residual anyway, and the last pass of the backward
adds up both gradients of q, goes through the first norm and adds the residual's.
"""

import triton
import triton.language as tl


@triton.jit
def _sums(x_td, y_td):
    """Return the sums of the rows of two tiles: what warps tell each other takes long."""
    return tl.split(tl.sum(tl.join(x_td, y_td), axis=1))


@triton.jit(do_not_specialize=["rows"])
def normed_heads_out_kernel(
    x_ptr,
    read_ptr,
    out_ptr,
    rows,
    eps,
    out_eps,
    stride_x_t,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write RmsNorm(read + q) + x with q = LayerNorm(x), rounded as attention has read it."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.arange(0, BLOCK_D)
    used = (r < rows)[:, None] & (w < WIDTH)[None, :]
    at = (r * WIDTH)[:, None] + w[None, :]
    x_td = tl.load(x_ptr + (r * stride_x_t)[:, None] + w[None, :], mask=used, other=0.0)
    a_td = tl.load(read_ptr + at, mask=used, other=0.0).to(tl.float32)
    x_td = x_td.to(tl.float32)
    q_td = tl.where(used, x_td - (tl.sum(x_td, 1) / WIDTH)[:, None], 0.0)
    q_td *= tl.rsqrt(tl.sum(q_td * q_td, 1) / WIDTH + eps)[:, None]
    a_td += q_td.to(read_ptr.dtype.element_ty).to(tl.float32)
    rstd_t = tl.rsqrt(tl.sum(a_td * a_td, 1) / WIDTH + out_eps)
    tl.store(out_ptr + at, a_td * rstd_t[:, None] + x_td, mask=used)


@triton.jit(do_not_specialize=["rows"])
def normed_heads_finish_kernel(
    x_ptr,
    grad_q_ptr,
    grad_a_ptr,
    grad_ptr,
    grad_x_ptr,
    rows,
    eps,
    stride_x_t,
    stride_g_t,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the gradient of x from that of q by attention, that of a, and that of the output."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.arange(0, BLOCK_D)
    used = (r < rows)[:, None] & (w < WIDTH)[None, :]
    at = (r * WIDTH)[:, None] + w[None, :]
    x_td = tl.load(x_ptr + (r * stride_x_t)[:, None] + w[None, :], mask=used, other=0.0)
    grad_q_td = tl.load(grad_q_ptr + at, mask=used, other=0.0).to(tl.float32)
    grad_q_td += tl.load(grad_a_ptr + at, mask=used, other=0.0).to(tl.float32)
    grad_td = tl.load(grad_ptr + (r * stride_g_t)[:, None] + w[None, :], mask=used, other=0.0)
    x_td = x_td.to(tl.float32)
    sum_t, sum_q_t = _sums(x_td, grad_q_td)
    q_td = tl.where(used, x_td - (sum_t / WIDTH)[:, None], 0.0)
    square_t, along_t = _sums(q_td * q_td, q_td * grad_q_td)
    rstd_t = tl.rsqrt(square_t / WIDTH + eps)
    q_td *= (rstd_t * rstd_t * along_t / WIDTH)[:, None]
    grad_q_td -= (sum_q_t / WIDTH)[:, None] + q_td
    grad_x_td = grad_q_td * rstd_t[:, None] + grad_td.to(tl.float32)
    tl.store(grad_x_ptr + at, grad_x_td, mask=used)

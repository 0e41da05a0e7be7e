"""Triton kernels of ``rotary_heads``: a warp takes all heads of a token, and its angles once."""

import triton
import triton.language as tl
from torch import empty_like

from gem_jagged.launching import on_device

_TOKENS = 4  # of a program
_WARP_ELEMENTS = 1024


@triton.jit
def _angles(
    position_ptr, gap_ptr, rates_ptr, t, width, time_scale,
    GAPS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return cosine and sine of a token's pairs; fp32."""
    pair = tl.arange(0, BLOCK_K // 2)
    known = pair < width // 2
    angle = tl.load(position_ptr + t).to(tl.float32) * tl.load(
        rates_ptr + pair, mask=known, other=0.0
    )
    if GAPS:
        log_gap = tl.log(1.0 + tl.load(gap_ptr + t).to(tl.float32) / time_scale)
        angle += log_gap * tl.load(rates_ptr + width // 2 + pair, mask=known, other=0.0)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _turned(x, cos, sin, H: tl.constexpr, BLOCK_K: tl.constexpr):
    """Turn each pair of columns of each head."""
    even, odd = tl.split(tl.reshape(x, (H, BLOCK_K // 2, 2)))
    cos, sin = cos[None, :], sin[None, :]
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (H, BLOCK_K))


@triton.jit
def _at(t, first, width, row, H: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the elements of heads of a token."""
    h, column = tl.arange(0, H), tl.arange(0, BLOCK_K)
    return t * row + (first + h)[:, None] * width + column[None, :]


@triton.jit
def _mask(count, width, H: tl.constexpr, BLOCK_K: tl.constexpr):
    h, column = tl.arange(0, H), tl.arange(0, BLOCK_K)
    return (h < count)[:, None] & (column < width)[None, :]


@triton.jit
def _heads_forward(
    qkv_ptr, out_ptr, t, first, count, width, row, cos, sin, eps,
    NORMED: tl.constexpr, TURNED: tl.constexpr, H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    mask = _mask(count, width, H, BLOCK_K)
    x = tl.load(qkv_ptr + _at(t, first, width, row, H, BLOCK_K), mask=mask, other=0.0)
    x = x.to(tl.float32)
    if NORMED:
        x *= tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]
    if TURNED:
        x = _turned(x, cos, sin, H, BLOCK_K)
    tl.store(out_ptr + _at(t, 0, width, count * width, H, BLOCK_K), x, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    qkv_ptr, position_ptr, gap_ptr, rates_ptr, q_ptr, k_ptr, v_ptr, tokens, heads, key_heads, width,
    time_scale, eps,
    NORMED: tl.constexpr, TURNED: tl.constexpr, GAPS: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, BLOCK_K: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    row = (heads + 2 * key_heads) * width
    begin = tl.program_id(0).to(tl.int64) * TOKENS
    for turn in range(0, tl.minimum(TOKENS, tokens - begin).to(tl.int32)):
        t = begin + turn
        cos, sin = 0.0, 0.0
        if TURNED:
            cos, sin = _angles(
                position_ptr, gap_ptr, rates_ptr, t, width, time_scale, GAPS, BLOCK_K
            )
        if H:
            _heads_forward(
                qkv_ptr, q_ptr, t, 0, heads, width, row, cos, sin, eps, NORMED, TURNED, H, BLOCK_K
            )
        _heads_forward(
            qkv_ptr, k_ptr, t, heads, key_heads, width, row, cos, sin, eps, NORMED, TURNED, G,
            BLOCK_K,
        )  # fmt: skip
        if VALUES:
            _heads_forward(
                qkv_ptr, v_ptr, t, heads + key_heads, key_heads, width, row, cos, sin, eps, False,
                False, G, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _heads_backward(
    grad_ptr, qkv_ptr, out_ptr, t, first, count, width, row, cos, sin, eps,
    NORMED: tl.constexpr, TURNED: tl.constexpr, H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    mask = _mask(count, width, H, BLOCK_K)
    at = _at(t, first, width, row, H, BLOCK_K)
    own = _at(t, 0, width, count * width, H, BLOCK_K)
    g = tl.load(grad_ptr + own, mask=mask, other=0.0).to(tl.float32)
    if TURNED:
        g = _turned(g, cos, -sin, H, BLOCK_K)
    if NORMED:
        n = tl.load(qkv_ptr + at, mask=mask, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(n * n, axis=1) / width + eps)[:, None]
        n *= r
        g = (g - n * (tl.sum(g * n, axis=1) / width)[:, None]) * r
    tl.store(out_ptr + at, g, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    grad_q_ptr, grad_k_ptr, grad_v_ptr, qkv_ptr, position_ptr, gap_ptr, rates_ptr, out_ptr, tokens,
    heads, key_heads, width, time_scale, eps,
    NORMED: tl.constexpr, TURNED: tl.constexpr, GAPS: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, BLOCK_K: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    row = (heads + 2 * key_heads) * width
    begin = tl.program_id(0).to(tl.int64) * TOKENS
    for turn in range(0, tl.minimum(TOKENS, tokens - begin).to(tl.int32)):
        t = begin + turn
        cos, sin = 0.0, 0.0
        if TURNED:
            cos, sin = _angles(
                position_ptr, gap_ptr, rates_ptr, t, width, time_scale, GAPS, BLOCK_K
            )
        if H:
            _heads_backward(
                grad_q_ptr, qkv_ptr, out_ptr, t, 0, heads, width, row, cos, sin, eps, NORMED,
                TURNED, H, BLOCK_K,
            )  # fmt: skip
        _heads_backward(
            grad_k_ptr, qkv_ptr, out_ptr, t, heads, key_heads, width, row, cos, sin, eps, NORMED,
            TURNED, G, BLOCK_K,
        )  # fmt: skip
        if VALUES:
            _heads_backward(
                grad_v_ptr, qkv_ptr, out_ptr, t, heads + key_heads, key_heads, width, row, cos, sin,
                eps, False, False, G, BLOCK_K,
            )  # fmt: skip


def _launch_constants(qkv, position_T, gap_T, heads, key_heads, *, normed):
    h, g = (n and triton.next_power_of_2(n) for n in (heads, key_heads))
    block_k = triton.next_power_of_2(qkv.shape[2])
    return {
        "NORMED": normed, "TURNED": position_T is not None, "GAPS": gap_T is not None,
        "H": h, "G": g, "BLOCK_K": block_k, "TOKENS": _TOKENS,
        "num_warps": max(1, max(h, g) * block_k // _WARP_ELEMENTS),
    }  # fmt: skip


def _or(tensor, other):
    return other if tensor is None else tensor


def launch_forward(
    qkv, position_T, gap_T, rates, heads, key_heads, *, normed, copies_values, time_scale_s, eps
):
    """Split, normalise and turn the heads of all tokens; values of no token where not copied."""
    qkv = qkv.contiguous()
    tokens, _, width = qkv.shape
    q = qkv.new_empty(tokens, heads, width)
    k = qkv.new_empty(tokens, key_heads, width)
    v = qkv.new_empty(tokens if copies_values else 0, key_heads, width)
    if tokens:
        with on_device(qkv):
            _forward_kernel[(triton.cdiv(tokens, _TOKENS),)](
                qkv, _or(position_T, rates), _or(gap_T, rates), rates, q, k, v, tokens, heads,
                key_heads, width, float(time_scale_s), eps, VALUES=copies_values,
                **_launch_constants(qkv, position_T, gap_T, heads, key_heads, normed=normed),
            )  # fmt: skip
    return q, k, v


def launch_backward(
    grad_q, grad_k, grad_v, qkv, position_T, gap_T, rates, *, normed, time_scale_s, eps,
    beside=None,
):  # fmt: skip
    """Return the gradient of the heads of all tokens; ``beside`` it, if it holds the values'."""
    qkv = qkv.contiguous()
    grad_q, grad_k = grad_q.contiguous(), grad_k.contiguous()
    if beside is None:
        grad_v = grad_v.contiguous()
    tokens, heads, width = grad_q.shape
    key_heads = grad_k.shape[1]
    out = empty_like(qkv) if beside is None else beside
    if tokens:
        with on_device(qkv):
            _backward_kernel[(triton.cdiv(tokens, _TOKENS),)](
                grad_q, grad_k, grad_v, qkv, _or(position_T, rates), _or(gap_T, rates), rates, out,
                tokens, heads, key_heads, width, float(time_scale_s), eps, VALUES=beside is None,
                **_launch_constants(qkv, position_T, gap_T, heads, key_heads, normed=normed),
            )  # fmt: skip
    return out

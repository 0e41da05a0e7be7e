"""Triton kernels of ``jagged_dense_bmm`` and their launchers.

Sequences are cut into pieces of tokens, as in ``gem_jagged.sums``, and a program owns one piece and
one block of columns. The gradient of a matrix is a sum over the tokens of its sequence: a sequence
of one piece writes it, those of longer ones write sums of pieces in fp32, which are then added in
the order of the pieces.
"""

import torch
import triton
import triton.language as tl

from gem_jagged.device import last_sequence
from gem_jagged.launching import in_a_row, on_device
from gem_jagged.sums.kernel import add_long_sums, launch_sum


@triton.jit(do_not_specialize=["rows", "batch"])
def _rows_kernel(
    values_ptr, values_stride_t, values_stride_d, dense_ptr, dense_stride_b, dense_stride_d,
    dense_stride_f, bias_ptr, bias_stride_b, bias_stride_f, offsets_ptr, out_ptr, rows, batch,
    width, out_width,
    HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    b = last_sequence(offsets_ptr, offsets_ptr, slot, batch, BLOCK_T, False).to(tl.int64)
    # The rows behind the last offset are a sequence without a matrix: they get 0.
    known = b < batch
    begin = tl.load(offsets_ptr + b).to(tl.int64)
    end = tl.load(offsets_ptr + b + 1, mask=known, other=0).to(tl.int64)
    end = tl.where(known, end, rows)
    t = begin + (slot - (begin // BLOCK_T + b)) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t = (t < end)[:, None]
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    in_f = (f < out_width)[None, :]
    at_f = f.to(tl.int64)[None, :]
    out_tf = tl.zeros((BLOCK_T, BLOCK_F), dtype=tl.float32)
    for start in range(0, width, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        in_d = d < width
        at_d = d.to(tl.int64)
        values_td = tl.load(
            values_ptr + (t * values_stride_t)[:, None] + (at_d * values_stride_d)[None, :],
            mask=in_t & in_d[None, :] & known,
            other=0.0,
        )
        dense_df = tl.load(
            dense_ptr + b * dense_stride_b + (at_d * dense_stride_d)[:, None]
            + at_f * dense_stride_f,
            mask=in_d[:, None] & in_f & known,
            other=0.0,
        )  # fmt: skip
        # [t, d] @ [d, f] -> [t, f]
        out_tf = tl.dot(values_td, dense_df, out_tf, input_precision="ieee")
    if HAS_BIAS:
        out_tf += tl.load(
            bias_ptr + b * bias_stride_b + at_f * bias_stride_f, mask=in_f & known, other=0.0
        ).to(tl.float32)
    tl.store(out_ptr + t[:, None] * out_width + f[None, :], out_tf, mask=in_t & in_f)


@triton.jit(do_not_specialize=["batch"])
def _matrix_kernel(
    values_ptr, values_stride_t, values_stride_d, grad_ptr, grad_stride_t, grad_stride_f,
    offsets_ptr, out_ptr, partial_ptr, batch, width, out_width, blocks_f,
    PIECE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    b = last_sequence(offsets_ptr, offsets_ptr, slot, batch, PIECE, False).to(tl.int64)
    if b < batch:
        begin = tl.load(offsets_ptr + b).to(tl.int64)
        end = tl.load(offsets_ptr + b + 1).to(tl.int64)
        piece = slot - (begin // PIECE + b)
        first = begin + piece * PIECE
        last = tl.minimum(first + PIECE, end)
        # Every sequence has a first piece, an empty one too; other slots may be void.
        if (first < last) | (piece == 0):
            d = (tl.program_id(1) // blocks_f) * BLOCK_D + tl.arange(0, BLOCK_D)
            f = (tl.program_id(1) % blocks_f) * BLOCK_F + tl.arange(0, BLOCK_F)
            in_d = d < width
            in_f = f < out_width
            grad_df = tl.zeros((BLOCK_D, BLOCK_F), dtype=tl.float32)
            for start in range(first, last, BLOCK_T):
                t = start + tl.arange(0, BLOCK_T)
                in_t = t < last
                values_dt = tl.load(
                    values_ptr + (t * values_stride_t)[None, :]
                    + (d.to(tl.int64) * values_stride_d)[:, None],
                    mask=in_d[:, None] & in_t[None, :],
                    other=0.0,
                )  # fmt: skip
                grad_tf = tl.load(
                    grad_ptr + (t * grad_stride_t)[:, None]
                    + (f.to(tl.int64) * grad_stride_f)[None, :],
                    mask=in_t[:, None] & in_f[None, :],
                    other=0.0,
                )  # fmt: skip
                # [d, t] @ [t, f] -> [d, f]
                grad_df = tl.dot(values_dt, grad_tf, grad_df, input_precision="ieee")
            at = d.to(tl.int64)[:, None] * out_width + f[None, :]
            inside = in_d[:, None] & in_f[None, :]
            if end - begin <= PIECE:
                tl.store(out_ptr + b * width * out_width + at, grad_df, mask=inside)
            else:
                row = 2 * begin // PIECE + piece
                tl.store(partial_ptr + row * width * out_width + at, grad_df, mask=inside)


def _block(width, most):
    """Return the block of a dim: a power of two from 16, the least that a product takes."""
    return min(max(triton.next_power_of_2(width), 16), most)


def _launch_rows(values_TD, offsets_O, dense_BDF, bias_BF):
    rows, width = values_TD.shape
    batch, _, out_width = dense_BDF.shape
    out = values_TD.new_empty((rows, out_width))
    if out.numel() == 0:
        return out
    (offsets_O,) = in_a_row(offsets_O)
    block_t, block_f = 64, _block(out_width, 64)
    bias = out if bias_BF is None else bias_BF
    with on_device(out):
        # One slot more than pieces of B sequences can have, for the rows behind the last offset.
        _rows_kernel[(rows // block_t + batch + 1, triton.cdiv(out_width, block_f))](
            values_TD, *values_TD.stride(), dense_BDF, *dense_BDF.stride(), bias, *bias.stride(),
            offsets_O, out, rows, batch, width, out_width,
            HAS_BIAS=bias_BF is not None, BLOCK_T=block_t, BLOCK_D=_block(width, 64),
            BLOCK_F=block_f,
        )  # fmt: skip
    return out


def _launch_matrices(values_TD, offsets_O, grad_TF):
    tokens, width = values_TD.shape
    batch, out_width = offsets_O.shape[0] - 1, grad_TF.shape[1]
    out = values_TD.new_empty((batch, width, out_width))
    if out.numel() == 0:
        return out
    (offsets_O,) = in_a_row(offsets_O)
    # Long enough that the fp32 sums of pieces stay below the bytes of the tokens.
    piece = min(max(triton.next_power_of_2(8 * max(width, out_width)), 256), 8192)
    rows = 2 * tokens // piece + 1 if tokens > piece else 0
    partial = values_TD.new_empty((rows, width * out_width), dtype=torch.float32)
    block_d, block_f = _block(width, 64), _block(out_width, 128)
    blocks_d, blocks_f = triton.cdiv(width, block_d), triton.cdiv(out_width, block_f)
    with on_device(out):
        _matrix_kernel[(tokens // piece + batch, blocks_d * blocks_f)](
            values_TD, *values_TD.stride(), grad_TF, *grad_TF.stride(), offsets_O, out, partial,
            batch, width, out_width, blocks_f,
            PIECE=piece, BLOCK_T=64, BLOCK_D=block_d, BLOCK_F=block_f,
        )  # fmt: skip
        if rows:
            add_long_sums(partial, offsets_O, out.view(batch, width * out_width), piece=piece)
    return out


def launch_forward(values_TD, offsets_O, dense_BDF, bias_BF):
    """Multiply the tokens of each sequence by its matrix."""
    return _launch_rows(values_TD, offsets_O, dense_BDF, bias_BF)


def launch_backward(grad_TF, values_TD, offsets_O, dense_BDF, has_bias):
    """Return the gradients of tokens, matrices and bias."""
    grad_bias = grad_TF.new_empty((0, grad_TF.shape[1]))
    if has_bias:
        grad_bias = launch_sum(grad_TF, offsets_O, mean=False)
    return (
        _launch_rows(grad_TF, offsets_O, dense_BDF.transpose(1, 2), None),
        _launch_matrices(values_TD, offsets_O, grad_TF),
        grad_bias,
    )

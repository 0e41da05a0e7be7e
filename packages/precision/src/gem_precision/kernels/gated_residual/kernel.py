"""Triton kernels of ``gated_residual``: a program holds the gate of a sequence, and walks on."""

import contextlib

import torch
import triton
import triton.language as tl

from gem_precision.kernels.gated_residual.reference import wide_dtype

_PARTS = 16  # programs of a sequence: enough for few long ones, whatever the lengths are
_TILE_ELEMENTS = 2048
_WIDEST_BLOCK = 1024
_WARPS = 4


@triton.jit
def _part(offsets_ptr, PARTS: tl.constexpr):
    """Return the first token of a program's part and the one behind its last."""
    start = tl.load(offsets_ptr + tl.program_id(0)).to(tl.int64)
    end = tl.load(offsets_ptr + tl.program_id(0) + 1).to(tl.int64)
    share = (end - start + PARTS - 1) // PARTS
    begin = start + tl.program_id(1) * share
    return tl.minimum(begin, end), tl.minimum(begin + share, end)


@triton.jit
def _forward_kernel(
    x_ptr, out_ptr, gate_ptr, offsets_ptr, y_ptr, width, x_stride, out_stride,
    DOUBLE: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    begin, end = _part(offsets_ptr, PARTS)
    columns = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(WIDE)[None, :]
    rows = tl.arange(0, R)
    for turn in range(0, tl.cdiv((end - begin).to(tl.int32), R)):
        r = begin + turn * R + rows
        mask = (r < end)[:, None] & inside[None, :]
        x = tl.load(x_ptr + (r * x_stride)[:, None] + columns[None, :], mask=mask).to(WIDE)
        out = tl.load(out_ptr + (r * out_stride)[:, None] + columns[None, :], mask=mask).to(WIDE)
        tl.store(y_ptr + (r * width)[:, None] + columns[None, :], x + gate * out, mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, out_ptr, gate_ptr, offsets_ptr, grad_out_ptr, parts_ptr, width, grad_stride,
    out_stride,
    DOUBLE: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    begin, end = _part(offsets_ptr, PARTS)
    columns = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(WIDE)[None, :]
    rows = tl.arange(0, R)
    sums = tl.zeros((R, BLOCK_D), dtype=WIDE)
    for turn in range(0, tl.cdiv((end - begin).to(tl.int32), R)):
        r = begin + turn * R + rows
        mask = (r < end)[:, None] & inside[None, :]
        at_grad = (r * grad_stride)[:, None] + columns[None, :]
        at_out = (r * out_stride)[:, None] + columns[None, :]
        grad = tl.load(grad_ptr + at_grad, mask=mask, other=0.0).to(WIDE)
        sums += grad * tl.load(out_ptr + at_out, mask=mask, other=0.0).to(WIDE)
        tl.store(grad_out_ptr + (r * width)[:, None] + columns[None, :], gate * grad, mask=mask)
    at = (tl.program_id(0).to(tl.int64) * PARTS + tl.program_id(1)) * width + columns
    tl.store(parts_ptr + at, tl.sum(sums, axis=0), mask=inside)


def _constants(*tensors):
    block = min(_WIDEST_BLOCK, triton.next_power_of_2(tensors[0].shape[1]))
    return {
        "DOUBLE": wide_dtype(*tensors) == torch.float64,
        "PARTS": _PARTS,
        "R": max(1, _TILE_ELEMENTS // block),
        "BLOCK_D": block,
        "num_warps": _WARPS,
    }


def _grid(batch, width, constants):
    return batch, _PARTS, triton.cdiv(width, constants["BLOCK_D"])


def _rows(tensor):
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def launch_forward(x, out, gate, offsets):
    """Add what is gated."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        x, out, gate = _rows(x), _rows(out), gate.contiguous()
        constants = _constants(x, out, gate)
        with _on_device(x):
            _forward_kernel[_grid(*gate.shape, constants)](
                x, out, gate, offsets, y, x.shape[1], x.stride(0), out.stride(0), **constants
            )
    return y


def launch_backward(grad, out, gate, offsets):
    """Return the gradients of what was added and of the gate."""
    grad_out = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    if gate.numel() == 0:
        return grad_out, torch.empty_like(gate, memory_format=torch.contiguous_format)
    grad, out, gate = _rows(grad), _rows(out), gate.contiguous()
    constants = _constants(grad, out, gate)
    batch, width = gate.shape
    wide = wide_dtype(grad, out, gate)
    parts = torch.empty((batch, _PARTS, width), dtype=wide, device=gate.device)
    with _on_device(grad):
        _backward_kernel[_grid(batch, width, constants)](
            grad, out, gate, offsets, grad_out, parts, width, grad.stride(0), out.stride(0),
            **constants,
        )  # fmt: skip
    return grad_out, parts.sum(dim=1).to(gate.dtype)


def _on_device(tensor):
    """Make the tensor's device the current one: Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()

"""Triton kernels of ``adam_update``: all tensors in one launch, each element read and written once.

Weights are cut into chunks; a list of chunks names the tensor of each, and a table the addresses of
that tensor and of what belongs to it. List and table are made on the host from sizes and addresses,
which it knows. What follows from a tensor's step is computed once for it, in a small launch before:
in every chunk it would hold the registers that more programs could have.
"""

import contextlib
import functools
import math

import torch
import triton
import triton.language as tl

_CHUNK = 4096  # elements of a program; programs that run at once sweep over a few MB
_BLOCK = 1024
# Of a chunk that is not whole, whose elements are read one at a time: more of them at once would
# take the registers of all programs.
_TAIL = 128
_ALIGNED = 16  # bytes: what a lane reads at once
# Columns of the table of addresses, of the table of rates, and of what follows from a step.
_COLUMNS = tl.constexpr(7)
_RATES = tl.constexpr(2)
_SCALARS = tl.constexpr(3)


@triton.jit
def _elements(
    weight_ptr, gradient_ptr, mean_ptr, square_ptr, copy_ptr, at, mask, factor, step_size, kept,
    root, beta1, rest1, beta2, rest2, eps, COPY: tl.constexpr,
):  # fmt: skip
    """Move the weights at some places."""
    g = tl.load(gradient_ptr + at, mask=mask).to(tl.float32) * factor
    w = tl.load(weight_ptr + at, mask=mask) * kept
    m = tl.load(mean_ptr + at, mask=mask) * beta1 + rest1 * g
    s = tl.load(square_ptr + at, mask=mask) * beta2 + rest2 * g * g
    w -= step_size * (m / (tl.sqrt_rn(s) / root + eps))
    tl.store(weight_ptr + at, w, mask=mask)
    tl.store(mean_ptr + at, m, mask=mask)
    tl.store(square_ptr + at, s, mask=mask)
    if COPY:
        tl.store(copy_ptr + at, w.to(tl.bfloat16), mask=mask)


@triton.jit
def _pointer(table_ptr, column, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address that stands in a column of a tensor's row."""
    pointer = tl.load(table_ptr + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _scalars_kernel(table_ptr, rates_ptr, log_beta_ptr, scalars_ptr):
    """Write the size of a tensor's step, the share of its weights that is kept, and a root."""
    tensor = tl.program_id(0)
    step_ptr = _pointer(table_ptr + tensor * _COLUMNS, 4, tl.float32, False)
    rate = tl.load(rates_ptr + tensor * _RATES)
    # One minus a power near 1 would lose half of its digits in fp32.
    step = tl.load(step_ptr).to(tl.float64)
    step_size = rate / (1.0 - tl.exp(step * tl.load(log_beta_ptr)))
    root = tl.sqrt(1.0 - tl.exp(step * tl.load(log_beta_ptr + 1)))
    own_ptr = scalars_ptr + tensor * _SCALARS
    tl.store(own_ptr, step_size.to(tl.float32))
    tl.store(own_ptr + 1, tl.load(rates_ptr + tensor * _RATES + 1).to(tl.float32))
    tl.store(own_ptr + 2, root.to(tl.float32))


@triton.jit
def _adam_kernel(
    table_ptr, scalars_ptr, chunks_ptr, factor_ptr, beta1, rest1, beta2, rest2, eps,
    FACTOR: tl.constexpr, HALF: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    gradient_type: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    code = tl.load(chunks_ptr + tl.program_id(0))
    tensor = code >> 32
    begin = (code & 0xFFFFFFFF) * CHUNK
    row_ptr = table_ptr + tensor * _COLUMNS
    weight_ptr = _pointer(row_ptr, 0, tl.float32, ALIGNED) + begin
    gradient_ptr = _pointer(row_ptr, 1, gradient_type, ALIGNED) + begin
    mean_ptr = _pointer(row_ptr, 2, tl.float32, ALIGNED) + begin
    square_ptr = _pointer(row_ptr, 3, tl.float32, ALIGNED) + begin
    copy_ptr = _pointer(row_ptr, 5, tl.bfloat16, ALIGNED) + begin
    left = tl.load(row_ptr + 6) - begin
    step_size = tl.load(scalars_ptr + tensor * _SCALARS)
    kept = tl.load(scalars_ptr + tensor * _SCALARS + 1)
    root = tl.load(scalars_ptr + tensor * _SCALARS + 2)
    factor = 1.0
    if FACTOR:
        factor = tl.load(factor_ptr).to(tl.float32)
    if left >= CHUNK:
        places = tl.arange(0, BLOCK)
        for turn in range(0, CHUNK // BLOCK):
            _elements(
                weight_ptr, gradient_ptr, mean_ptr, square_ptr, copy_ptr, places + turn * BLOCK,
                None, factor, step_size, kept, root, beta1, rest1, beta2, rest2, eps, COPY,
            )  # fmt: skip
    else:
        for turn in range(0, tl.cdiv(left.to(tl.int32), TAIL)):
            at = turn * TAIL + tl.arange(0, TAIL)
            _elements(
                weight_ptr, gradient_ptr, mean_ptr, square_ptr, copy_ptr, at, at < left,
                factor, step_size, kept, root, beta1, rest1, beta2, rest2, eps, COPY,
            )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _chunks(sizes, device):
    """Return tensor << 32 | chunk of every chunk."""
    codes = [
        (tensor << 32) + torch.arange(triton.cdiv(size, _CHUNK), dtype=torch.int64)
        for tensor, size in enumerate(sizes)
    ]
    return torch.cat(codes).to(device)


def _on_gpu(values, dtype, device):
    """Bring numbers of the host to the device without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        # The allocator of pinned memory keeps it until the copy is done.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def launch(
    weights, gradients, means, squares, steps, copies, factor, rates, decays, *, beta1, beta2, eps
):
    """Move all weights in place."""
    every = list(range(len(weights)))
    for half in (False, True):
        own = [
            i
            for i in every
            if weights[i].numel() and (gradients[i].dtype == torch.bfloat16) == half
        ]
        if not own:
            continue
        device = weights[own[0]].device
        lists = (weights, gradients, means, squares, steps, copies or steps)
        table = [[*(tensors[i].data_ptr() for tensors in lists), weights[i].numel()] for i in own]
        pointers = [x for row in table for x in (*row[:4], row[5] if copies else 0)]
        sizes = tuple(weights[i].numel() for i in own)
        chunks = _chunks(sizes, device)
        scalars = torch.empty((len(own), _SCALARS.value), dtype=torch.float32, device=device)
        rows = _on_gpu(table, torch.int64, device)
        of_rates = [[rates[i], 1.0 - rates[i] * decays[i]] for i in own]
        with _on_device(device):
            _scalars_kernel[(len(own),)](
                rows, _on_gpu(of_rates, torch.float64, device),
                _on_gpu([_log(beta1), _log(beta2)], torch.float64, device), scalars,
                num_warps=1,
            )  # fmt: skip
            _adam_kernel[(len(chunks),)](
                rows, scalars, chunks, chunks if factor is None else factor,
                beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps, FACTOR=factor is not None, HALF=half,
                COPY=bool(copies), ALIGNED=all(x % _ALIGNED == 0 for x in pointers), CHUNK=_CHUNK,
                BLOCK=_BLOCK, TAIL=_TAIL,
            )  # fmt: skip


def _log(beta):
    return math.log(beta) if beta else -math.inf


def _on_device(device):
    """Make it the current one: Triton launches there."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

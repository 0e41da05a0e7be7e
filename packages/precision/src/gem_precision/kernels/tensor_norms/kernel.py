"""Triton kernels of ``tensor_norms``: all tensors in one launch, then a sum over their chunks.

Tensors are cut into chunks, whose sums of squares are written and added in order: the same bits in
every run. A list of chunks names the tensor of each, and a table its address and its size; both are
made on the host, which knows them.
"""

import functools

import torch
import triton
import triton.language as tl

from gem_precision.device import on_device

_CHUNK = 65_536  # elements of a program: 128 KB of bf16 for one read of the table
_BLOCK = 4096
_SUMMED = 1024  # chunks that a program adds at once
_ALIGNED = 16  # bytes: what a lane reads at once
# Columns of the table: address, elements, first chunk.
_COLUMNS = tl.constexpr(3)
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit
def _squares_kernel(
    table_ptr, chunks_ptr, parts_ptr,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of squares of a chunk."""
    half_type: tl.constexpr = tl.bfloat16 if DTYPE == "bf16" else tl.float16
    x_type: tl.constexpr = tl.float32 if DTYPE == "fp32" else half_type
    code = tl.load(chunks_ptr + tl.program_id(0))
    row_ptr = table_ptr + (code >> 32) * _COLUMNS
    begin = (code & 0xFFFFFFFF) * CHUNK
    x_ptr = tl.load(row_ptr).to(tl.pointer_type(x_type))
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    elements = tl.load(row_ptr + 1)
    places = begin + tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    if begin + CHUNK <= elements:
        for turn in range(0, CHUNK // BLOCK):
            x = tl.load(x_ptr + places + turn * BLOCK).to(tl.float32)
            squares += x * x
    else:
        for turn in range(0, CHUNK // BLOCK):
            at = places + turn * BLOCK
            x = tl.load(x_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
            squares += x * x
    tl.store(parts_ptr + tl.program_id(0), tl.sum(squares, axis=0))


@triton.jit
def _roots_kernel(
    table_ptr, parts_ptr, places_ptr, norms_ptr, CHUNK: tl.constexpr, SUMMED: tl.constexpr
):
    """Add the chunks of a tensor, and write the root."""
    tensor = tl.program_id(0)
    row_ptr = table_ptr + tensor * _COLUMNS
    chunks = tl.cdiv(tl.load(row_ptr + 1), CHUNK)
    first = tl.load(row_ptr + 2)
    total = tl.zeros((SUMMED,), dtype=tl.float32)
    for begin in range(0, chunks, SUMMED):
        chunk = begin + tl.arange(0, SUMMED)
        total += tl.load(parts_ptr + first + chunk, mask=chunk < chunks, other=0.0)
    place = tl.load(places_ptr + tensor)
    tl.store(norms_ptr + place, tl.sqrt_rn(tl.sum(total, axis=0)))


@functools.lru_cache(maxsize=16)
def _chunks(sizes, device):
    """Return tensor << 32 | chunk of every chunk."""
    codes = [
        (tensor << 32) + torch.arange(triton.cdiv(size, _CHUNK), dtype=torch.int64)
        for tensor, size in enumerate(sizes)
    ]
    return torch.cat(codes).to(device)


def _on_gpu(values, device):
    """Bring numbers of the host to the device without waiting for it."""
    tensor = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        # The allocator of pinned memory keeps it until the copy is done.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def launch(tensors):
    """Return the norm of each tensor, fp32."""
    device = tensors[0].device
    norms = torch.zeros(len(tensors), dtype=torch.float32, device=device)
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        own = [i for i, t in enumerate(tensors) if t.dtype == dtype and t.numel()]
        if not own:
            continue
        sizes = tuple(tensors[i].numel() for i in own)
        table, first = [], 0
        for i in own:
            table.append([tensors[i].data_ptr(), tensors[i].numel(), first])
            first += triton.cdiv(tensors[i].numel(), _CHUNK)
        chunks = _chunks(sizes, device)
        parts = torch.empty(len(chunks), dtype=torch.float32, device=device)
        rows, places = _on_gpu(table, device), _on_gpu(own, device)
        with on_device(tensors[0]):
            _squares_kernel[(len(chunks),)](
                rows, chunks, parts, DTYPE=_DTYPES[dtype],
                ALIGNED=all(row[0] % _ALIGNED == 0 for row in table), CHUNK=_CHUNK, BLOCK=_BLOCK,
                num_warps=8,
            )  # fmt: skip
            _roots_kernel[(len(own),)](rows, parts, places, norms, CHUNK=_CHUNK, SUMMED=_SUMMED)
    return norms

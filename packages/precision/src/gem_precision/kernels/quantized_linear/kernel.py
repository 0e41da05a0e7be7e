"""Products of ``quantized_linear`` on a GPU, and the Triton kernel of block FP8.

On Hopper cuBLAS multiplies block FP8 at the full rate of its tensor cores, if the sizes are whole
blocks; the kernel here takes ragged sizes, and GPUs whose cuBLAS has no such product. MXFP8 is
native on compute capability 10.x (``kernel_sm100``). Elsewhere its numbers are those of bf16
products of the decoded factors, which bf16 holds exactly: right numbers, no speed.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from gem_precision.device import on_device
from gem_precision.elements import WIDE_BLOCK
from gem_precision.hadamard import rotated_factor
from gem_precision.kernels.block_quantize.kernel import launch_rows, launch_squares
from gem_precision.kernels.mx_quantize.kernel import launch_dequantize, launch_quantize

_ROWS = 128  # of a tile; its columns are a block of the weight
_GROUP = 8  # tiles of rows that share what they read of the weight


@triton.jit(do_not_specialize=["rows", "stored_rows"])
def _product_kernel(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, y_ptr, rows, columns, inner, stored_rows, blocks_k,
    tiles_t, tiles_f, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) // (GROUP * tiles_f)
    in_group = min(tiles_t - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_f)
    t = ((group * GROUP + within % in_group).to(tl.int64)) * ROWS + tl.arange(0, ROWS)
    tile_f = within // in_group
    f = tile_f.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_t, in_f = t < rows, f < columns
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for m in range(blocks_k):
        d = m * BLOCK + tl.arange(0, BLOCK)
        in_d = (d < inner)[None, :]
        a = tl.load(a_ptr + (t * inner)[:, None] + d[None, :], mask=in_t[:, None] & in_d, other=0.0)
        b = tl.load(b_ptr + (f * inner)[:, None] + d[None, :], mask=in_f[:, None] & in_d, other=0.0)
        a_scale = tl.load(a_scales_ptr + t, mask=in_t, other=0.0)
        a_scales_ptr += stored_rows
        b_scale = tl.load(b_scales_ptr + tile_f * blocks_k + m)
        # The tensor core sums a block with few bits; sums of blocks are in full fp32.
        acc += tl.dot(a, tl.trans(b)) * (a_scale * b_scale)[:, None]
    to = (t * columns)[:, None] + f[None, :]
    tl.store(y_ptr + to, acc.to(y_ptr.dtype.element_ty), mask=in_t[:, None] & in_f[None, :])


def launch_forward(x_TD, weight_FD, *, forward, hadamard_seed=None):
    """Return y_TF in the dtype of x."""
    return _product(x_TD, weight_FD, forward, x_TD.dtype, hadamard_seed=hadamard_seed)


def launch_backward(grad_TF, x_TD, weight_FD, *, formats, needs, seed=None, hadamard_seed=None):
    """Return the gradients of x and of the weight; None for one that nobody asks for."""
    turned = {"hadamard_seed": hadamard_seed}
    input_gradient, weight_gradient = formats
    grad_x_TD = grad_weight_FD = None
    if needs[0]:
        if input_gradient == "fp8_block":
            grad_x_TD = _block_product(grad_TF, weight_FD, x_TD.dtype, turned="only")
        else:
            grad_x_TD = _product(
                grad_TF, weight_FD.T, input_gradient, x_TD.dtype, seed=seed, **turned
            )
    if needs[1]:
        seed = None if seed is None else seed ^ 1
        grad_weight_FD = _product(
            grad_TF.T, x_TD.T, weight_gradient, weight_FD.dtype, seed=seed, **turned
        )
    return grad_x_TD, grad_weight_FD


def _product(a, b, number_format, dtype, *, seed=None, hadamard_seed=None):
    """Return a bᵀ, with both factors rounded to a format; in MXFP8 a by chance with a seed."""
    if a.shape[0] == 0 or b.shape[0] == 0 or a.shape[1] == 0:
        return torch.zeros((a.shape[0], b.shape[0]), dtype=dtype, device=a.device)
    if number_format == "bf16":
        return _bf16_product(a, b, dtype)
    if number_format == "fp8_block":
        return _block_product(a, b, dtype, turned="no")
    if hadamard_seed is not None:
        a, b = rotated_factor(a, hadamard_seed), rotated_factor(b, hadamard_seed)
    given = {"scaling": number_format, "element": "e4m3", "along": "rows"}
    a_elements, a_scales, _, _ = launch_quantize(a, **given, seed=seed)
    return _mx_product(a_elements, a_scales, b, number_format, dtype)


def launch_product_of_bytes(a_elements, a_scales, b, *, number_format, dtype):
    """Return a bᵀ, with a in its format already, in blocks along its rows."""
    if a_elements.numel() == 0 or b.shape[0] == 0:
        shape = (a_elements.shape[0], b.shape[0])
        return torch.zeros(shape, dtype=dtype, device=b.device)
    if number_format == "fp8_block":
        return _product_of_blocks(a_elements, a_scales, b, dtype, turned="no")
    return _mx_product(a_elements, a_scales, b, number_format, dtype)


def _mx_product(a_elements, a_scales, b, number_format, dtype):
    given = {"scaling": number_format, "element": "e4m3", "along": "rows"}
    b_elements, b_scales, _, _ = launch_quantize(b, **given)
    if has_native_mx(b.device):
        from gem_precision.kernels.quantized_linear.kernel_sm100 import launch_mx_product

        return launch_mx_product(
            a_elements.contiguous(), a_scales.contiguous(), b_elements, b_scales, dtype
        )
    # The interpreter's machine computes in fp32: it is wrong in bf16.
    wide = torch.bfloat16 if b.is_cuda else torch.float32
    how = {"element": "e4m3", "along": "rows", "dtype": wide}
    a = launch_dequantize(a_elements.contiguous(), a_scales, **how)
    return _bf16_product(a, launch_dequantize(b_elements, b_scales, **how), dtype)


def _bf16_product(a, b, dtype):
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b.T, out_dtype=torch.float32)  # sums are in fp32: not rounded twice
    if a.is_cuda:
        return (a @ b.T).to(dtype)
    # The interpreter's machine: a CPU's own bf16 product sums in an order and width of its own.
    return (a.float() @ b.float().T).to(dtype)


def _block_product(a, weight, dtype, *, turned):
    """Return a Wᵀ, or with ``turned`` of "only" a W, in block FP8."""
    outer, inner = weight.shape if turned == "no" else weight.shape[::-1]
    rows = a.shape[0]
    if rows == 0 or outer == 0 or inner == 0:
        return torch.zeros((rows, outer), dtype=dtype, device=a.device)
    # cuBLAS reads the scales of four rows at once.
    by_library = _has_whole_blocks(weight) and has_block_library(a.device)
    a_elements, a_scales = launch_rows(a, row_multiple=4 if by_library else 1)
    return _product_of_blocks(a_elements, a_scales, weight, dtype, turned=turned, rows=rows)


def _has_whole_blocks(weight):
    return weight.shape[0] % WIDE_BLOCK == 0 and weight.shape[1] % WIDE_BLOCK == 0


def _product_of_blocks(a_elements, a_scales, weight, dtype, *, turned, rows=None):
    """Return the product with a in block FP8 already; rows from ``rows`` on are zeros."""
    outer, inner = weight.shape if turned == "no" else weight.shape[::-1]
    rows = a_elements.shape[0] if rows is None else rows
    whole = _has_whole_blocks(weight) and a_scales.shape[1] % 4 == 0
    by_library = whole and has_block_library(weight.device)
    plain, scales, turned_elements = launch_squares(weight, turned=turned)
    elements = plain
    if turned == "only":
        elements, scales = turned_elements, scales.T
    a_fp8, b_fp8 = a_elements.view(torch.float8_e4m3fn), elements.view(torch.float8_e4m3fn)
    if by_library:
        kind = F.ScalingType
        short = -scales.shape[1] % 4  # rows of scales are whole 16 bytes
        padded = F.pad(scales, (0, short)) if short else scales.contiguous()
        made = F.scaled_mm(
            a_fp8, b_fp8.T, a_scales.T, kind.BlockWise1x128, padded.T, kind.BlockWise128x128,
            output_dtype=torch.float32 if dtype == torch.float16 else dtype,
        )  # fmt: skip
        return made[:rows].to(dtype)
    y = torch.empty((rows, outer), dtype=dtype, device=weight.device)
    tiles_t, tiles_f = triton.cdiv(rows, _ROWS), triton.cdiv(outer, WIDE_BLOCK)
    with on_device(y):
        _product_kernel[(tiles_t * tiles_f,)](
            a_fp8, a_scales, b_fp8, scales.contiguous(), y, rows, outer, inner,
            a_scales.shape[1], triton.cdiv(inner, WIDE_BLOCK), tiles_t, tiles_f,
            ROWS=_ROWS, GROUP=_GROUP, BLOCK=WIDE_BLOCK, num_warps=8, num_stages=3,
        )  # fmt: skip
    return y


def has_block_library(device):
    """Tell whether cuBLAS multiplies block FP8: Hopper, CUDA 12.9 or newer."""
    if device.type != "cuda" or torch.version.cuda is None or not hasattr(F, "scaled_mm"):
        return False
    cuda = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    return torch.cuda.get_device_capability(device) == (9, 0) and cuda >= (12, 9)


def has_native_mx(device):
    """Tell whether tensor cores multiply MXFP8 with its scales, by the kernel of 10.x."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10

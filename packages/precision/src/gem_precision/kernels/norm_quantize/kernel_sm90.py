"""``norm_quantize`` on Hopper, in Gluon, where layouts are chosen by hand.

Statistics are to be the bits of ``row_norm``: a row lies in as many warps as there, 8 elements of
256 columns a thread, so that its sums have the same order. In the portable kernels the compiler
lays out what is stored another way than what was loaded, and bytes change threads through shared
memory; here they leave from where they are.

**Along rows** a program holds whole rows, 32 elements a thread.

**Blocks of columns, both orientations, and squares** are computed strip by strip
(``gem_precision.hopper.strips``).
"""

from functools import lru_cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_precision.elements import BLOCK, WIDE_BLOCK
from gem_precision.hopper.device import (
    bytes_of,
    factor_of,
    larger_magnitude,
    rounded_to_bf16,
    scale_code_of,
)
from gem_precision.hopper.strips.kernel_sm90 import norm_quantize_strips_kernel
from gem_precision.kernels.row_norm.kernel import block_of, tile_of

_LEAST = 256  # columns of a tile, of which a warp has 8 a thread
_THREAD_ELEMENTS = 32  # of a program that holds whole rows
# Of strips: columns of a tile, and of a box of it, whose rows are 128 bytes as the banks are.
_LEAST_STRIP, _WIDEST_STRIP, _BOX = 512, 2_048, 64
_WARPS = 8
# Bytes of strips on a multiprocessor, and elements of the rows of one that are summed at a time.
_SHARED, _SUMMED = 212_000, 16_384
# Columns up to which two programs share a multiprocessor, and their registers a thread.
_TWICE, _REGISTERS = 512, 128
_MOST_ROWS = 2**31 - 2**16


def supports(inputs, *, centred, along):
    """Say whether the kernels of this file take a call.

    Args:
        inputs: x, what is added before and after, and the gain, as the operator has them.
        centred: of LayerNorm.
        along: as the operator says it.

    Returns:
        True on compute capability 9.0 for contiguous bf16 of more than 128 columns, a multiple of
        16, for LayerNorm a power of two, with nothing added after; other blocks than those along
        rows want 257 to 2,048 columns, a multiple of 64, and nothing added before.
    """
    x_TD, before_TD, after_TD, _ = inputs
    width = x_TD.shape[1]
    if not (
        x_TD.is_cuda
        and x_TD.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x_TD.device) == (9, 0)
        and after_TD is None
        and block_of(width) >= _LEAST
        and width % 16 == 0
        and (not centred or width & (width - 1) == 0)
        and all(_is_plain(t) for t in (x_TD, before_TD) if t is not None)
        and x_TD.shape[0] < _MOST_ROWS
    ):
        return False
    return along == "rows" or (
        before_TD is None and width % _BOX == 0 and _LEAST_STRIP <= block_of(width) <= _WIDEST_STRIP
    )


def _is_plain(tensor):
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


@gluon.jit(do_not_specialize=["rows"])
def norm_quantize_rows_kernel(
    x_ptr,
    before_ptr,
    gain_ptr,
    elements_ptr,
    scales_ptr,
    rows,
    width,
    blocks_d,
    eps,
    CENTRED: gl.constexpr,
    BEFORE: gl.constexpr,
    GAIN: gl.constexpr,
    WIDE: gl.constexpr,
    RCEIL: gl.constexpr,
    LARGEST_EXPONENT: gl.constexpr,
    E4M3: gl.constexpr,
    R: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Normalise and quantise R rows in blocks along them."""
    r = gl.program_id(0).to(gl.int64) * R + gl.arange(0, R, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, LAYOUT))
    mask = (r < rows)[:, None] & (d < width)[None, :]
    at = (r * width)[:, None] + d[None, :]
    n = gl.load(x_ptr + at, mask=mask, other=0.0).to(gl.float32)
    if BEFORE:
        n += gl.load(before_ptr + at, mask=mask, other=0.0).to(gl.float32)
    if CENTRED:
        n = gl.where(mask, n - (gl.sum(n, 1) / width)[:, None], 0.0)
    n *= gl.rsqrt(gl.sum(n * n, 1) / width + eps)[:, None]
    if GAIN:
        n *= gl.load(gain_ptr + d, mask=d < width, other=0.0).to(gl.float32)[None, :]
    y = gl.reshape(rounded_to_bf16(n), [R, BLOCK_D // BLOCK, BLOCK])
    code = scale_code_of(gl.reduce(y, 2, larger_magnitude), RCEIL, LARGEST_EXPONENT)
    if WIDE:
        code = gl.maximum(code, 1)
    scaled = gl.reshape(y * factor_of(code)[:, :, None], [R, BLOCK_D])
    scaled = gl.convert_layout(scaled, LAYOUT, assert_trivial=True)
    gl.store(elements_ptr + at, bytes_of(scaled, E4M3), mask=mask)
    OF_BLOCKS: gl.constexpr = code.type.layout
    r = gl.program_id(0).to(gl.int64) * R + gl.arange(0, R, layout=gl.SliceLayout(1, OF_BLOCKS))
    m = gl.arange(0, BLOCK_D // BLOCK, layout=gl.SliceLayout(0, OF_BLOCKS))
    in_scales = (r < rows)[:, None] & (m < blocks_d)[None, :]
    if WIDE:
        # Blocks outermost, as products read them; the scale itself, in fp32.
        to = r[:, None] + (m.to(gl.int64) * rows)[None, :]
        scale = gl.where(code == 255, 0x7FC00000, code << 23)
        gl.store(scales_ptr + to, scale, mask=in_scales)
    else:
        to = (r * blocks_d)[:, None] + m[None, :]
        gl.store(scales_ptr + to, code.to(gl.uint8), mask=in_scales)


def launch(inputs, outputs, *, centred, eps, along, form, wide):
    """Write elements and scales.

    Args:
        inputs: what ``supports`` takes.
        outputs: elements and scales by rows, then by columns, as ``norm_quantize`` returns them.
        centred: of LayerNorm.
        eps: of the norm.
        along: as the operator says it.
        form: ``constants_of`` of ``mx_quantize``.
        wide: block FP8, in blocks along rows.
    """
    x_TD, before_TD, _, gain_D = inputs
    given = {
        "CENTRED": centred,
        "GAIN": gain_D is not None,
        "RCEIL": form["RCEIL"],
        "LARGEST_EXPONENT": form["LARGEST_EXPONENT"],
        "E4M3": form["MANTISSA_BITS"] == 3,
    }
    rows, width = x_TD.shape
    gain = x_TD if gain_D is None else gain_D.contiguous()
    with torch.cuda.device_of(x_TD):
        if along == "rows":
            constants = rows_constants(width, wide=wide)
            scales = outputs[1].view(torch.int32) if wide else outputs[1]
            norm_quantize_rows_kernel[(triton.cdiv(rows, constants["R"]),)](
                x_TD,
                x_TD if before_TD is None else before_TD,
                gain,
                outputs[0],
                scales,
                rows,
                width,
                triton.cdiv(width, constants["BLOCK"]),
                eps,
                BEFORE=before_TD is not None,
                **given,
                **constants,
            )
            return
        constants = strips_constants(width)
        strips = triton.cdiv(rows, BLOCK)
        programs = (1 + ("maxnreg" in constants)) * _multiprocessors(x_TD.device.index or 0)
        boxes = TensorDescriptor(
            x_TD,
            [width // _BOX, rows, _BOX],
            [_BOX, width, 1],
            [constants["AT_ONCE"], BLOCK, _BOX],
            gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3),
        )
        norm_quantize_strips_kernel[(min(strips, programs),)](
            boxes,
            gain,
            *outputs,
            rows,
            width,
            width // BLOCK,
            strips,
            eps,
            **{name: form[name] for name in ("ROWS", "COLUMNS", "SQUARE")},
            **given,
            **constants,
        )


def _warps_of_row(width):
    """Return in how many warps ``row_norm`` has a row, and how many warps its program."""
    warps = tile_of(width)[1]
    return min(warps, block_of(width) // _LEAST), warps


def rows_constants(width, *, wide):
    """Return the constants of the kernel along rows that follow from their width.

    Args:
        width: columns, as ``supports`` takes them.
        wide: block FP8.

    Returns:
        constants by name, with the number of warps.
    """
    of_row, warps = _warps_of_row(width)
    block_d = block_of(width)
    return {
        "WIDE": wide,
        "R": max(1, _THREAD_ELEMENTS * 32 * warps // block_d),
        "BLOCK_D": block_d,
        "BLOCK": WIDE_BLOCK if wide else BLOCK,
        "LAYOUT": gl.BlockedLayout([1, 8], [1, 32], [warps // of_row, of_row], [1, 0]),
        "num_warps": warps,
    }


def strips_constants(width):
    """Return the constants of the kernel of strips that follow from the width of the rows.

    Args:
        width: columns, as ``supports`` takes them.

    Returns:
        constants by name, with the number of warps, and of registers where two programs share a
        multiprocessor.
    """
    block_d = block_of(width)
    boxes, twice = block_d // _BOX, block_d <= _TWICE
    return {
        "BOXES": boxes,
        "AT_ONCE": min(boxes, _WARPS),
        "SLOTS": max(1, _SHARED // (1 + twice) // (BLOCK * block_d * 2)),
        "PART": min(BLOCK, _SUMMED // block_d),
        "OF_ROW": _warps_of_row(width)[0],
        "LAYOUT": gl.BlockedLayout([1, 8, 8], [1, 4, 8], [_WARPS, 1, 1], [2, 1, 0]),
        "WARPS": _WARPS,
        "num_warps": _WARPS,
        **({"maxnreg": _REGISTERS} if twice else {}),
    }


@lru_cache
def _multiprocessors(index):
    return torch.cuda.get_device_properties(index).multi_processor_count

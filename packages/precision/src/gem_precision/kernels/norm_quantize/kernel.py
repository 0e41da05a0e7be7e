"""Triton kernels of ``norm_quantize``: rows are normalised, rounded and quantised where they lie.

On Hopper ``kernel_sm90`` takes what it can; here are two kernels for everything else. Where blocks
lie along rows a program holds whole rows, as a norm does. Blocks of columns and squares need 32
rows: a program of these sums its rows first, and reads them again, from the cache, tile by tile.

Bytes are to be those of ``row_norm`` and a quantising kernel one after the other, so statistics
have to be the same bits. Sums of a row depend on how its elements lie in threads, which follows
from the width of the tile and the warps, both as in ``row_norm``, and from what else the compiler
finds in memory in a tile of the same shape. Therefore no byte is stored in a tile of the shape in
which statistics are formed: along rows they are stored in three dims.
"""

import torch
import triton
import triton.language as tl

from gem_precision.device import bits_of, cast_code, element_code, has_cast, on_device, scale_code
from gem_precision.elements import BLOCK, WIDE_BLOCK
from gem_precision.kernels.mx_quantize.kernel import (
    constants_of,
    empty_outputs,
    launch_quantize,
    store_tile,
)
from gem_precision.kernels.row_norm.kernel import block_of, tile_of
from gem_precision.kernels.row_norm.kernel import launch_forward as launch_norm

_AT_ONCE = 64  # elements of a thread that the sums of a strip read in one turn
# Of a tile of a strip, a warp: whole lines of memory, and room in registers.
_WARP_COLUMNS = {"columns": 32, "both": 32, "square": 64}
# Of rows of block FP8 whose bytes are packed into words: of the code for wider ones ptxas takes a
# byte from a register that nobody wrote.
_WIDEST_PACKED = 4_096
_WIDEST_BOTH = 512  # of rows that are quantised in both orientations in one kernel


@triton.jit
def _sum_of_inputs(x_ptr, before_ptr, at, mask, BEFORE: tl.constexpr):
    """Return x + before in fp32."""
    a = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if BEFORE:
        a += tl.load(before_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return a


@triton.jit
def _bits_after_rounding(y, DTYPE: tl.constexpr):
    """Return the bits, as of fp32 numbers, of what the norm by itself would have stored."""
    if DTYPE == "bf16":
        bits = bits_of(y.to(tl.bfloat16).to(tl.int16, bitcast=True))
    elif DTYPE == "fp16":
        bits = bits_of(y.to(tl.float16))
    else:
        bits = y.to(tl.int32, bitcast=True)
    return bits


@triton.jit(do_not_specialize=["rows"])
def _norm_quantize_rows_kernel(
    x_ptr, before_ptr, after_ptr, gain_ptr, elements_ptr, scales_ptr, rows, width, blocks_d,
    stride_t, eps,
    CENTRED: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, GAIN: tl.constexpr,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr, RCEIL: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, LEAST_EXPONENT: tl.constexpr, LARGEST_EXPONENT: tl.constexpr,
    LARGEST_CODE: tl.constexpr, CAST: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.arange(0, BLOCKS * BLOCK)
    in_t, in_d = r < rows, columns < width
    mask = in_t[:, None] & in_d[None, :]
    at = (r * stride_t)[:, None] + columns[None, :]
    n = _sum_of_inputs(x_ptr, before_ptr, at, mask, BEFORE)
    if CENTRED:
        n = tl.where(mask, n - (tl.sum(n, axis=1) / width)[:, None], 0.0)
    n *= tl.rsqrt(tl.sum(n * n, axis=1) / width + eps)[:, None]
    if GAIN:
        n *= tl.load(gain_ptr + columns, mask=in_d, other=0.0).to(tl.float32)[None, :]
    if AFTER:
        n += tl.load(after_ptr + at, mask=mask, other=0.0).to(tl.float32)
    bits = tl.reshape(_bits_after_rounding(n, DTYPE), (R, BLOCKS, BLOCK))
    scale = scale_code(tl.max(bits & 0x7FFFFFFF, axis=2), RCEIL, LARGEST_EXPONENT)
    if WIDE:
        scale = tl.maximum(scale, 1)
    spread = scale[:, :, None]
    if CAST:
        code = cast_code(bits, spread, MANTISSA_BITS)
    else:
        code = element_code(bits, spread, MANTISSA_BITS, LEAST_EXPONENT, LARGEST_CODE)
    m = tl.arange(0, BLOCKS)
    if PACKED:
        # Four bytes in a word: a tile of bytes would be exchanged between threads byte by byte.
        four = tl.reshape(code.to(tl.int32), (R, BLOCKS * BLOCK // 4, 4))
        four = tl.sum(four << (8 * tl.arange(0, 4))[None, None, :], axis=2)
        word = tl.arange(0, BLOCKS * BLOCK // 4)
        to = (r * (width // 4))[:, None] + word[None, :]
        words_ptr = elements_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        # Compared like this, neighbours are known to be alike, and four words are stored at once.
        tl.store(words_ptr + to, four, mask=in_t[:, None] & (word < width // 4)[None, :])
    else:
        d = (m * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
        to = (r * width)[:, None, None] + d[None, :, :]
        tl.store(elements_ptr + to, code, mask=in_t[:, None, None] & (d < width)[None, :, :])
    in_scales = in_t[:, None] & (m < blocks_d)[None, :]
    if WIDE:
        # Blocks outermost, as products read them; the scale itself, in fp32.
        to = r[:, None] + (m.to(tl.int64) * rows)[None, :]
        tl.store(scales_ptr + to, tl.where(scale == 255, 0x7FC00000, scale << 23), mask=in_scales)
    else:
        to = (r * blocks_d)[:, None] + m[None, :]
        tl.store(scales_ptr + to, scale.to(tl.uint8), mask=in_scales)


@triton.jit(do_not_specialize=["rows"])
def _norm_quantize_strips_kernel(
    x_ptr, before_ptr, after_ptr, gain_ptr, rows_ptr, row_scales_ptr, columns_ptr,
    column_scales_ptr, rows, width, blocks_d, stride_t, eps,
    CENTRED: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, GAIN: tl.constexpr,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARE: tl.constexpr,
    RCEIL: tl.constexpr, MANTISSA_BITS: tl.constexpr, LEAST_EXPONENT: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr, LARGEST_CODE: tl.constexpr, CAST: tl.constexpr,
    R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    t = strip * BLOCK + inside
    in_t = t < rows
    mean = tl.zeros((BLOCK,), tl.float32)
    rstd = tl.zeros((BLOCK,), tl.float32)
    columns = tl.arange(0, BLOCK_D)
    for part in range(BLOCK // R):
        r = strip * BLOCK + part * R + tl.arange(0, R)
        mask = (r < rows)[:, None] & (columns < width)[None, :]
        at = (r * stride_t)[:, None] + columns[None, :]
        n = _sum_of_inputs(x_ptr, before_ptr, at, mask, BEFORE)
        # One of a row of the selection is not 0, so that its sum is that one.
        chosen = inside[:, None] == (part * R + tl.arange(0, R))[None, :]
        if CENTRED:
            of_rows = tl.sum(n, axis=1) / width
            n = tl.where(mask, n - of_rows[:, None], 0.0)
            mean += tl.sum(tl.where(chosen, of_rows[None, :], 0.0), axis=1)
        of_rows = tl.rsqrt(tl.sum(n * n, axis=1) / width + eps)
        rstd += tl.sum(tl.where(chosen, of_rows[None, :], 0.0), axis=1)
    for first in range(0, BLOCK_D // BLOCK, BLOCKS):
        d = first * BLOCK + tl.arange(0, BLOCKS * BLOCK)
        in_d = d < width
        mask = in_t[:, None] & in_d[None, :]
        at = (t * stride_t)[:, None] + d[None, :]
        n = _sum_of_inputs(x_ptr, before_ptr, at, mask, BEFORE)
        if CENTRED:
            n = tl.where(mask, n - mean[:, None], 0.0)
        n *= rstd[:, None]
        if GAIN:
            n *= tl.load(gain_ptr + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        if AFTER:
            n += tl.load(after_ptr + at, mask=mask, other=0.0).to(tl.float32)
        # Rows beyond the matrix are zeros times a finite number.
        store_tile(
            _bits_after_rounding(n, DTYPE), t, d, first, strip, mask, rows_ptr, row_scales_ptr,
            columns_ptr, column_scales_ptr, rows, width, blocks_d, 0, ROWS, COLUMNS, SQUARE, RCEIL,
            MANTISSA_BITS, LEAST_EXPONENT, LARGEST_EXPONENT, LARGEST_CODE, CAST, False, BLOCKS,
            BLOCK,
        )  # fmt: skip


_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def is_one_pass(width, *, centred, along):
    """Tell whether rows of a width are normalised and quantised in one kernel, or in two.

    A mean over a number of columns that is no power of two is rounded, by instructions that the
    compiler joins with what stands around them, in a kernel of strips otherwise than in that of the
    norm: bytes would differ. And both orientations of wide rows are faster in two kernels.
    """
    if along == "both" and width > _WIDEST_BOTH:
        return False
    return along == "rows" or not centred or width & (width - 1) == 0


def _runs_on_hopper(inputs, *, centred, along):
    if not inputs[0].is_cuda:
        return False
    from gem_precision.kernels.norm_quantize import kernel_sm90

    return kernel_sm90.supports(inputs, centred=centred, along=along)


def launch_norm_quantize(
    x_TD, before_TD, after_TD, gain_D, *, centred, eps, scaling, element, along
):
    """Return elements and scales by rows, then by columns; what is not asked for is empty."""
    rows, width = x_TD.shape
    wide = scaling == "fp8_block"
    outputs = _block_outputs(x_TD) if wide else empty_outputs(x_TD, along)
    if x_TD.numel() == 0:
        return outputs
    form = constants_of("mxfp8_rceil" if wide else scaling, element, along)
    operands = (x_TD, before_TD, after_TD, gain_D)
    if _runs_on_hopper(operands, centred=centred, along=along):
        from gem_precision.kernels.norm_quantize import kernel_sm90

        kernel_sm90.launch(
            operands, outputs, centred=centred, eps=eps, along=along, form=form, wide=wide
        )
        return outputs
    if not is_one_pass(width, centred=centred, along=along):
        y_TD = launch_norm(
            x_TD, before_TD, after_TD, gain_D, centred=centred, swish=False, eps=eps,
            out_dtype=x_TD.dtype,
        )  # fmt: skip
        return launch_quantize(y_TD, scaling=scaling, element=element, along=along)
    x, before, after = _with_equal_rows(x_TD, before_TD, after_TD)
    of_rows, warps = tile_of(width)
    given = {
        "CENTRED": centred, "BEFORE": before is not None, "AFTER": after is not None,
        "GAIN": gain_D is not None, "DTYPE": _DTYPES[x.dtype], "CAST": has_cast(x),
        "num_warps": warps,
    }  # fmt: skip
    inputs = [x if t is None else t for t in (x, before, after, gain_D)]
    # Columns beyond the tile of a norm are 0 in a sum, and change none of its bits.
    block = WIDE_BLOCK if wide else BLOCK
    block_d = max(block_of(width), block)
    if along == "rows":
        for name in ("ROWS", "COLUMNS", "SQUARE"):
            del form[name]
        form["BLOCK"] = block
        scales = outputs[1].view(torch.int32) if wide else outputs[1]
        with on_device(x):
            _norm_quantize_rows_kernel[(triton.cdiv(rows, of_rows),)](
                *inputs, outputs[0], scales, rows, width, triton.cdiv(width, block),
                x.stride(0), eps, **given, **form, WIDE=wide,
                PACKED=wide and width % 4 == 0 and width <= _WIDEST_PACKED, R=of_rows,
                BLOCKS=block_d // block,
            )  # fmt: skip
        return outputs
    columns = min(block_d, _WARP_COLUMNS[along] * warps)
    at_once = min(BLOCK, max(1, _AT_ONCE * 32 * warps // block_d))
    if at_once == BLOCK and columns == block_d:
        at_once //= 2  # no byte is stored in a tile of this shape
    with on_device(x):
        _norm_quantize_strips_kernel[(triton.cdiv(rows, BLOCK),)](
            *inputs, *outputs, rows, width, triton.cdiv(width, BLOCK), x.stride(0), eps, **given,
            **form, R=at_once, BLOCK_D=block_d, BLOCKS=columns // BLOCK,
        )  # fmt: skip
    return outputs


def _block_outputs(x_TD):
    rows, width = x_TD.shape
    scales = (triton.cdiv(width, WIDE_BLOCK), rows)
    nothing = x_TD.new_empty((0, 0), dtype=torch.uint8)
    return (
        torch.empty(x_TD.shape, dtype=torch.uint8, device=x_TD.device),
        torch.empty(scales, dtype=torch.float32, device=x_TD.device),
        nothing,
        nothing.clone(),
    )


def _with_equal_rows(*tensors):
    """Return tensors whose rows begin at the same elements, each row whole."""
    given = [t for t in tensors if t is not None]
    if all(t.stride(1) == 1 and t.stride(0) == given[0].stride(0) for t in given):
        return tensors
    return tuple(None if t is None else t.contiguous() for t in tensors)

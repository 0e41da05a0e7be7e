"""Norm and quantising of strips of 32 rows on Hopper, in Gluon.

Blocks of columns, both orientations, and squares need 32 rows, of which all are summed before the
first is divided. A persistent program has strips in shared memory, the next ones on their way while
one is computed: a strip is read once from memory, and twice from where it lies. As soon as a part
has been read the second time its place is asked for again.

Statistics have the bits of ``row_norm``: a row lies in as many warps as there, 8 elements of 256
columns a thread. Elements are quantised in tiles of 8 rows and 8 columns a thread, where most of a
block in either orientation is one thread's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gem_precision.hopper.device import (
    bytes_of,
    factor_of,
    larger_magnitude,
    rounded_to_bf16,
    scale_code_of,
    warps_meet,
)


@gluon.jit
def _store_row_scales(code, ptr, first, strip, rows, blocks_d, SQUARE: gl.constexpr):
    """Store scales of 2 blocks of a box, of each row or of all of them."""
    LAYOUT: gl.constexpr = code.type.layout
    BOXES: gl.constexpr = code.shape[0]
    if SQUARE:
        box = gl.arange(0, BOXES, layout=gl.SliceLayout(1, LAYOUT))
        half = gl.arange(0, 2, layout=gl.SliceLayout(0, LAYOUT))
        m = first + (2 * box)[:, None] + half[None, :]
        gl.store(ptr + strip * blocks_d + m, code.to(gl.uint8), mask=m < blocks_d)
    else:
        box = gl.arange(0, BOXES, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        inside = gl.arange(0, code.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        m = first + (2 * box)[:, None][:, :, None] + half[None, :][:, None, :]
        t = (strip * code.shape[1] + inside)[None, :][:, :, None]
        gl.store(ptr + t * blocks_d + m, code.to(gl.uint8), mask=(t < rows) & (m < blocks_d))


@gluon.jit
def _store_column_scales(code, ptr, first, strip, width):
    """Store a scale for each column."""
    LAYOUT: gl.constexpr = code.type.layout
    BOX: gl.constexpr = code.shape[1]
    box = gl.arange(0, code.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BOX, layout=gl.SliceLayout(0, LAYOUT))
    d = first + (BOX * box)[:, None] + column[None, :]
    gl.store(ptr + strip * width + d, code.to(gl.uint8), mask=d < width)


@gluon.jit
def _statistics(
    view,
    means,
    rstds,
    width,
    eps,
    CENTRED: gl.constexpr,
    WARPS: gl.constexpr,
    OF_ROW: gl.constexpr,
):
    """Leave mean and 1/deviation of a strip's rows in shared memory, with ``row_norm``'s bits."""
    BOXES: gl.constexpr = view.shape[0]
    BOX: gl.constexpr = view.shape[2]
    PARTS: gl.constexpr = rstds.shape[0]
    R: gl.constexpr = rstds.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [4, 1, 8], [OF_ROW, WARPS // OF_ROW, 1], [2, 0, 1]
    )
    for part in gl.static_range(PARTS):
        a = view.slice(part * R, R, dim=1).load(LAYOUT).to(gl.float32)
        a = gl.reshape(gl.permute(a, (1, 0, 2)), [R, BOXES * BOX])
        if CENTRED:
            mean_t = gl.sum(a, 1) / width
            means.index(part).store(mean_t)
            a = a - mean_t[:, None]
        rstds.index(part).store(gl.rsqrt(gl.sum(a * a, 1) / width + eps))


@gluon.jit
def _write(
    y,
    at,
    mask,
    outputs,
    first,
    strip,
    sizes,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    SQUARE: gl.constexpr,
    RCEIL: gl.constexpr,
    LARGEST_EXPONENT: gl.constexpr,
    E4M3: gl.constexpr,
):
    """Quantise and store rounded numbers (box, row, column) of a strip from ``first`` on."""
    rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr = outputs
    rows, width, blocks_d = sizes
    LAYOUT: gl.constexpr = y.type.layout
    BOXES: gl.constexpr = y.shape[0]
    STRIP: gl.constexpr = y.shape[1]
    BOX: gl.constexpr = y.shape[2]
    if ROWS or SQUARE:
        BLOCKS: gl.constexpr = [BOXES, STRIP, BOX // STRIP, STRIP]
        largest = gl.reduce(gl.reshape(y, BLOCKS), 3, larger_magnitude)
        if SQUARE:
            largest = gl.reduce(largest, 1, larger_magnitude)
        code = scale_code_of(largest, RCEIL, LARGEST_EXPONENT)
        factor = factor_of(code)
        if SQUARE:
            factor = gl.expand_dims(factor, 1)
        scaled = gl.reshape(y, BLOCKS) * gl.expand_dims(factor, 3)
        scaled = gl.convert_layout(gl.reshape(scaled, y.shape), LAYOUT, assert_trivial=True)
        gl.store(rows_ptr + at, bytes_of(scaled, E4M3), mask=mask)
        _store_row_scales(code, row_scales_ptr, first // STRIP, strip, rows, blocks_d, SQUARE)
    if COLUMNS:
        code_d = scale_code_of(gl.reduce(y, 1, larger_magnitude), RCEIL, LARGEST_EXPONENT)
        scaled_d = y * gl.expand_dims(factor_of(code_d), 1)
        gl.store(columns_ptr + at, bytes_of(scaled_d, E4M3), mask=mask)
        _store_column_scales(code_d, column_scales_ptr, first, strip, width)


@gluon.jit(do_not_specialize=["rows", "strips"])
def norm_quantize_strips_kernel(
    x_desc,
    gain_ptr,
    rows_ptr,
    row_scales_ptr,
    columns_ptr,
    column_scales_ptr,
    rows,
    width,
    blocks_d,
    strips,
    eps,
    CENTRED: gl.constexpr,
    GAIN: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    SQUARE: gl.constexpr,
    RCEIL: gl.constexpr,
    LARGEST_EXPONENT: gl.constexpr,
    E4M3: gl.constexpr,
    BOXES: gl.constexpr,
    AT_ONCE: gl.constexpr,
    SLOTS: gl.constexpr,
    PART: gl.constexpr,
    OF_ROW: gl.constexpr,
    LAYOUT: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Normalise and quantise the strips of this program; bytes and scales, every one of them."""
    STRIP: gl.constexpr = 32
    BOX: gl.constexpr = 64
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=3
    )
    OF_BOX: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    OF_T: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    OF_D: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    BYTES: gl.constexpr = BOXES * STRIP * BOX * 2
    views = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BOXES, STRIP, BOX], SWIZZLED)
    means = gl.allocate_shared_memory(gl.float32, [STRIP // PART, PART], FLAT)
    rstds = gl.allocate_shared_memory(gl.float32, [STRIP // PART, PART], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    warps_meet()
    programs = gl.num_programs(0)
    for i in gl.static_range(SLOTS):
        ahead = gl.program_id(0) + i * programs
        mbarrier.expect(full.index(i), BYTES, pred=ahead < strips)
        for part in gl.static_range(BOXES // AT_ONCE):
            tma.async_copy_global_to_shared(
                x_desc,
                [part * AT_ONCE, ahead * STRIP, 0],
                full.index(i),
                views.index(i).slice(part * AT_ONCE, AT_ONCE, dim=0),
                pred=ahead < strips,
            )
    box = gl.arange(0, AT_ONCE, layout=OF_BOX)[:, None][:, :, None] * BOX
    column = gl.arange(0, BOX, layout=OF_D)[None, :][:, None, :]
    inside = gl.arange(0, STRIP, layout=OF_T)[None, :][:, :, None]
    mine = (strips - gl.program_id(0) + programs - 1) // programs
    for turn in range(mine):
        strip_32 = gl.program_id(0) + turn * programs
        strip = strip_32.to(gl.int64)
        slot = turn % SLOTS
        view = views.index(slot)
        mbarrier.wait(full.index(slot), (turn // SLOTS) & 1)
        _statistics(view, means, rstds, width, eps, CENTRED, WARPS, OF_ROW)
        warps_meet()
        rstd = rstds._reinterpret(gl.float32, [STRIP], FLAT).load(OF_T)[None, :][:, :, None]
        mean = means._reinterpret(gl.float32, [STRIP], FLAT).load(OF_T)[None, :][:, :, None]
        t = strip * STRIP + inside
        ahead = strip_32 + SLOTS * programs
        for part in gl.static_range(BOXES // AT_ONCE):
            n = view.slice(part * AT_ONCE, AT_ONCE, dim=0).load(LAYOUT).to(gl.float32)
            warps_meet()  # all have read this part
            if part == 0:
                mbarrier.expect(full.index(slot), BYTES, pred=ahead < strips)
            tma.async_copy_global_to_shared(
                x_desc,
                [part * AT_ONCE, ahead * STRIP, 0],
                full.index(slot),
                view.slice(part * AT_ONCE, AT_ONCE, dim=0),
                pred=ahead < strips,
            )
            d = part * AT_ONCE * BOX + box + column
            if CENTRED:
                n = n - mean
            n = n * rstd
            if GAIN:
                n = n * gl.load(gain_ptr + d, mask=d < width, other=0.0).to(gl.float32)
            y = rounded_to_bf16(n)
            at = t * width + d
            mask = (t < rows) & (d < width)
            first = part * AT_ONCE * BOX
            outputs = (rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr)
            _write(
                y, at, mask, outputs, first, strip, (rows, width, blocks_d),
                ROWS, COLUMNS, SQUARE, RCEIL, LARGEST_EXPONENT, E4M3,
            )  # fmt: skip

"""Block FP8 byte by byte, against an oracle in plain Python numbers.

Every double below is exact: an fp32 number over a power of two, a midpoint of two elements.
"""

import math
from bisect import bisect_left

import pytest
import torch

from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_refuses,
    check_registration,
    poisoned_empty,
)
from gem_precision.costs import block_quantize_cost
from gem_precision.kernels.block_quantize.op import BlockMatrix
from gem_precision.ops import (
    block_dequantize,
    block_dequantize_into,
    block_quantize,
    block_quantize_both,
    block_quantize_untraced,
)

anywhere = pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("reference", "cpu"),
        pytest.param("triton", "cpu", marks=pytest.mark.interpreter),
        pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    ],
)
# Magnitudes of E4M3 in the order of their codes, by the definition of the format.
VALUES = [
    math.ldexp((code & 7) / 8 + (code >> 3 > 0), max(code >> 3, 1) - 7) for code in range(0x7F)
]


def nearest_code(value):
    """The byte nearest to a number that is not beyond 448, ties to the even one."""
    magnitude = abs(value)
    code = bisect_left(VALUES, magnitude)
    if VALUES[code] != magnitude:
        middle = (VALUES[code - 1] + VALUES[code]) / 2
        code -= magnitude < middle or (magnitude == middle and code % 2 == 1)
    return code | (0x80 if math.copysign(1.0, value) < 0 else 0)


def exponent_of(largest):
    """The least k of at least -126 for which 2^k · 448 is not below the number."""
    k = -126
    while math.ldexp(448.0, k) < largest:
        k += 1
    return k


def by_hand(x_TD, tall):
    """Elements, and an exponent for each block (None for NaN), of a matrix as lists."""
    rows, width = x_TD.shape
    x = x_TD.tolist()
    elements = torch.zeros(rows, width, dtype=torch.uint8)
    exponents = []
    for t in range(0, rows, tall):
        exponents.append([])
        for d in range(0, width, 128):
            inside = [
                (i, j) for i in range(t, min(t + tall, rows)) for j in range(d, min(d + 128, width))
            ]
            values = [x[i][j] for i, j in inside]
            k = exponent_of(max(map(abs, values))) if all(map(math.isfinite, values)) else None
            exponents[-1].append(k)
            for i, j in inside:
                code = 0x7F if k is None else nearest_code(math.ldexp(x[i][j], -k))
                elements[i, j] = code
    return elements, exponents


def wild(rows, width):
    """Numbers of all magnitudes, one block of NaN, one of zeros, one of subnormals."""
    draw = torch.Generator().manual_seed(3)
    powers = torch.randint(-40, 40, (rows, width), generator=draw)
    x_TD = torch.ldexp(torch.randn(rows, width, generator=draw), powers)
    x_TD[1, :128] = 0.0
    x_TD[2, :128] = 1e-42
    x_TD[3, 5], x_TD[4, 6] = math.nan, -math.inf
    x_TD[5, :128] = torch.linspace(-448, 448, 128)
    return x_TD


def parts(x_TD, impl):
    squares, turned = block_quantize_both(x_TD, impl=impl)
    rows = block_quantize(x_TD, impl=impl)
    square = block_quantize(x_TD, block="128x128", impl=impl)
    found = [rows, square, squares, turned]
    return [t.cpu() for m in found for t in (m.elements_TD, m.scales.view(torch.int32))]


def test_reference_gradients():
    """Bytes have no derivative: none is made up."""
    x_TD = torch.randn(3, 40, requires_grad=True)
    matrix = block_quantize(x_TD)
    y_TD = block_dequantize(matrix)
    assert not any(t.requires_grad for t in (matrix.elements_TD, matrix.scales, y_TD))


def test_registration():
    x_TD, size = torch.randn(35, 200).bfloat16(), {"rows": 35, "width": 200, "element_bytes": 2}
    for block, turned, copies in (("1x128", "no", 1), ("128x128", "both", 2)):
        check_registration(
            torch.ops.gem_precision.block_quantize,
            (x_TD, block, turned, "reference"),
            cost=block_quantize_cost(**size, block=block, copies=copies),
        )


def test_compiles_whole():
    def there_and_back(x_TD):
        rows = block_quantize(x_TD)
        return [block_dequantize(m) for m in (rows, *block_quantize_both(x_TD))]

    check_compiles_whole(there_and_back, [(torch.randn(t, 150),) for t in (5, 130)])


@pytest.mark.interpreter
def test_interpreted_kernel():
    x_TD = wild(140, 200)
    with poisoned_empty("all"):
        kernel = parts(x_TD, "triton")
    for got, expected in zip(kernel, parts(x_TD, "reference"), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_on_gpu(dtype):
    x_TD = wild(515, 2_010).to(dtype)
    with poisoned_empty("all"):
        kernel = parts(x_TD.cuda(), "triton")
    for got, expected in zip(kernel, parts(x_TD, "reference"), strict=True):
        assert torch.equal(got, expected)


@anywhere
def test_ragged_edges(impl, device):
    for rows, width in ((0, 0), (0, 40), (40, 0), (1, 1), (33, 129), (130, 7)):
        x_TD = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(device)
        with poisoned_empty("all"):
            made, square = block_quantize(x_TD, impl=impl), block_quantize_both(x_TD, impl=impl)[1]
        strips, blocks = -(-rows // 128), -(-width // 128)
        assert made.elements_TD.shape == (rows, width)
        assert made.scales.shape == (blocks, rows)
        assert square.elements_TD.shape == (width, rows)
        assert square.scales.shape == (blocks, strips)
        assert bool(block_dequantize(made).isfinite().all())
        assert bool(block_dequantize(square).isfinite().all())


def test_alone_equals_in_batch():
    """A row gives the same bytes by itself."""
    x_TD = torch.randn(6, 200)
    check_alone_equals_in_batch(
        lambda x: block_quantize(x).elements_TD,
        lambda picked: (x_TD[list(picked)],),
        [1] * 6,
        leaves=[],
        bitwise=True,
    )


def test_refuses():
    x_TD = torch.randn(4, 40)
    check_refuses(
        [
            (lambda: block_quantize(x_TD[0]), ShapeError, "x_TD"),
            (lambda: block_quantize(x_TD.double()), DtypeError, "x_TD must be fp32, bf16 or fp16"),
            (lambda: block_quantize(x_TD, block="1x32"), ConfigError, "block must be one of"),
            (lambda: block_quantize(x_TD, impl="fast"), UnsupportedError, "impl must be one of"),
        ]
    )


@pytest.mark.parametrize(
    "decode",
    [block_dequantize, lambda matrix: block_dequantize_into(torch.empty(130, 200), matrix)],
    ids=["new", "into"],
)
def test_bytes_from_elsewhere_are_refused_unless_they_fit(decode):
    """Of scales that are too few a kernel would read past the end."""
    elements_TD, scales = torch.zeros(130, 200, dtype=torch.uint8), torch.ones(2, 2)

    def given(elements_TD=elements_TD, scales=scales, block="128x128"):
        return lambda: decode(BlockMatrix(elements_TD, scales, block))

    given()()
    check_refuses(
        [
            (given(scales=scales[:1]), ShapeError, r"scales must have the shape \(2, 2\)"),
            (given(scales=torch.ones(5, 5)), ShapeError, r"scales must have the shape \(2, 2\)"),
            (given(scales=scales.double()), DtypeError, "scales must be torch.float32"),
            (given(elements_TD=elements_TD.float()), DtypeError, "elements_TD must be torch.uint8"),
            (given(elements_TD=elements_TD[0]), ShapeError, "elements_TD"),
            (given(scales=scales.to("meta")), DeviceError, "scales must be on cpu; got meta"),
            (given(block="64x64"), ConfigError, "must .*; got 64x64"),
        ]
    )


@anywhere
@pytest.mark.parametrize("block", ["1x128", "128x128"])
def test_bytes_are_those_of_plain_numbers(block, impl, device):
    x_TD = wild(131, 140)
    matrix = block_quantize(x_TD.to(device), block=block, impl=impl)
    elements, exponents = by_hand(x_TD, 1 if block == "1x128" else 128)
    assert torch.equal(matrix.elements_TD.cpu(), elements)
    scales = matrix.scales.cpu()
    found = (scales.T if block == "1x128" else scales).tolist()
    for row, expected in zip(found, exponents, strict=True):
        for scale, k in zip(row, expected, strict=True):
            assert math.isnan(scale) if k is None else scale == math.ldexp(1.0, k)


@anywhere
def test_numbers_come_back(impl, device):
    """Whole numbers up to 8 of a block survive; a NaN spoils its block, and no other."""
    x_TD = torch.randint(-8, 9, (5, 256), generator=torch.Generator().manual_seed(0)).float()
    x_TD[2, 130] = math.nan
    y_TD = block_dequantize(block_quantize(x_TD.to(device), impl=impl)).cpu()
    assert bool(y_TD[2, 128:].isnan().all())
    keep = torch.ones(5, 256, dtype=torch.bool)
    keep[2, 128:] = False
    assert torch.equal(y_TD[keep], x_TD[keep])


@anywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_written_in_one_pass_as_plain_torch_gives_them(impl, device, dtype):
    """All 256 codes under scales of every size, ragged edges, NaN, rows that lie apart."""
    rows, width = 140, 200
    codes = torch.arange(rows * width, dtype=torch.int64).remainder(256).to(torch.uint8)
    scales = torch.tensor([[1.0, 2.0**-117], [2.0**119, math.nan]])
    matrix = BlockMatrix(codes.view(rows, width), scales, "128x128")
    on = BlockMatrix(matrix.elements_TD.to(device), scales.to(device), "128x128")
    wanted = block_dequantize(matrix).to(dtype)
    room = torch.full((rows, width + 3), 7.0, dtype=dtype, device=device)
    block_dequantize_into(room[:, :width], on, impl=impl)
    assert torch.equal(room[:, width:].cpu(), torch.full((rows, 3), 7.0, dtype=dtype))
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    found, right = room[:, :width].cpu(), wanted
    assert torch.equal(found.isnan(), right.isnan())
    assert bool(right.isnan().any())
    found, right = found.nan_to_num(0.0).view(bits), right.nan_to_num(0.0).view(bits)
    assert torch.equal(found, right)


@anywhere
def test_without_the_operator_the_bytes_are_the_same(impl, device):
    x_TD = wild(140, 200).to(device)
    for x in (x_TD, x_TD[:, 3:131], x_TD.T):
        matrix, plain = block_quantize(x, block="128x128"), block_quantize_untraced(x, impl=impl)
        assert plain.block == matrix.block
        assert torch.equal(plain.elements_TD, matrix.elements_TD)
        scales = (each.scales.view(torch.int32) for each in (plain, matrix))
        assert torch.equal(*scales)


def test_where_numbers_cannot_be_written_is_refused():
    wide, rows = (block_quantize(torch.ones(3, 5), block=b) for b in ("128x128", "1x128"))
    with pytest.raises(ShapeError, match=r"out_TD must be \(3, 5\) with whole rows; got \(5, 3\)"):
        block_dequantize_into(torch.empty(5, 3), wide)
    with pytest.raises(ShapeError, match=r"got \(3, 5\) with strides \(1, 3\)"):
        block_dequantize_into(torch.empty(5, 3).T, wide)
    with pytest.raises(DtypeError, match=r"out_TD must be fp32, bf16 or fp16; got torch\.float64"):
        block_dequantize_into(torch.empty(3, 5, dtype=torch.float64), wide)
    with pytest.raises(ConfigError, match="matrix must have blocks of 128x128; got 1x128"):
        block_dequantize_into(torch.empty(3, 5), rows)


def test_a_square_is_that_of_the_transposed_matrix():
    x_TD = torch.randn(140, 200)
    plain, turned = block_quantize_both(x_TD)
    assert torch.equal(turned.elements_TD, plain.elements_TD.T)
    again = block_quantize(x_TD.T, block="128x128")
    assert torch.equal(again.elements_TD, turned.elements_TD)
    assert torch.equal(again.scales, turned.scales)


@pytest.mark.interpreter
def test_kernels_compile_without_spills():
    form = {
        "MANTISSA_BITS": 3, "LEAST_EXPONENT": -9, "LARGEST_EXPONENT": 8, "LARGEST_CODE": 0x7E,
        "CAST": True, "BLOCK": 128,
    }  # fmt: skip
    by_rows = KernelVariant(
        "_rows_kernel",
        {
            "x_ptr": "*i16", "elements_ptr": "*u8", "scales_ptr": "*i32", "rows": "i32",
            "stored_rows": "i32", "width": "i32", "blocks_d": "i32", "stride_t": "i32",
        },
        {**form, "ROWS": 32},
        aligned=["x_ptr", "elements_ptr", "scales_ptr", "width", "stride_t"],
    )  # fmt: skip
    squares = KernelVariant(
        "_squares_kernel",
        {
            "x_ptr": "*i16", "elements_ptr": "*u8", "turned_ptr": "*u8", "scales_ptr": "*i32",
            "rows": "i32", "width": "i32", "blocks_d": "i32", "stride_t": "i32",
        },
        {**form, "PLAIN": True, "TURNED": True},
        warps=8,
        aligned=["x_ptr", "elements_ptr", "turned_ptr", "scales_ptr", "rows", "width", "stride_t"],
    )  # fmt: skip
    module = "gem_precision.kernels.block_quantize.kernel"
    for done in compile_kernels(module, [by_rows, squares], capabilities=[90]):
        assert done.stack_bytes == 0, done.variant
        assert "cvt.rn.satfinite.e4m3x2.f32" in done.ptx, done.variant
        assert ".ftz" not in done.ptx, done.variant
    widen = KernelVariant(
        "_widen_kernel",
        {
            "elements_ptr": "*u8", "scales_ptr": "*fp32", "out_ptr": "*bf16", "rows": "i32",
            "width": "i32", "blocks_d": "i32", "stride_t": "i32",
        },
        {"ROWS": 32, "BLOCK": 128},
        aligned=["elements_ptr", "scales_ptr", "out_ptr", "width", "stride_t"],
    )  # fmt: skip
    for done in compile_kernels(module, [widen], capabilities=[90]):
        assert done.stack_bytes == 0
        assert "st.global.v4" in done.ptx


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("shape", [(35, 130), (7, 1)])
def test_right_on_odd_sizes(shape):
    x_TD = torch.randn(shape)
    for got, expected in zip(parts(x_TD.cuda(), "triton"), parts(x_TD, "reference"), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.large
def test_more_elements_than_an_int32_counts():
    rows, width = 2**16 + 130, 2**15
    x_TD = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x_TD[-130:] = torch.randn(130, width, device="cuda")
    # 130 rows: a strip of 128 and two rows of the next, in the whole, too.
    for block in ("1x128", "128x128"):
        whole = block_quantize(x_TD, block=block, impl="triton")
        alone = block_quantize(x_TD[-130:], block=block, impl="triton")
        assert torch.equal(whole.elements_TD[-130:], alone.elements_TD)
        scales = whole.scales[:, -130:] if block == "1x128" else whole.scales[-2:]
        assert torch.equal(scales, alone.scales)

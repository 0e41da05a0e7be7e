"""MXFP8 byte by byte, against an oracle in plain Python numbers.

Every double below is exact: an fp32 number over a power of two, a midpoint of two elements.
"""

import importlib.util
import math
import struct
from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise

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
from gem_precision.costs import mx_dequantize_cost, mx_quantize_cost
from gem_precision.elements import ELEMENTS
from gem_precision.kernels.mx_quantize.cases import CASES
from gem_precision.ops import MxMatrix, mx_dequantize, mx_quantize, mx_quantize_both

SCALINGS = ("mxfp8_rceil", "mxfp8_floor")
FLOAT_MAX = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
# Who computes, and where.
everybody = pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("reference", "cpu"),
        pytest.param("triton", "cpu", marks=pytest.mark.interpreter),
        pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    ],
)
both_elements = pytest.mark.parametrize("element", ["e4m3", "e5m2"])


def element_value(code, element):
    """What a byte means by the definition of its format."""
    mantissa_bits, bias = (3, 7) if element == "e4m3" else (2, 15)
    sign = -1.0 if code & 0x80 else 1.0
    field, mantissa = (code & 0x7F) >> mantissa_bits, code & (2**mantissa_bits - 1)
    if element == "e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if element == "e5m2" and field == 31:
        return math.nan if mantissa else sign * math.inf
    fraction = mantissa / 2**mantissa_bits
    return sign * math.ldexp(fraction + (field > 0), max(field, 1) - bias)


VALUES = {
    element: [v for v in (element_value(c, element) for c in range(128)) if math.isfinite(v)]
    for element in ELEMENTS
}


def nearest_code(value, element):
    """The byte nearest to a finite number: ties to the even one, above the largest that one."""
    values = VALUES[element]
    magnitude = min(abs(value), values[-1])
    above = bisect_left(values, magnitude)
    code = above
    if values[above] != magnitude:
        middle = (values[above - 1] + values[above]) / 2
        below = above - 1
        code = below if magnitude < middle or (magnitude == middle and below % 2 == 0) else above
    return code | (0x80 if math.copysign(1.0, value) < 0 else 0)


def scale_code(largest, scaling, element):
    """The scale of a block by the words of its rule; the quotient is one of fp32."""
    if largest == 0:
        return 0
    most = Fraction(VALUES[element][-1])
    if scaling == "mxfp8_floor":
        exponent = math.frexp(largest)[1] - 1 - (math.frexp(most)[1] - 1)
    else:
        quotient = Fraction(largest) / most
        spacing = Fraction(2) ** max(math.frexp(quotient)[1] - 24, -149)
        quotient = round(quotient / spacing) * spacing  # to even
        if quotient == 0:
            return 0
        exponent = math.frexp(quotient)[1] - (math.frexp(quotient)[0] == 0.5)
    return max(exponent, -127) + 127


def quantised_by_hand(rows, scaling, element):
    """Elements and scales of lists of numbers, by rows."""
    elements, scales = [], []
    for row in rows:
        blocks = [row[i : i + 32] for i in range(0, len(row), 32)]
        codes, bytes_of_row = [], []
        for block in blocks:
            if not all(math.isfinite(x) for x in block):
                codes.append(255)
                bytes_of_row += [0x7F] * len(block)
                continue
            codes.append(scale_code(max(map(abs, block)), scaling, element))
            bytes_of_row += [nearest_code(math.ldexp(x, 127 - codes[-1]), element) for x in block]
        scales.append(codes)
        elements.append(bytes_of_row)
    return torch.tensor(elements, dtype=torch.uint8), torch.tensor(scales, dtype=torch.uint8)


def floats(bits, like=torch.int32):
    """Numbers of the given bits."""
    dtype = {torch.int32: torch.float32, torch.int16: torch.bfloat16}[like]
    return torch.tensor(bits, dtype=torch.int64).to(like).view(dtype)


def wild(rows, width, seed=0):
    """Numbers of all magnitudes, some blocks of which are narrow."""
    draw = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 0x7F80_0000, (rows, width), generator=draw)
    narrow = torch.randn(rows, width, generator=draw)
    mixed = torch.where(torch.arange(width) // 32 % 2 == 0, floats(bits.tolist()), narrow)
    return mixed * torch.where(torch.rand(rows, width, generator=draw) < 0.5, -1.0, 1.0)


@pytest.fixture
def wide_tiles(monkeypatch):
    """Fewer and larger programs: the interpreter's time goes by programs."""
    if importlib.util.find_spec("triton"):
        import gem_precision.kernels.mx_quantize.kernel as kernel

        monkeypatch.setattr(kernel, "_BLOCKS", 16)
        monkeypatch.setattr(kernel, "_TILES", dict.fromkeys(kernel._TILES, (16, 4)))
        monkeypatch.setattr(kernel, "CHANCE_BLOCKS", 16)


def check_bytes(x, scaling, element, impl, device):
    matrix = mx_quantize(x.to(device), scaling=scaling, element=element, impl=impl)
    elements, scales = quantised_by_hand(x.tolist(), scaling, element)
    assert torch.equal(matrix.scales.cpu(), scales)
    assert torch.equal(matrix.elements_TD.cpu(), elements)
    return matrix


def bits_of(x):
    return x.cpu().view(torch.int32)


def parts(matrices):
    """The tensors of one or two matrices, on the CPU."""
    matrices = (matrices,) if isinstance(matrices, MxMatrix) else matrices
    return [t.cpu() for m in matrices for t in (m.elements_TD, m.scales)]


def all_ways(x, element="e4m3", impl="auto"):
    """The matrix by rows and by columns in one pass, by columns alone, and in squares."""
    return [
        *parts(mx_quantize_both(x, element=element, impl=impl)),
        *parts(mx_quantize(x, element=element, along="columns", impl=impl)),
        *parts(mx_quantize(x, element=element, block="32x32", impl=impl)),
    ]


def test_reference_gradients():
    """Bytes have no derivative: none is made up, of the quantised or of the decoded matrix."""
    x_TD = torch.randn(3, 40, requires_grad=True)
    matrix = mx_quantize(x_TD)
    y_TD = mx_dequantize(matrix)
    assert not any(t.requires_grad for t in (matrix.elements_TD, matrix.scales, y_TD))
    with pytest.raises(RuntimeError, match="does not require grad"):
        y_TD.sum().backward()


def test_registration():
    x_TD, size = torch.randn(35, 70).bfloat16(), {"rows": 35, "width": 70}
    check_registration(
        torch.ops.gem_precision.mx_quantize,
        (x_TD, "mxfp8_rceil", "e4m3", "both", None, "reference"),
        cost=mx_quantize_cost(**size, along="both", element_bytes=2),
    )
    by_columns = mx_quantize(x_TD, element="e5m2", along="columns")
    check_registration(
        torch.ops.gem_precision.mx_dequantize,
        (by_columns.elements_TD, by_columns.scales, "e5m2", "columns", torch.bfloat16, "reference"),
        cost=mx_dequantize_cost(**size, along="columns", element_bytes=2),
    )


def test_compiles_whole():
    def there_and_back(x_TD):
        by_rows, by_columns = mx_quantize_both(x_TD)
        square = mx_quantize(x_TD, block="32x32", element="e5m2")
        return (
            by_rows.scales,
            [mx_dequantize(m) for m in (by_rows, by_columns, square)],
            mx_dequantize(by_rows, dtype=torch.bfloat16),
        )

    check_compiles_whole(there_and_back, [(torch.randn(t, 40),) for t in (5, 70)])


@pytest.mark.interpreter
@both_elements
def test_interpreted_kernel(element):
    x_TD = wild(70, 200)
    with poisoned_empty("all"):
        kernel = all_ways(x_TD, element, "triton")
    for got, expected in zip(kernel, all_ways(x_TD, element, "reference"), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.gpu
@both_elements
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_on_gpu(dtype, element):
    x_TD = wild(515, 2_010).to(dtype)
    with poisoned_empty("all"):
        kernel = all_ways(x_TD.cuda(), element, "triton")
    for got, expected in zip(kernel, all_ways(x_TD, element, "reference"), strict=True):
        assert torch.equal(got, expected)


@everybody
def test_ragged_edges(impl, device):
    for rows, width in ((0, 0), (0, 40), (40, 0), (1, 1), (33, 31), (65, 100)):
        x_TD = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
        with poisoned_empty("all"):
            made = all_ways(x_TD.to(device), impl=impl)
        by_rows = quantised_by_hand(x_TD.tolist(), "mxfp8_rceil", "e4m3")
        by_columns = quantised_by_hand(x_TD.T.tolist(), "mxfp8_rceil", "e4m3")
        strips, blocks = -(-rows // 32), -(-width // 32)
        assert [tuple(t.shape) for t in made[1::2]] == [
            (rows, blocks), (strips, width), (strips, width), (strips, blocks)
        ]  # fmt: skip
        for matrix in (made[0], made[2], made[4], made[6]):
            assert matrix.shape == (rows, width)
        if x_TD.numel():
            assert torch.equal(made[0], by_rows[0])
            assert torch.equal(made[1], by_rows[1])
            for columns in (made[2:4], made[4:6]):
                assert torch.equal(columns[0], by_columns[0].T)
                assert torch.equal(columns[1], by_columns[1].T)


def test_alone_equals_in_batch():
    """A strip of 32 rows gives the same bytes by itself."""
    x_TD = wild(96, 40)
    for element in ELEMENTS:
        check_alone_equals_in_batch(
            lambda x, e=element: mx_quantize(x, element=e).elements_TD,
            lambda picked: (torch.cat([x_TD[32 * i : 32 * i + 32] for i in picked]),),
            (32, 32, 32),
            leaves=[],
            bitwise=True,
        )
    whole, alone = all_ways(x_TD), all_ways(x_TD[32:64])
    assert torch.equal(alone[3], whole[3][1:2])
    assert torch.equal(alone[7], whole[7][1:2])


def test_refuses():
    x_TD, matrix = torch.randn(4, 40), mx_quantize(torch.randn(4, 40))
    elements, scales = matrix.elements_TD, matrix.scales
    check_refuses(
        [
            (lambda: mx_quantize(x_TD[0]), ShapeError, "x_TD"),
            (lambda: mx_quantize(x_TD.double()), DtypeError, "x_TD must be fp32, bf16 or fp16"),
            (lambda: mx_quantize(x_TD, scaling="ceil"), ConfigError, "scaling must be one of"),
            (lambda: mx_quantize(x_TD, element="e3m4"), ConfigError, "element must be one of"),
            (lambda: mx_quantize(x_TD, block="1x16"), ConfigError, "block must be one of"),
            (lambda: mx_quantize(x_TD, along="both"), ConfigError, "along must be one of"),
            (
                lambda: mx_quantize(x_TD, block="32x32", along="columns"),
                ConfigError,
                'along must be "rows"',
            ),
            (lambda: mx_quantize(x_TD, impl="fast"), UnsupportedError, "impl must be one of"),
            (
                lambda: mx_dequantize(MxMatrix(elements, scales, "e4m3", "both")),
                ConfigError,
                "along must be",
            ),
            (
                lambda: mx_dequantize(MxMatrix(elements, scales, "e4m3", "columns")),
                ShapeError,
                r"scales must have the shape \(1, 40\)",
            ),
            (
                lambda: mx_dequantize(MxMatrix(elements, scales.int(), "e4m3", "rows")),
                DtypeError,
                "scales must be uint8",
            ),
            (
                lambda: mx_dequantize(MxMatrix(elements, scales.to("meta"), "e4m3", "rows")),
                DeviceError,
                "scales must be on cpu",
            ),
            (
                lambda: mx_dequantize(matrix, dtype=torch.float64),
                DtypeError,
                "dtype must be fp32, bf16 or fp16",
            ),
        ]
    )


@pytest.mark.parametrize("along", ["rows", "columns", "both", "square"])
def test_costs_count_the_bytes_that_are_there_and_the_fakes_have_their_shapes(along):
    size, words = {"rows": 35, "width": 70, "along": along}, ("mxfp8_floor", "e4m3", along, None)
    x_TD = torch.randn(35, 70).bfloat16()
    made = torch.ops.gem_precision.mx_quantize(x_TD, *words, "reference")
    fakes = torch.ops.gem_precision.mx_quantize(x_TD.to("meta"), *words, "reference")
    assert [t.shape for t in made] == [t.shape for t in fakes]
    stored = sum(t.numel() for t in made)
    assert mx_quantize_cost(**size, element_bytes=2).bytes == stored + 35 * 70 * 2
    if along != "both":
        assert mx_dequantize_cost(**size).bytes == stored + 35 * 70 * 4
        assert mx_dequantize_cost(**size, element_bytes=2).bytes == stored + 35 * 70 * 2


@pytest.mark.usefixtures("wide_tiles")
@everybody
@both_elements
def test_every_code_under_every_scale_decodes_to_its_value(element, impl, device):
    codes = torch.arange(256, dtype=torch.uint8)
    elements_TD, scales = codes.expand(256, 256), codes[:, None].expand(256, 8)
    expected = []
    for scale in range(256):
        for code in range(256):
            value = element_value(code, element)
            if scale == 255 or math.isnan(value):
                expected.append(0x7FC0_0000)
                continue
            finite = math.isfinite(value)
            value = math.ldexp(value, scale - 127) if finite else value
            if finite and abs(value) > FLOAT_MAX:
                value = math.copysign(FLOAT_MAX, value)
            expected.append(struct.unpack("<i", struct.pack("<f", value))[0])
    expected = torch.tensor(expected, dtype=torch.int64).to(torch.int32).view(256, 256)
    for along in ("rows", "columns"):
        given = [elements_TD, scales] if along == "rows" else [elements_TD.T, scales.T]
        matrix = MxMatrix(*(t.to(device) for t in given), element, along)
        got = bits_of(mx_dequantize(matrix, impl=impl))
        assert torch.equal(got, expected if along == "rows" else expected.T)


@pytest.mark.usefixtures("wide_tiles")
@everybody
@both_elements
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_under_every_scale_decodes_to_16_bits(dtype, element, impl, device):
    """Rounded once from the exact number, cut at the largest of the dtype, infinities kept."""
    values = torch.tensor([element_value(c, element) for c in range(256)], dtype=torch.float64)
    powers = torch.arange(256, dtype=torch.float64)[:, None] - 127
    exact, most = torch.ldexp(values[None], powers), torch.finfo(dtype).max
    exact = torch.where(values.isfinite(), exact.clamp(-most, most), values)
    exact[255] = math.nan
    # Each fits fp32, through which torch goes.
    assert torch.equal(exact[:255].float().double().nan_to_num(), exact[:255].nan_to_num())
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    matrix = MxMatrix(codes.expand(256, 256), codes[:, None].expand(256, 8), element, "rows")
    found = mx_dequantize(matrix, dtype=dtype, impl=impl).cpu()
    is_nan = exact.isnan()
    expected = exact.to(dtype).view(torch.int16)
    expected[is_nan] = 0x7FC0 if dtype == torch.bfloat16 else 0x7E00
    assert torch.equal(found.view(torch.int16), expected)
    ragged = MxMatrix(codes[:100].expand(35, 100).contiguous(), codes[100:104].expand(35, 4),
                      element, "rows")  # fmt: skip
    found = mx_dequantize(ragged, dtype=dtype, impl=impl).cpu().view(torch.int16)
    wanted = torch.cat([expected[100 + i, 32 * i : min(32 * i + 32, 100)] for i in range(4)])
    assert torch.equal(found, wanted.expand(35, 100))


@pytest.mark.usefixtures("wide_tiles")
@everybody
@both_elements
def test_every_code_under_every_scale_comes_back(element, impl, device):
    """All finite codes, of both signs, in blocks of which the largest element fixes the scale."""
    form = ELEMENTS[element]
    finite = [c | s for s in (0, 0x80) for c in range(form.largest_code + 1)]
    blocks = [finite[i : i + 31] for i in range(0, len(finite), 31)]
    row = [c for b in blocks for c in (*b, *[0] * (31 - len(b)), form.largest_code)]
    scales = range(254 - form.largest_exponent + 1)  # from there on the largest is beyond fp32
    values = [[math.ldexp(element_value(c, element), scale - 127) for c in row] for scale in scales]
    for scaling in SCALINGS:
        x_TD = torch.tensor(values, dtype=torch.float64).to(device, torch.float32)
        matrix = mx_quantize(x_TD, scaling=scaling, element=element, impl=impl)
        assert torch.equal(matrix.elements_TD.cpu(), torch.tensor([row] * len(scales)).byte())
        expected = torch.tensor(scales).byte()[:, None].expand(-1, len(blocks))
        assert torch.equal(matrix.scales.cpu(), expected)
        assert torch.equal(bits_of(mx_dequantize(matrix, impl=impl)), bits_of(x_TD))


@pytest.mark.usefixtures("wide_tiles")
@everybody
@both_elements
def test_numbers_between_two_codes_go_to_the_nearest_and_ties_to_the_even_one(
    element, impl, device
):
    values = VALUES[element]
    near = []
    for below, above in pairwise(values):
        middle = (below + above) / 2
        bits = struct.unpack("<i", struct.pack("<f", middle))[0]
        near += [bits - 1, bits, bits + 1]
    near += [n | 0x8000_0000 for n in near]
    blocks = [near[i : i + 31] for i in range(0, len(near), 31)]
    anchor = struct.unpack("<i", struct.pack("<f", values[-1]))[0]
    row = floats([n for b in blocks for n in (*b, anchor)]).double()
    for_scales = (-127, -120, -20, 0, 60, 119 if element == "e4m3" else 112)
    x_TD = torch.stack([torch.ldexp(row, torch.tensor(e)).float() for e in for_scales])
    for scaling in SCALINGS:
        check_bytes(x_TD, scaling, element, impl, device)


@pytest.mark.usefixtures("wide_tiles")
@everybody
@both_elements
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scales_of_all_exponents(scaling, element, impl, device):
    """Largest magnitudes at, above and under the points at which a scale changes."""
    mantissas = [0, 1, 2, 0x40_0000, 0x5F_FFFE, 0x5F_FFFF, 0x60_0000, 0x60_0001, 0x60_0002]
    mantissas += [0x60_0003, 0x70_0000, 0x7F_FFFE, 0x7F_FFFF]
    largest = [[(exponent << 23) | m for m in mantissas] for exponent in range(255)]
    x_TD = torch.zeros(255, 32 * len(mantissas))
    x_TD[:, 7::32] = floats(largest)
    x_TD[:, 9::32] = -floats(largest) / 3
    check_bytes(x_TD, scaling, element, impl, device)


@pytest.mark.usefixtures("wide_tiles")
@everybody
def test_all_numbers_of_bf16(impl, device):
    """Each of the 65,536, in blocks of one exponent and in blocks of many."""
    every = floats([list(range(i, i + 256)) for i in range(0, 65_536, 256)], torch.int16)
    for x_TD, element in ((every, "e4m3"), (every.T, "e5m2"), (every.T, "e4m3")):
        narrow = parts(mx_quantize(x_TD.to(device), element=element, impl=impl))
        wide = quantised_by_hand(x_TD.float().tolist(), "mxfp8_rceil", element)
        assert torch.equal(narrow[0], wide[0])
        assert torch.equal(narrow[1], wide[1])


@pytest.mark.usefixtures("wide_tiles")
@everybody
def test_fp16_gives_the_bytes_of_its_numbers(impl, device):
    bits = torch.arange(65_536).to(torch.int16).view(64, 1_024)
    x_TD = bits.view(torch.float16)
    for ours, expected in zip(
        all_ways(x_TD.to(device), impl=impl), all_ways(x_TD.float()), strict=True
    ):
        assert torch.equal(ours, expected)


@pytest.mark.usefixtures("wide_tiles")
@everybody
def test_what_went_wrong_elsewhere(impl, device):
    inf, nan = math.inf, math.nan
    rows = [
        [0.0] * 32 + [1.0, -0.0] * 16,  # a block of zeros beside another
        [449.0, 464.0, 465.0, 480.0, -500.0, 511.0] + [1.0] * 26 + [1e4, -3e38] * 16,
        [1e-37] * 32 + [-1e-37] * 32,
        [1e-39] * 32 + [2.0**-128, 2.0**-140, 0.0, 1e-45] * 8,
        [1e-45] * 32 + [2.0**-126] * 32,
        [1.0, nan, inf] + [5.0] * 29 + [-inf] + [0.0] * 31,
        [3.4028234663852886e38] * 32 + [1.0] * 32,
    ]
    x_TD = torch.tensor(rows)
    for scaling in SCALINGS:
        for element in ELEMENTS:
            matrix = check_bytes(x_TD, scaling, element, impl, device)
            y_TD = mx_dequantize(matrix, impl=impl).cpu()
            assert torch.equal(y_TD[0, :32], torch.zeros(32))
            assert bool(y_TD[5].isnan().all())
            assert bool(y_TD[[0, 1, 2, 3, 4, 6]].isfinite().all())
    matrix = mx_quantize(x_TD.to(device), impl=impl)
    y_TD = mx_dequantize(matrix, impl=impl).cpu()
    assert matrix.scales.cpu()[5].tolist() == [255, 255]
    torch.testing.assert_close(y_TD[3, :32], x_TD[3, :32], rtol=1 / 16, atol=0)
    assert float(y_TD[6, 0]) == FLOAT_MAX
    # Whatever bit of sign or payload a NaN has.
    for bits in (0x7F80_0001, 0x7FFF_FFFF, 0xFFC0_0000, 0xFFFF_FFFF):
        odd = mx_quantize(floats([[bits, 0]]).to(device), impl=impl)
        assert odd.scales.tolist() == [[255]]
        assert odd.elements_TD.tolist() == [[0x7F, 0x7F]]


@pytest.mark.usefixtures("wide_tiles")
@everybody
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_change_no_byte(dtype, impl, device):
    base = torch.randn(40, 3, 70, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    for x_TD in (base[:, 1, 3:50], base[:, 1].T, base[::2, 0, ::3]):
        views, copies = all_ways(x_TD, impl=impl), all_ways(x_TD.contiguous(), impl=impl)
        for view, copy in zip(views, copies, strict=True):
            assert torch.equal(view, copy)


@pytest.mark.usefixtures("wide_tiles")
@everybody
def test_squares_take_the_largest_of_32_by_32(impl, device):
    x_TD = wild(70, 100)
    matrix = mx_quantize(x_TD.to(device), block="32x32", impl=impl)
    for i in range(3):
        for j in range(4):
            tile = x_TD[32 * i : 32 * i + 32, 32 * j : 32 * j + 32]
            scale = scale_code(float(tile.abs().max()), "mxfp8_rceil", "e4m3")
            assert int(matrix.scales[i, j]) == scale
            got = matrix.elements_TD[32 * i : 32 * i + 32, 32 * j : 32 * j + 32].cpu()
            by_hand = [
                [nearest_code(math.ldexp(v, 127 - scale), "e4m3") for v in row]
                for row in tile.tolist()
            ]
            assert got.tolist() == by_hand
    turned = mx_quantize(x_TD.to(device).T, block="32x32", impl=impl)
    assert torch.equal(turned.elements_TD, matrix.elements_TD.T)
    assert torch.equal(turned.scales, matrix.scales.T)
    y_TD = mx_dequantize(matrix, impl=impl)
    assert torch.equal(bits_of(mx_dequantize(turned, impl=impl)), bits_of(y_TD.T.contiguous()))


def test_flushing_of_subnormals_changes_no_byte():
    x_TD = wild(64, 64)
    x_TD[:, ::3] *= 1e-38
    x_TD[:, 1::32] = 1e-40
    before = all_ways(x_TD)
    decoded = bits_of(mx_dequantize(mx_quantize(x_TD)))
    try:
        assert torch.set_flush_denormal(True)
        after = all_ways(x_TD)
        decoded_after = bits_of(mx_dequantize(mx_quantize(x_TD)))
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(decoded, decoded_after)


@pytest.mark.parametrize("case", [c for c in CASES if c.device == "cpu"], ids=lambda c: c.name)
def test_bytes_are_those_of_torch_where_its_cast_is_the_same_everywhere(case):
    x_TD = torch.randn(case.rows, case.width).bfloat16()
    block = "32x32" if case.along == "square" else "1x32"
    matrix = mx_quantize(x_TD, block=block)
    per = 32 if block == "32x32" else 1
    exponents = matrix.scales.int().repeat_interleave(per, 0)[: case.rows] - 127
    scales = torch.ldexp(torch.ones(()), exponents.repeat_interleave(32, 1)[:, : case.width])
    # Rounded up, no quotient is above 448, where versions of torch differ.
    assert torch.equal((x_TD.float() / scales).to(torch.float8_e4m3fn).view(torch.uint8),
                       matrix.elements_TD)  # fmt: skip


@pytest.mark.interpreter
def test_kernels_compile_without_spills():
    sizes = dict.fromkeys(["rows", "width", "blocks_d", "tiles_d", "stride_t"], "i32")
    form = {"MANTISSA_BITS": 3, "LEAST_EXPONENT": -9, "LARGEST_CODE": 0x7E}
    tile = {"BLOCK": 32}
    outputs = ("rows_ptr", "row_scales_ptr", "columns_ptr", "column_scales_ptr")
    aligned = ["x_ptr", "elements_ptr", "y_ptr", "scales_ptr", *outputs, "width", "stride_t"]
    # Input; by rows, by columns, in squares; by the cast; blocks and warps of the tiles that run.
    ways = [
        ("*i16", (True, False, False), True, 4, 2),
        ("*i32", (False, True, False), True, 2, 1),
        ("*i16", (True, True, False), False, 4, 4),
        ("*fp16", (False, False, True), True, 4, 4),
        ("*i16", (True, True, False), True, 4, 2),
    ]
    forward = [
        KernelVariant(
            "_mx_quantize_kernel",
            {"x_ptr": pointer, **dict.fromkeys(outputs, "*u8"), **sizes, "seed": "i64"},
            {**form, **tile, "LARGEST_EXPONENT": 8, "RCEIL": True, "ROWS": by_rows,
             "COLUMNS": by_columns, "SQUARE": square, "CAST": cast, "CHANCE": False,
             "BLOCKS": blocks},
            warps=warps,
            aligned=aligned,
        )
        for pointer, (by_rows, by_columns, square), cast, blocks, warps in ways
    ]  # fmt: skip
    back = [
        KernelVariant(
            "_mx_dequantize_kernel",
            {"elements_ptr": "*u8", "scales_ptr": "*u8", "y_ptr": pointer, **sizes},
            {**form, **tile, "TO": to, "BLOCKS": 4, "INFINITE_CODE": 0x80, "COLUMNS": False,
             "SQUARE": False},
            aligned=aligned,
        )
        for pointer, to in (("*i32", "fp32"), ("*i16", "bf16"))
    ]  # fmt: skip
    for done in compile_kernels("gem_precision.kernels.mx_quantize.kernel", [*forward, *back]):
        assert done.stack_bytes == 0, done.variant
        assert "st.global.v" in done.ptx, done.variant
        # Flushed subnormals, or another rounding, would be other bytes.
        assert ".ftz" not in done.ptx, done.variant
        casts = "cvt.rn.satfinite.e4m3x2.f32" in done.ptx
        assert casts == done.variant.constants.get("CAST", False), done.variant


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("shape", [(35, 130), (7, 1)])
def test_right_on_odd_sizes(shape):
    # Expected bytes come from the CPU: under the sanitizer every kernel of torch is slow too.
    x_TD = wild(*shape).bfloat16()
    kernel = all_ways(x_TD.cuda(), impl="triton")
    for got, expected in zip(kernel, all_ways(x_TD), strict=True):
        assert torch.equal(got, expected)
    matrix = mx_quantize(x_TD.cuda(), impl="triton")
    expected = mx_dequantize(mx_quantize(x_TD))
    assert torch.equal(bits_of(mx_dequantize(matrix, impl="triton")), bits_of(expected))
    for dtype in (torch.bfloat16, torch.float16):
        narrow = mx_dequantize(matrix, dtype=dtype, impl="triton").cpu()
        assert torch.equal(
            narrow.view(torch.int16),
            mx_dequantize(mx_quantize(x_TD), dtype=dtype).view(torch.int16),
        )


@pytest.mark.gpu
@pytest.mark.large
def test_more_elements_than_an_int32_counts():
    rows, width = 2**16 + 33, 2**15
    x_TD = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x_TD[-65:] = torch.randn(65, width, device="cuda")
    # 65 rows: the last 33 are a strip and a row of their own in the whole, too.
    whole = mx_quantize(x_TD, impl="triton")
    alone = mx_quantize(x_TD[-65:], impl="triton")
    assert torch.equal(whole.elements_TD[-65:], alone.elements_TD)
    assert torch.equal(whole.scales[-65:], alone.scales)
    assert torch.equal(
        mx_dequantize(whole, impl="triton")[-65:], mx_dequantize(alone, impl="triton")
    )

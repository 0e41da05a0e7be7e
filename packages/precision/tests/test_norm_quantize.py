"""A norm and the quantising of its result in one pass: the bytes of the two one after the other.

Norms and quantising are tested by themselves, in other files and by other oracles; here the chain
of both is the oracle, of the same implementation, and plain numbers in fp64 beside it.
"""

import json

import pytest
import torch

from gem_opkit.checks import run_fresh
from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_refuses,
    check_registration,
    count_launches,
    poisoned_empty,
)
from gem_precision.costs import norm_quantize_cost
from gem_precision.kernels.norm_quantize.cases import CASES
from gem_precision.ops import (
    block_dequantize,
    block_quantize,
    layer_norm,
    mx_dequantize,
    mx_quantize,
    mx_quantize_both,
    norm_block_quantize,
    norm_quantize,
    norm_quantize_both,
    rms_norm,
)

KINDS = ("rms", "layer")
anywhere = pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("reference", "cpu"),
        pytest.param("triton", "cpu", marks=pytest.mark.interpreter),
        pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    ],
)


def inputs(rows, width, *, around=False, dtype=torch.float32, device="cpu"):
    """A matrix, and with ``around`` what stands around its norm, by name."""
    draw = torch.Generator().manual_seed(rows + width)
    x_TD = torch.randn(rows, width, generator=draw) * torch.logspace(-3, 3, max(width, 1))[:width]
    beside = {}
    if around:
        beside = {n: torch.randn(rows, width, generator=draw) for n in ("before_TD", "after_TD")}
        beside["gain_D"] = torch.randn(width, generator=draw)
    moved = {name: t.to(device, dtype) for name, t in beside.items()}
    return x_TD.to(device, dtype), moved


def fused(x_TD, kind, impl, **beside):
    """Bytes and scales of all orientations and formats, in one pass each."""
    given = {"kind": kind, "impl": impl, **beside}
    matrices = [
        *(norm_quantize(x_TD, along=along, **given) for along in ("rows", "columns")),
        *norm_quantize_both(x_TD, scaling="mxfp8_floor", element="e5m2", **given),
        norm_quantize(x_TD, block="32x32", **given),
        norm_block_quantize(x_TD, **given),
    ]
    return [t.cpu() for m in matrices for t in (m.elements_TD, m.scales)]


def chain(x_TD, kind, impl, *, before_TD=None, after_TD=None, gain_D=None):
    """The same by a norm and then by quantising what it wrote."""
    norm = rms_norm if kind == "rms" else layer_norm
    y_TD = norm(x_TD, before=before_TD, after=after_TD, gain_D=gain_D, impl=impl)
    assert y_TD.dtype == x_TD.dtype
    matrices = [
        *(mx_quantize(y_TD, along=along, impl=impl) for along in ("rows", "columns")),
        *mx_quantize_both(y_TD, scaling="mxfp8_floor", element="e5m2", impl=impl),
        mx_quantize(y_TD, block="32x32", impl=impl),
        block_quantize(y_TD, impl=impl),
    ]
    return [t.cpu() for m in matrices for t in (m.elements_TD, m.scales)]


def strips_on_hopper(x_TD, kind, beside):
    """Whether both orientations are one kernel for rows that are too wide for the portable one."""
    if not x_TD.is_cuda:
        return False
    from gem_precision.kernels.norm_quantize.kernel_sm90 import supports

    operands = (x_TD, *(beside.get(name) for name in ("before_TD", "after_TD", "gain_D")))
    return supports(operands, centred=kind == "layer", along="both")


def check(x_TD, kind, impl, **beside):
    with poisoned_empty("all"), count_launches() as launches:
        made = fused(x_TD, kind, impl, **beside)
    # Five calls of one kernel, or of a norm's and a quantising one: of both orientations of wide
    # rows, and of strips where a mean is rounded.
    width, apart = x_TD.shape[1], 0
    if kind == "layer" and width.bit_count() > 1:
        apart = 3
    elif width > 512 and not strips_on_hopper(x_TD, kind, beside):
        apart = 1
    assert launches.count == (5 + apart if impl == "triton" and x_TD.numel() else 0)
    for got, expected in zip(made, chain(x_TD, kind, impl, **beside), strict=True):
        assert got.shape == expected.shape
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_reference_gradients():
    """Bytes have no derivative: none is made up."""
    x_TD = torch.randn(3, 40, requires_grad=True)
    made = norm_quantize(x_TD, gain_D=torch.ones(40, requires_grad=True))
    assert not any(t.requires_grad for t in (made.elements_TD, made.scales))


def test_registration():
    x_TD, beside = inputs(35, 200, around=True, dtype=torch.bfloat16)
    size = {"rows": 35, "width": 200, "element_bytes": 2}
    for form in (
        ("mxfp8_rceil", "e4m3", "both"),
        ("mxfp8_floor", "e5m2", "columns"),
        ("mxfp8_rceil", "e4m3", "square"),
        ("fp8_block", "e4m3", "rows"),
    ):
        along = "block" if form[0] == "fp8_block" else form[2]
        for given in ((None, None, None), tuple(beside.values())):
            with_all = {"read": 3, "affine": True} if given[0] is not None else {}
            check_registration(
                torch.ops.gem_precision.norm_quantize,
                (x_TD, *given, False, 1e-6, *form, "reference"),
                cost=norm_quantize_cost(**size, along=along, **with_all),
            )


def test_compiles_whole():
    def there_and_back(x_TD):
        by_rows, by_columns = norm_quantize_both(x_TD, kind="layer")
        wide = norm_block_quantize(x_TD)
        return [mx_dequantize(by_rows), mx_dequantize(by_columns), block_dequantize(wide)]

    check_compiles_whole(there_and_back, [(torch.randn(t, 150),) for t in (40, 130)])


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_kernel(kind):
    x_TD, beside = inputs(35, 256, around=True)
    check(x_TD, kind, "triton", **beside)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "dtype", "kind", "around"),
    [
        (96, torch.float16, "layer", True),
        (512, torch.bfloat16, "rms", False),
        (512, torch.bfloat16, "layer", True),
        (1_024, torch.float32, "rms", True),
        (2_010, torch.float32, "layer", False),
        (2_048, torch.bfloat16, "rms", True),
        (4_096, torch.bfloat16, "layer", False),
        (16_384, torch.bfloat16, "rms", False),
        (256, torch.bfloat16, "layer", False),
        (1_024, torch.bfloat16, "rms", False),
        (1_536, torch.bfloat16, "rms", False),
        (2_048, torch.bfloat16, "layer", False),
    ],
)
def test_kernel_on_gpu(width, dtype, kind, around):
    """Rows enough that a sum in another order would show in a byte."""
    rows = 2**25 // width + 5
    x_TD, beside = inputs(rows, width, around=around, dtype=dtype, device="cuda")
    check(x_TD, kind, "triton", **beside)


@anywhere
def test_ragged_edges(impl, device):
    for rows, width in ((0, 0), (0, 40), (40, 0), (1, 1), (33, 64), (33, 130)):
        for kind, around in (("rms", False), ("layer", True)):
            x_TD, beside = inputs(rows, width, around=around, device=device)
            check(x_TD, kind, impl, **beside)


def test_alone_equals_in_batch():
    """A row gives the same bytes by itself."""
    x_TD = inputs(6, 200)[0]
    check_alone_equals_in_batch(
        lambda x: norm_quantize(x).elements_TD,
        lambda picked: (x_TD[list(picked)],),
        [1] * 6,
        leaves=[],
        bitwise=True,
    )


def test_refuses():
    x_TD = torch.randn(4, 40)
    check_refuses(
        [
            (lambda: norm_quantize(x_TD[0]), ShapeError, "x_TD"),
            (lambda: norm_quantize(x_TD, before_TD=x_TD[:3]), ShapeError, "T=3"),
            (lambda: norm_quantize(x_TD.double()), DtypeError, "x_TD must be fp32, bf16 or fp16"),
            (
                lambda: norm_quantize(x_TD, after_TD=x_TD.bfloat16()),
                DtypeError,
                "after_TD must be torch.float32 like x_TD",
            ),
            (
                lambda: norm_block_quantize(x_TD, gain_D=torch.ones(40, dtype=torch.int32)),
                DtypeError,
                "gain_D must be floating point",
            ),
            (
                lambda: norm_quantize(x_TD, gain_D=torch.ones(40, device="meta")),
                DeviceError,
                "gain_D must be on cpu",
            ),
            (lambda: norm_quantize(x_TD, kind="batch"), ConfigError, "kind must be one of rms"),
            (lambda: norm_quantize(x_TD, eps=0.0), ConfigError, "eps must be above 0"),
            (lambda: norm_quantize(x_TD, scaling="up"), ConfigError, "scaling must be one of"),
            (lambda: norm_quantize(x_TD, element="e3m4"), ConfigError, "element must be one of"),
            (lambda: norm_quantize(x_TD, block="64x64"), ConfigError, "block must be one of"),
            (lambda: norm_quantize(x_TD, along="both"), ConfigError, "along must be one of"),
            (
                lambda: norm_quantize(x_TD, block="32x32", along="columns"),
                ConfigError,
                'along must be "rows"',
            ),
            (lambda: norm_quantize(x_TD, impl="fast"), UnsupportedError, "impl must be one of"),
            (
                lambda: norm_quantize(torch.ones(1, 16_385), impl="triton"),
                UnsupportedError,
                "rows of at most 16384",
            ),
        ]
    )


# What Hopper's kernels take beside a norm: one of these, and for strips a gain alone.
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["before_TD", "gain_D"])
@pytest.mark.parametrize(("width", "kind"), [(512, "rms"), (1_024, "layer"), (2_048, "rms")])
def test_what_stands_beside_the_norm_on_gpu(width, kind, name):
    rows = 2**23 // width + 5
    x_TD, beside = inputs(rows, width, around=True, dtype=torch.bfloat16, device="cuda")
    check(x_TD, kind, "triton", **{name: beside[name]})


# Every number of a format in its place: zeros, the smallest, the largest, infinities and NaN.
@pytest.mark.gpu
@pytest.mark.parametrize("width", [512, 2_048])
def test_rows_that_are_odd_on_gpu(width):
    x_TD, _ = inputs(200, width, dtype=torch.bfloat16, device="cuda")
    x_TD[3, 5], x_TD[40, 7], x_TD[41, 9] = torch.nan, torch.inf, -torch.inf
    x_TD[64:97], x_TD[100], x_TD[101] = 0.0, 1e-38, 3e38
    x_TD[130, 1:] = 0.0
    check(x_TD, "rms", "triton")


@anywhere
@pytest.mark.parametrize("kind", KINDS)
def test_elements_are_the_nearest_to_the_norm_of_plain_numbers(kind, impl, device):
    """In fp64, away from the code under test: half a step of E4M3, and what fp32 rounds."""
    x_TD = inputs(64, 160)[0]
    wide = x_TD.double()
    if kind == "layer":
        wide = wide - wide.mean(1, keepdim=True)
    exact = wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt()
    for along in ("rows", "columns"):
        made = norm_quantize(x_TD.to(device), kind=kind, along=along, impl=impl)
        found = mx_dequantize(made).cpu().double()
        dim = 1 if along == "rows" else 0
        scales = torch.ldexp(torch.ones(()), made.scales.cpu().int() - 127).double()
        scales = scales.repeat_interleave(32, dim)
        allowed = torch.maximum(exact.abs() * 2.0**-4, scales * 2.0**-10)
        assert bool(((found - exact).abs() <= allowed * (1 + 1e-5)).all())


@anywhere
def test_what_is_not_finite_is_loud(impl, device):
    x_TD = inputs(40, 70)[0]
    x_TD[3, 5] = torch.nan
    made = norm_quantize(x_TD.to(device), impl=impl)
    found = mx_dequantize(made).cpu()
    assert bool(found[3].isnan().all())
    keep = torch.arange(40) != 3
    assert bool(found[keep].isfinite().all())
    by_columns = mx_dequantize(norm_quantize(x_TD.to(device), along="columns", impl=impl)).cpu()
    assert bool(by_columns[:32].isnan().all())
    assert bool(by_columns[32:].isfinite().all())


@anywhere
def test_strides_change_no_byte(impl, device):
    x_TD, beside = inputs(70, 96, around=True, device=device)
    plain = fused(x_TD, "layer", impl, **beside)
    apart = torch.zeros(70, 200, device=device)[:, :96].copy_(x_TD)
    turned = {n: t.T.contiguous().T if t.ndim == 2 else t for n, t in beside.items()}
    for got, expected in zip(fused(apart, "layer", impl, **turned), plain, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("case", [c for c in CASES if c.device == "cpu"], ids=lambda c: c.name)
def test_cases_run(case):
    x_TD = torch.randn(case.rows, case.width)
    call = {"block": norm_block_quantize, "both": norm_quantize_both}[case.along]
    assert call(x_TD, kind=case.kind) is not None


@pytest.mark.interpreter
def test_kernels_compile_without_spills():
    form = {
        "MANTISSA_BITS": 3, "LEAST_EXPONENT": -9, "LARGEST_EXPONENT": 8, "LARGEST_CODE": 0x7E,
        "CAST": True, "RCEIL": True, "CENTRED": True, "BEFORE": True, "AFTER": False,
        "GAIN": False, "DTYPE": "bf16", "BLOCK": 32,
    }  # fmt: skip
    read = dict.fromkeys(["x_ptr", "before_ptr", "after_ptr", "gain_ptr"], "*bf16")
    sizes = dict.fromkeys(["rows", "width", "blocks_d", "stride_t"], "i32") | {"eps": "fp32"}
    by_rows = KernelVariant(
        "_norm_quantize_rows_kernel",
        {**read, "elements_ptr": "*u8", "scales_ptr": "*u8", **sizes},
        {**form, "WIDE": False, "PACKED": True, "R": 2, "BLOCKS": 16},
        warps=2,
        aligned=[*read, "elements_ptr", "scales_ptr", "width", "stride_t"],
    )
    written = dict.fromkeys(
        ["rows_ptr", "row_scales_ptr", "columns_ptr", "column_scales_ptr"], "*u8"
    )
    strips = KernelVariant(
        "_norm_quantize_strips_kernel",
        {**read, **written, **sizes},
        {
            **form, "ROWS": True, "COLUMNS": True, "SQUARE": False, "R": 8, "BLOCK_D": 512,
            "BLOCKS": 2,
        },
        warps=2,
        aligned=[*read, *written, "width", "stride_t"],
    )  # fmt: skip
    module = "gem_precision.kernels.norm_quantize.kernel"
    for done in compile_kernels(module, [by_rows, strips], capabilities=[90]):
        assert done.stack_bytes == 0, done.variant
        assert "cvt.rn.satfinite.e4m3x2.f32" in done.ptx, done.variant


# Gluon has no interpreter: without a GPU its kernels can only be compiled.
_HOPPER = """
import json, pathlib, re, subprocess, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gem_precision.kernels.norm_quantize import kernel_sm90 as module

TOOLS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
FORM = dict(CENTRED=True, GAIN=True, RCEIL=True, LARGEST_EXPONENT=8, E4M3=True)

def compiled(kernel, constants):
    options = {n: constants.pop(n) for n in ("num_warps", "maxnreg") if n in constants}
    constants = constants | FORM
    tile = f"tensordesc<bf16[{constants.get('AT_ONCE')},32,64],{SWIZZLED!r}>"
    types = dict.fromkeys(["x_ptr", "before_ptr", "gain_ptr"], "*bf16")
    types |= dict(x_desc=tile, eps="fp32")
    names = kernel.arg_names
    types = {n: "*u8" if n.endswith("_ptr") else "i32" for n in names} | types
    if constants.get("WIDE"):
        types["scales_ptr"] = "*i32"
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    values = {(i,): constants[n] for i, n in enumerate(names) if n in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
               if signature[n].startswith("*") or n == "width"}
    made = triton.compile(
        GluonASTSource(kernel, signature, values, aligned),
        target=GPUTarget("cuda", 90, 32), options=options,
    )
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernel.ptx"
        source.write_text(made.asm["ptx"])
        said = subprocess.run(
            [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", folder + "/kernel.cubin"],
            capture_output=True, text=True, check=True,
        ).stderr
    stack, = re.findall(r"(\\d+) bytes stack frame", said)
    registers, = re.findall(r"Used (\\d+) registers", said)
    threads = 32 * options["num_warps"]
    return dict(
        stack=int(stack), on_multiprocessor=65_536 // (int(registers) * threads),
        shared=made.metadata.shared, wanted=1 + ("maxnreg" in options),
        stores="st.global.v2.b32" in made.asm["ptx"],
    )

both = dict(ROWS=True, COLUMNS=True, SQUARE=False)
done = [compiled(module.norm_quantize_strips_kernel, module.strips_constants(width) | both)
        for width in (512, 1_024, 2_048)]
done += [compiled(module.norm_quantize_rows_kernel,
                  module.rows_constants(width, wide=wide) | dict(BEFORE=False))
         for width, wide in ((512, False), (2_048, True))]
print(json.dumps(done))
"""


@pytest.mark.interpreter
def test_hopper_kernels_compile_without_spills():
    for report in json.loads(run_fresh(_HOPPER, timeout_s=300).splitlines()[-1]):
        assert report["stack"] == 0, report
        assert report["on_multiprocessor"] >= report["wanted"], report
        assert report["wanted"] * (report["shared"] + 1024) <= 228 * 1024, report
        assert report["stores"], report  # 8 bytes leave a thread at once


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("shape", [(35, 130), (7, 1)])
def test_right_on_odd_sizes(shape):
    x_TD, beside = inputs(*shape, around=True, device="cuda")
    check(x_TD, "layer", "triton", **beside)


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("shape", [(35, 512), (7, 1_984), (70, 272)])
def test_right_on_odd_sizes_in_bf16(shape):
    x_TD, _ = inputs(*shape, dtype=torch.bfloat16, device="cuda")
    check(x_TD, "rms", "triton")


@pytest.mark.gpu
@pytest.mark.large
def test_more_elements_than_an_int32_counts():
    rows, width = 2**20 + 34, 2_048
    x_TD = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x_TD[-34:] = torch.randn(34, width, device="cuda")
    # A strip of 32 rows and two rows of the next, in the whole, too.
    for along in ("rows", "columns"):
        whole = norm_quantize(x_TD, along=along, impl="triton")
        alone = norm_quantize(x_TD[-34:], along=along, impl="triton")
        assert torch.equal(whole.elements_TD[-34:], alone.elements_TD)
        scales = whole.scales[-34:] if along == "rows" else whole.scales[-2:]
        assert torch.equal(scales, alone.scales)

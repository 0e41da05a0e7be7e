"""A linear map of which each product has a format of its own.

Whole numbers up to 8 are exact in every format, and so are their products and sums: on those the
map must equal plain torch to the bit, gradients included. Other inputs are held to the fp64
products of the numbers that the factors have after rounding, which ``mx_quantize`` and
``block_quantize``, tested by themselves, give.
"""

import pytest
import torch
import torch.nn.functional as F

from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_budget,
    check_compiles_whole,
    check_refuses,
    check_registration,
    count_launches,
    poisoned_empty,
)
from gem_precision.contract import LinearFormats
from gem_precision.costs import quantized_linear_backward_cost, quantized_linear_cost
from gem_precision.hadamard import random_hadamard
from gem_precision.kernels.quantized_linear.op import formats_named
from gem_precision.ops import (
    block_dequantize,
    block_quantize,
    fp8_block_linear,
    mx_dequantize,
    mx_quantize,
    quantized_linear,
)

NAMES = ("bf16", "fp8_block", "mxfp8_rceil", "mxfp8_floor")
anywhere = pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("reference", "cpu"),
        pytest.param("triton", "cpu", marks=pytest.mark.interpreter),
        pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    ],
)


def inputs(rows, width, columns, *, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    shapes = ((rows, width), (columns, width), (rows, columns))
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def whole_numbers(rows, width, columns):
    draw = torch.Generator().manual_seed(1)
    shapes = ((rows, width), (columns, width), (rows, columns))
    return [torch.randint(-7, 8, shape, generator=draw).float() for shape in shapes]


def run(given, name, impl):
    x_TD, weight_FD, grad_TF = given
    x_TD, weight_FD = x_TD.detach().requires_grad_(), weight_FD.detach().requires_grad_()
    y_TF = quantized_linear(x_TD, weight_FD, formats=formats_named(name), impl=impl)
    return y_TF.detach(), *torch.autograd.grad(y_TF, (x_TD, weight_FD), grad_TF)


def rounded(x, number_format, block):
    """The numbers of a factor after rounding, fp64."""
    if number_format == "bf16":
        return x.bfloat16().double()
    if number_format == "fp8_block":
        return block_dequantize(block_quantize(x, block=block)).double()
    return mx_dequantize(mx_quantize(x, scaling=number_format)).double()


def exact(given, name):
    """Output and gradients in fp64, on the CPU."""
    x_TD, weight_FD, grad_TF = (t.cpu() for t in given)
    last = "bf16" if name == "fp8_block" else name

    def product(a, b, number_format):
        return rounded(a, number_format, "1x128") @ rounded(b, number_format, "128x128").T

    return (
        product(x_TD, weight_FD, name),
        product(grad_TF, weight_FD.T, name),
        product(grad_TF.T, x_TD.T, last),
    )


def check(given, name, impl):
    with poisoned_empty("all"), count_launches() as launches:
        made = run(given, name, impl)
    expected, honest = exact(given, name), run([t.cpu() for t in given], name, "reference")
    # Hopper's tensor cores sum 8-bit products with 13 bits; sums of 128 are then in fp32.
    band = torch.float16 if name == "fp8_block" and made[0].is_cuda else None
    for got, low, right, what in zip(made, honest, expected, ("y", "dx", "dW"), strict=True):
        in_8_bits = band if what != "dW" and low.dtype == torch.float32 else None
        what = f"{name}: {what}"
        check_budget(got.cpu(), low, right, what=what, noise_scale=1e3, band_dtype=in_8_bits)
    return launches.count


@pytest.mark.parametrize("name", NAMES)
def test_reference_gradients(name):
    given = whole_numbers(37, 150, 140)
    x_TD, weight_FD = given[0].requires_grad_(), given[1].requires_grad_()
    y_TF = F.linear(x_TD, weight_FD)
    expected = (y_TF.detach(), *torch.autograd.grad(y_TF, (x_TD, weight_FD), given[2]))
    for got, right in zip(run(given, name, "reference"), expected, strict=True):
        assert torch.equal(got, right)


def test_registration():
    x_TD, weight_FD, grad_TF = inputs(5, 40, 6)
    size = {"rows": 5, "width": 40, "columns": 6, "element_bytes": 4}
    words = ("fp8_block", "fp8_block", "bf16")
    check_registration(
        torch.ops.gem_precision.quantized_linear,
        (x_TD.requires_grad_(), weight_FD.requires_grad_(), *words, "reference"),
        cost=quantized_linear_cost(**size),
        backward_cost=quantized_linear_backward_cost(**size),
    )
    check_registration(
        torch.ops.gem_precision.quantized_linear_backward,
        (grad_TF, x_TD.detach(), weight_FD.detach(), *words[1:], True, False, "reference"),
        cost=quantized_linear_backward_cost(**size, products=1),
    )


def test_compiles_whole():
    def call(x_TD, weight_FD):
        return quantized_linear(x_TD, weight_FD, formats=formats_named("fp8_block"))

    weight = torch.randn(6, 40, requires_grad=True)
    check_compiles_whole(call, [(torch.randn(t, 40, requires_grad=True), weight) for t in (5, 9)])


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["bf16", "fp8_block", "mxfp8_rceil"])
def test_interpreted_kernel(name):
    launches = check(inputs(130, 200, 140), name, "triton")
    assert launches > 0 or name == "bf16"


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(515, 384, 256), (301, 200, 130)])
def test_kernel_on_gpu(name, shape):
    """Whole blocks go to cuBLAS where it has the product, ragged ones to our kernel."""
    for dtype in (torch.float32, torch.bfloat16):
        check([t.cuda() for t in inputs(*shape, dtype=dtype)], name, "triton")


@anywhere
@pytest.mark.parametrize("name", NAMES)
def test_ragged_edges(name, impl, device):
    for shape in ((0, 5, 3), (1, 1, 1), (17, 16, 64), (3, 0, 4)):
        given = [t.to(device) for t in whole_numbers(*shape)]
        with poisoned_empty("all"):
            made = run(given, name, impl)
        x_TD, weight_FD, grad_TF = given
        assert torch.equal(made[0], x_TD @ weight_FD.T)
        assert torch.equal(made[1], grad_TF @ weight_FD)
        assert torch.equal(made[2], grad_TF.T @ x_TD)


def test_alone_equals_in_batch():
    """A row gives the same output by itself: no scale is shared between rows of x."""
    x_TD, weight_FD, _ = inputs(6, 200, 5)
    for name in NAMES:
        check_alone_equals_in_batch(
            lambda x, n=name: quantized_linear(x, weight_FD, formats=formats_named(n)),
            lambda picked: (x_TD[list(picked)],),
            [1] * 6,
            leaves=[],
        )


def test_refuses():
    x_TD, weight_FD, _ = inputs(4, 40, 6)
    formats = LinearFormats()
    check_refuses(
        [
            (lambda: fp8_block_linear(x_TD, weight_FD[:, :9]), ShapeError, "D=9"),
            (
                lambda: quantized_linear(x_TD.double(), weight_FD, formats=formats),
                DtypeError,
                "x_TD must be fp32, bf16 or fp16",
            ),
            (
                lambda: quantized_linear(x_TD, weight_FD.to("meta"), formats=formats),
                DeviceError,
                "weight_FD must be on cpu",
            ),
            (
                lambda: quantized_linear(x_TD, weight_FD, formats=formats, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
            (lambda: formats_named("mxfp6"), ConfigError, "formats must be one of bf16"),
        ]
    )


def test_a_gpu_without_the_format_is_named(monkeypatch):
    from gem_precision.kernels.quantized_linear.op import check_formats

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    check_formats(formats_named("mxfp8_rceil"), torch.device("cuda"))
    with pytest.raises(UnsupportedError, match=r'got 8\.0; take "bf16"'):
        check_formats(formats_named("fp8_block"), torch.device("cuda"))


@anywhere
def test_a_seed_rounds_gradients_by_chance_and_nothing_else(impl, device):
    given = [t.to(device) for t in inputs(70, 66, 40)]
    x_TD, weight_FD, grad_TF = given
    leaves = x_TD.requires_grad_(), weight_FD.requires_grad_()
    formats = formats_named("mxfp8_rceil")
    y_TF = quantized_linear(*leaves, formats=formats, seed=6, impl=impl)
    assert torch.equal(y_TF, run(given, "mxfp8_rceil", impl)[0])
    grad_x_TD, grad_weight_FD = torch.autograd.grad(y_TF, leaves, grad_TF)

    def drawn(x, seed):
        return mx_dequantize(mx_quantize(x.cpu(), seed=seed)).double()

    right = drawn(grad_TF, 6) @ rounded(weight_FD.cpu().T, "mxfp8_rceil", "").T
    near = drawn(grad_TF, None) @ rounded(weight_FD.cpu().T, "mxfp8_rceil", "").T
    assert (grad_x_TD.cpu() - right).abs().max() < 1e-4 * (near - right).abs().max()
    right = drawn(grad_TF.T, 7) @ rounded(x_TD.cpu().T, "mxfp8_rceil", "").T
    near = drawn(grad_TF.T, None) @ rounded(x_TD.cpu().T, "mxfp8_rceil", "").T
    assert (grad_weight_FD.cpu() - right).abs().max() < 1e-4 * (near - right).abs().max()


def test_gradients_rounded_by_chance_are_right_on_average():
    """A gradient that is always rounded down to the nearest is off by that, however often."""
    x_TD = torch.eye(32).requires_grad_()
    grad_TF = torch.full((32, 32), 1.02)  # E4M3 has 1 and 1.125
    grad_TF[:, ::8] = 448.0  # scale 1
    formats = formats_named("mxfp8_rceil")
    found = [
        torch.autograd.grad(
            quantized_linear(x_TD, torch.eye(32), formats=formats, seed=seed), x_TD, grad_TF
        )[0][:, 1::8]
        for seed in (None, *range(64))
    ]
    assert torch.equal(found[0], torch.ones(32, 4))
    # 128 numbers and 64 seeds: the standard error is .0005.
    assert abs(float(torch.stack(found[1:]).mean()) - 1.02) < 0.002


@anywhere
def test_a_rotation_reaches_both_factors_of_every_product(impl, device):
    """Also where what is summed over is no whole number of blocks."""
    x_TD, weight_FD, grad_TF = (t.to(device) for t in inputs(70, 66, 40))
    leaves = x_TD.requires_grad_(), weight_FD.requires_grad_()
    formats = formats_named("mxfp8_rceil")
    y_TF = quantized_linear(*leaves, formats=formats, hadamard_seed=3, impl=impl)
    made = (y_TF.detach(), *torch.autograd.grad(y_TF, leaves, grad_TF))

    def product(a, b):
        sides = []
        for x in (a, b):
            x = F.pad(x.detach().cpu().double(), (0, -x.shape[1] % 32))
            turned = random_hadamard(x, seed=3).float()
            sides.append(rounded(turned, "mxfp8_rceil", ""))
        return sides[0] @ sides[1].T

    wanted = product(x_TD, weight_FD), product(grad_TF, weight_FD.T), product(grad_TF.T, x_TD.T)
    plain = exact((x_TD.detach(), weight_FD.detach(), grad_TF), "mxfp8_rceil")
    for got, right, other in zip(made, wanted, plain, strict=True):
        # Rotated in fp32 and not in fp64: a few numbers lie on the other side of a middle.
        assert (got.cpu() - right).norm() < 0.02 * (other - right).norm()


def test_seeds_that_change_nothing_are_refused():
    x_TD, weight_FD, _ = inputs(4, 40, 6)
    only_forward = LinearFormats(forward="mxfp8_rceil")
    check_refuses(
        [
            (
                lambda: quantized_linear(x_TD, weight_FD, formats=only_forward, seed=1),
                ConfigError,
                "seed must come with a product in MXFP8 that it changes; got bf16, bf16",
            ),
            (
                lambda: quantized_linear(
                    x_TD, weight_FD, formats=formats_named("fp8_block"), hadamard_seed=1
                ),
                ConfigError,
                "hadamard_seed must come with a product in MXFP8",
            ),
            (
                lambda: quantized_linear(
                    x_TD, weight_FD, formats=formats_named("mxfp8_floor"), seed=-1
                ),
                ConfigError,
                "seed must be an integer of 63 bits; got -1",
            ),
        ]
    )


def test_only_what_is_asked_for_is_computed():
    x_TD, weight_FD, _ = inputs(4, 40, 6)
    y_TF = fp8_block_linear(x_TD, weight_FD.requires_grad_())
    y_TF.sum().backward()
    assert weight_FD.grad is not None
    assert x_TD.grad is None


def test_one_large_channel_costs_block_fp8_what_it_costs():
    """An outlier takes range from the 127 others of its block, and from nobody else."""
    x_TD = inputs(64, 256, 128)[0]
    x_TD[:, 3] *= 1e5
    near = block_dequantize(block_quantize(x_TD))
    assert float((near - x_TD)[:, 128:].norm() / x_TD[:, 128:].norm()) < 0.04
    small = torch.arange(128) != 3
    assert float((near - x_TD)[:, :128][:, small].norm() / x_TD[:, :128][:, small].norm()) > 0.1


@pytest.mark.interpreter
def test_kernels_compile():
    sizes = ["rows", "columns", "inner", "stored_rows", "blocks_k", "tiles_t", "tiles_f"]
    block = KernelVariant(
        "_product_kernel",
        {
            **dict.fromkeys(["a_ptr", "b_ptr"], "*fp8e4nv"),
            **dict.fromkeys(["a_scales_ptr", "b_scales_ptr"], "*fp32"),
            "y_ptr": "*bf16",
            **dict.fromkeys(sizes, "i32"),
        },
        {"ROWS": 128, "GROUP": 8, "BLOCK": 128},
        warps=8,
        aligned=["a_ptr", "b_ptr", "a_scales_ptr", "b_scales_ptr", "y_ptr", "inner", "columns"],
    )
    hopper, blackwell = compile_kernels("gem_precision.kernels.quantized_linear.kernel", [block])
    # Operands of 8 bits: not widened to 16.
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in hopper.ptx
    assert "kind::f8f6f4" in blackwell.ptx
    assert hopper.stack_bytes == blackwell.stack_bytes == 0


@pytest.mark.interpreter
def test_blackwell_multiplies_mxfp8_by_its_own_instruction():
    sizes = ["rows", "columns", "inner", "blocks_k", "tiles_f"]
    variant = KernelVariant(
        "_mx_product_kernel",
        {
            **dict.fromkeys(["a_ptr", "b_ptr"], "*fp8e4nv"),
            **dict.fromkeys(["a_scales_ptr", "b_scales_ptr"], "*u8"),
            "y_ptr": "*bf16",
            **dict.fromkeys(sizes, "i32"),
        },
        {"TILE": 128, "BLOCK": 32},
        warps=8,
        aligned=["a_ptr", "b_ptr", "a_scales_ptr", "b_scales_ptr", "y_ptr", "inner", "columns"],
    )
    (done,) = compile_kernels(
        "gem_precision.kernels.quantized_linear.kernel_sm100", [variant], capabilities=[100]
    )
    assert "kind::mxf8f6f4.block_scale" in done.ptx
    assert done.stack_bytes == 0


@pytest.mark.triton_ge_3_8
@pytest.mark.interpreter
def test_blackwells_kernel_gives_the_product_of_the_decoded_matrices():
    from gem_precision.kernels.quantized_linear.kernel_sm100 import launch_mx_product

    x_TD, weight_FD, _ = inputs(130, 200, 140)
    a, b = mx_quantize(x_TD), mx_quantize(weight_FD)
    y_TF = launch_mx_product(a.elements_TD, a.scales, b.elements_TD, b.scales, torch.float32)
    right = mx_dequantize(a).double() @ mx_dequantize(b).double().T
    check_budget(y_TF, mx_dequantize(a) @ mx_dequantize(b).T, right, noise_scale=1e3)


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("shape", [(35, 130, 7), (3, 128, 128)])
def test_right_on_odd_sizes(shape):
    for name in NAMES:
        check([t.cuda() for t in inputs(*shape)], name, "triton")

import logging
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_budget,
    check_compiles_whole,
    check_equal_up_to_rounding,
    check_interpreted_kernel,
    check_kernel_on_gpu,
    check_reference_gradients,
    check_refuses,
    check_registration,
    check_run_budget,
    count_launches,
    fresh,
    poisoned_empty,
    run_fresh,
    run_with_gradients,
)
from gem_precision.costs import normed_linear_backward_cost, normed_linear_cost
from gem_precision.kernels.normed_linear import op
from gem_precision.kernels.normed_linear.cases import CASES
from gem_precision.kernels.normed_linear.kernel import tile_constants
from gem_precision.ops import layer_norm, normed_linear, rms_norm

EPS = 1e-6
KINDS = ["rms", "layer"]


def operator(kind, *, affine=True):
    def run(x, weight, gain, impl="auto"):
        given = gain if affine else None
        y = normed_linear(x, weight, kind=kind, gain_D=given, eps=EPS, impl=impl)
        return y if affine else y + (gain.sum() * 0).to(y.dtype)

    return run


def oracle(kind, *, affine=True):
    """torch's own norm, then its product."""

    def run(x, weight, gain):
        given, shape = gain if affine else gain * 0 + 1, x.shape[-1:]
        if kind == "rms":
            return F.rms_norm(x, shape, given, EPS) @ weight.T
        return F.layer_norm(x, shape, given, None, EPS) @ weight.T

    return run


def inputs(tokens=5, width=6, out_width=4, *, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)

    def tensor(*shape, scale=1.0, shift=0.0):
        values = torch.randn(shape, generator=draw) * scale + shift
        return values.to(dtype).requires_grad_()

    weight = tensor(out_width, width, scale=width**-0.5)
    return tensor(tokens, width, shift=0.3), weight, tensor(width, shift=1.0)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_reference_gradients(kind, affine):
    check_reference_gradients(
        operator(kind, affine=affine), inputs(), reference=oracle(kind, affine=affine)
    )


def test_registration():
    x, weight, gain = inputs()
    size = {"tokens": 5, "width": 6, "out_width": 4, "element_bytes": 4}
    check_registration(
        torch.ops.gem_precision.normed_linear,
        (x, weight, gain, True, EPS, "reference"),
        cost=normed_linear_cost(**size, affine=True),
        backward_cost=normed_linear_backward_cost(**size, affine=True),
    )
    check_registration(
        torch.ops.gem_precision.normed_linear_backward,
        (torch.randn(5, 4), x.detach(), weight.detach(), None, False, EPS, "reference"),
        cost=normed_linear_backward_cost(**size),
    )


def test_compiles_whole():
    check_compiles_whole(operator("layer"), [inputs(tokens) for tokens in (5, 9, 3)])


# Two tiles of tokens, of results and of columns, the last of each not full.
@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_kernel(kind):
    check_interpreted_kernel(operator(kind), oracle(kind), inputs(100, 40, 72))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "dtypes"),
    [
        ((1000, 512, 1536), (torch.bfloat16, torch.float16)),
        ((333, 72, 130), (torch.bfloat16,)),
        ((70, 50, 33), (torch.bfloat16,)),
    ],
)
def test_kernel_on_gpu(kind, size, dtypes):
    check_kernel_on_gpu(operator(kind), oracle(kind), inputs(*size), dtypes=dtypes)


@pytest.mark.parametrize(
    "impl", ["reference", pytest.param("triton", marks=pytest.mark.interpreter)]
)
@pytest.mark.parametrize("size", [(0, 8, 3), (4, 1, 2), (1, 3, 1), (2, 5, 0)])
def test_ragged_edges(size, impl):
    x, weight, gain = inputs(*size)
    for kind in KINDS:
        y = normed_linear(x, weight, kind=kind, gain_D=gain, impl=impl)
        assert y.shape == (size[0], size[2])
        check_equal_up_to_rounding(y.detach(), oracle(kind)(x, weight, gain).detach())
        for grad, leaf in zip(
            torch.autograd.grad(y.sum(), (x, weight, gain)), (x, weight, gain), strict=True
        ):
            assert grad.shape == leaf.shape
            assert bool(grad.isfinite().all())


@pytest.mark.interpreter
def test_alone_equals_in_batch():
    x, weight, gain = inputs(4)
    for impl in ("reference", "triton"):
        check_alone_equals_in_batch(
            lambda x, weight, gain, impl=impl: operator("layer")(x, weight, gain, impl=impl),
            lambda picked: (x[picked], weight, gain),
            (1, 1, 1, 1),
            leaves=[x, weight, gain],
        )


def test_refuses(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, weight, gain = inputs()
    call = normed_linear
    check_refuses(
        [
            (lambda: call(x[0], weight), ShapeError, "x_TD must have 2 dims"),
            (lambda: call(x, weight[:, :5]), ShapeError, "weight_FD has D=5 but x_TD"),
            (lambda: call(x, weight, gain_D=gain[:5]), ShapeError, "gain_D has D=5"),
            (lambda: call(x[:, :0], weight[:, :0]), ShapeError, "must have columns"),
            (
                lambda: call(x, weight.half()),
                DtypeError,
                "weight_FD must be torch.float32",
            ),
            (lambda: call(x.long(), weight.long()), DtypeError, "must be floating point"),
            (lambda: call(x, weight.to("meta")), DeviceError, "weight_FD must be on cpu"),
            (
                lambda: call(x, weight, kind="batch"),
                ConfigError,
                'must be "rms" or "layer"',
            ),
            (lambda: call(x, weight, eps=0.0), ConfigError, "eps must be above 0"),
            (
                lambda: call(x.double(), weight.double(), impl="triton"),
                UnsupportedError,
                "must have bfloat16 or float16 on a GPU",
            ),
            (lambda: call(x, weight, impl="triton"), UnsupportedError, "needs TRITON_INTERPRET=1"),
        ]
    )


@pytest.mark.interpreter
def test_a_token_far_from_zero_keeps_its_variance():
    # One large number, and a mean a thousand deviations from 0.
    x, weight, _ = inputs(100, 40, 8)
    x = x.detach() * 1e-3 + 1.0
    x[3] = x[3] * 1e-3 + 7.0
    x[5, 0] = 1e3
    exact = F.layer_norm(x.double(), (40,), eps=EPS) @ weight.detach().double().T
    y = normed_linear(x, weight.detach(), kind="layer", eps=EPS, impl="triton")
    # The mean is taken off a sum of its size, in float32.
    scale = x.abs().amax(1) * x.double().var(1, correction=0).add(EPS).rsqrt()
    error = (y - exact).abs().amax(1) / (scale * 2**-24 * 40**0.5)
    assert float(error.max()) < 16


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_zeros_and_one_of_nan_stay_by_themselves(kind):
    x, weight, gain = inputs(70, 40, 8)
    with torch.no_grad():
        x[1], x[2] = 0.0, torch.nan
    for impl in ("reference", "triton"):
        y = normed_linear(x, weight, kind=kind, gain_D=gain, impl=impl)
        assert torch.equal(y[1], torch.zeros(8))
        assert bool(y[2].isnan().all())
        others = torch.arange(70) != 2
        assert bool(y[others].isfinite().all())
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert bool(grad[others].isfinite().all())


@pytest.mark.interpreter
def test_strided_operands():
    x = torch.randn(12, 7).t().requires_grad_()
    weight = torch.randn(5, 24)[:, ::2].requires_grad_()
    for impl in ("reference", "triton"):
        got = run_with_gradients(
            lambda *args, impl=impl: normed_linear(*args, impl=impl), (x, weight)
        )
        plain = [t.detach().contiguous().requires_grad_() for t in (x, weight)]
        want = run_with_gradients(normed_linear, plain)
        for a, b in zip(got.outputs + got.gradients, want.outputs + want.gradients, strict=True):
            check_equal_up_to_rounding(a, b)


@pytest.mark.parametrize("case", [c for c in CASES if c.device == "cpu"], ids=lambda c: c.name)
def test_half_precision_is_within_the_error_budget(case):
    formula = oracle(case.kind, affine=case.affine)
    halves = inputs(case.tokens, case.width, case.out_width, dtype=torch.bfloat16)
    exact = run_with_gradients(formula, fresh(halves, dtype=torch.float64))
    low = run_with_gradients(formula, fresh(halves))
    run = run_with_gradients(operator(case.kind, affine=case.affine), fresh(halves))
    check_run_budget(run, low, exact)


def variant(kind, *, by_tma):
    constants = tile_constants(single=False)
    block_t, block_f, block_d = (constants[f"BLOCK_{dim}"] for dim in "TFD")
    arguments = dict.fromkeys(("x_ptr", "weight_ptr", "y_ptr", "first_ptr"), "*bf16")
    if by_tma:
        tiles = {"x": (block_t, block_d), "weight": (block_f, block_d), "y": (block_t, block_f)}
        for name, (rows, columns) in tiles.items():
            arguments[f"{name}_ptr"] = f"tensordesc<bf16[{rows},{columns}]>"
    arguments |= {"sums_ptr": "*fp32", "eps": "fp32"}
    arguments |= dict.fromkeys(("rows", "width", "out_width", "stride_x_t", "stride_w_f"), "i32")
    constants |= {"CENTRED": kind == "layer", "TMA": by_tma, "EVEN": by_tma}
    return KernelVariant("normed_linear_kernel", arguments, constants, 8, constants["STAGES"])


def test_kernel_compiles_without_spills():
    variants = [variant("layer", by_tma=by_tma) for by_tma in (True, False)]
    for done in compile_kernels("gem_precision.kernels.normed_linear.kernel", variants):
        assert any(word in done.ptx for word in ("wgmma", "tcgen05.mma"))
        if done.capability == 90 and done.variant is variants[0]:
            assert done.stack_bytes == 0


_HOPPER = """
import pathlib, subprocess, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gem_precision.kernels.normed_linear import kernel_sm90 as module

kernel = module.normed_linear_hopper_kernel
tools = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
tile = f"tensordesc<bf16[128,64],{layout!r}>"
types = dict(x_desc=tile, w_desc=tile, y_desc=tile, sums="*fp32", first="*bf16", eps="fp32")
constants = dict(module.tile_constants(512), CENTRED=True, DTYPE=gl.bfloat16)
names = kernel.arg_names
signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
values = {(i,): constants[n] for i, n in enumerate(names) if n in constants}
aligned = {
    (i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
    if signature[n].startswith("*") or n in ("width", "out_width", "stride_x_t")
}
made = triton.compile(
    GluonASTSource(kernel, signature, values, aligned),
    target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 168},
)
with tempfile.TemporaryDirectory() as folder:
    source = pathlib.Path(folder) / "kernel.ptx"
    source.write_text(made.asm["ptx"])
    said = subprocess.run(
        [tools / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", folder + "/kernel.cubin"],
        capture_output=True, text=True, check=True,
    ).stderr
# Products that wait for each other.
if "C75" in said or made.metadata.shared > 227 * 1024 or "wgmma" not in made.asm["ptx"]:
    raise SystemExit(f"{made.metadata.shared} bytes: {said}")
print("compiled")
"""


def test_hopper_kernel_compiles_and_no_product_waits():
    assert run_fresh(_HOPPER, timeout_s=300).strip().endswith("compiled")


# More tokens than all multiprocessors take at once, and tiles that are not full.
@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(40_001, 512, 1536), (300, 512, 200)])
def test_several_tiles_of_a_program_on_hopper(kind, size):
    x, weight, gain = fresh(inputs(*size, dtype=torch.bfloat16), device="cuda")
    with torch.no_grad():
        exact = oracle(kind)(x.double(), weight.double(), gain.double())
        low = oracle(kind)(x, weight, gain)
        first = operator(kind)(x, weight, gain, impl="triton")
        for _ in range(5):
            assert torch.equal(operator(kind)(x, weight, gain, impl="triton"), first)
    check_budget(first, low, exact, what="y")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_auto_takes_a_norm_and_a_product_where_gradients_are_wanted_on_gpu(
    kind, caplog, monkeypatch
):
    monkeypatch.setattr(op, "_announced", set())
    x, weight, gain = fresh(inputs(300, 64, 40, dtype=torch.bfloat16), device="cuda")
    call = partial(normed_linear, x, weight, kind=kind, gain_D=gain, eps=EPS)
    with caplog.at_level(logging.INFO, logger=op.__name__), count_launches() as launches:
        y = call()
    assert launches.count == 1  # the norm
    norm = rms_norm if kind == "rms" else layer_norm
    assert torch.equal(y, F.linear(norm(x, gain_D=gain, eps=EPS), weight))
    assert "auto takes a norm and a product" in caplog.text
    if torch.cuda.get_device_capability() == (9, 0):
        with torch.no_grad():
            assert torch.equal(call(), call(impl="triton"))


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("width", [24, 33, 64])
def test_right_on_odd_sizes(width):
    # Expected values come from the CPU: under the sanitizer every kernel of torch is slow too.
    given = inputs(150, width, 40, dtype=torch.bfloat16)
    for kind in KINDS:
        with poisoned_empty("all"):
            kernel = run_with_gradients(
                lambda *x, kind=kind: operator(kind)(*x, impl="triton"), fresh(given, device="cuda")
            )
        for tensors in (kernel.outputs, kernel.gradients):
            tensors[:] = [t.cpu() for t in tensors]
        low, exact = (
            run_with_gradients(oracle(kind), fresh(given, dtype=d)) for d in (None, torch.float64)
        )
        check_run_budget(kernel, low, exact)

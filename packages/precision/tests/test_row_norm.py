import pytest
import torch

from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_interpreted_kernel,
    check_kernel_on_gpu,
    check_reference_gradients,
    check_refuses,
    check_registration,
    check_run_budget,
    fresh,
    poisoned_empty,
    run_with_gradients,
)
from gem_precision.costs import row_norm_backward_cost, row_norm_cost
from gem_precision.kernels.row_norm.cases import CASES
from gem_precision.ops import layer_norm, rms_norm

EPS = 1e-6
# kind, before, after, gain, swish
FORMS = [
    ("rms", 0, 0, 0, 0),
    ("layer", 0, 0, 0, 0),
    ("rms", 1, 1, 1, 0),
    ("layer", 1, 1, 1, 1),
    ("rms", 0, 0, 0, 1),
]


def form_id(form):
    return "-".join(str(part) for part in form)


def call_of(form):
    """The operator and its plain formula on (x, before, after, gain), of which some are unused."""
    kind, has_before, has_after, has_gain, swish = form
    norm = rms_norm if kind == "rms" else layer_norm

    def operator(x, before, after, gain, impl="auto"):
        return norm(
            x,
            before=before if has_before else None,
            after=after if has_after else None,
            gain_D=gain if has_gain else None,
            swish=bool(swish),
            eps=EPS,
            impl=impl,
        ) + unused(x, before, after, gain)

    def formula(x, before, after, gain):
        a = x + before if has_before else x
        around = a - a.mean(-1, keepdim=True) if kind == "layer" else a
        n = around / (around.square().mean(-1, keepdim=True) + EPS).sqrt()
        n = n * gain if has_gain else n
        y = a * n.sigmoid() if swish else n
        return (y + after if has_after else y) + unused(x, before, after, gain)

    def unused(x, before, after, gain):
        left = [
            t
            for t, is_used in ((before, has_before), (after, has_after), (gain, has_gain))
            if not is_used
        ]
        return sum(
            ((t.sum() * 0).to(x.dtype) for t in left),
            torch.zeros((), device=x.device, dtype=x.dtype),
        )

    return operator, formula


def inputs(rows=5, width=6, *, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)

    def tensor(*shape):
        return torch.randn(shape, generator=draw).to(dtype).requires_grad_()

    return tensor(rows, width), tensor(rows, width), tensor(rows, width), tensor(width)


@pytest.mark.parametrize("form", FORMS, ids=form_id)
def test_reference_gradients(form):
    operator, formula = call_of(form)
    check_reference_gradients(operator, inputs(), reference=formula)


def test_registration():
    x, before, after, gain = inputs()
    size = {"rows": 5, "width": 6, "element_bytes": 4}
    check_registration(
        torch.ops.gem_precision.row_norm,
        (x, before, after, gain, True, False, EPS, "reference"),
        cost=row_norm_cost(**size, before=True, after=True, affine=True),
        backward_cost=row_norm_backward_cost(**size, before=True, affine=True),
    )
    check_registration(
        torch.ops.gem_precision.row_norm_backward,
        (torch.randn(5, 6), x.detach(), None, None, False, True, EPS, "reference"),
        cost=row_norm_backward_cost(**size),
    )


def test_compiles_whole():
    operator, _ = call_of(FORMS[2])
    check_compiles_whole(operator, [inputs(rows) for rows in (5, 9, 3)])


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS, ids=form_id)
def test_interpreted_kernel(form, monkeypatch):
    import gem_precision.kernels.row_norm.kernel as kernel

    # So few programs that each sums the gains of several tiles.
    monkeypatch.setattr(kernel, "_PROGRAMS", 2)
    operator, formula = call_of(form)
    check_interpreted_kernel(operator, formula, inputs(400, 24))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=form_id)
def test_kernel_on_gpu(form):
    operator, formula = call_of(form)
    check_kernel_on_gpu(operator, formula, inputs(3001, 130))
    check_kernel_on_gpu(operator, formula, inputs(7, 3000), dtypes=(torch.bfloat16, torch.float16))


@pytest.mark.parametrize("shape", [(0, 8), (0, 2, 3), (4, 1), (8,), (2, 3, 4, 5), (3, 0)])
@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_ragged_edges(norm, shape):
    x = torch.randn(shape, requires_grad=True)
    y = norm(x, after=torch.ones(shape))
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert bool(x.grad.isfinite().all())


def test_alone_equals_in_batch():
    x, before, after, gain = inputs(4)
    operator, _ = call_of(FORMS[3])

    def make(picked):
        return x[picked], before[picked], after[picked], gain

    check_alone_equals_in_batch(
        operator, make, (1, 1, 1, 1), leaves=[x, before, after, gain], bitwise=True
    )


def test_refuses():
    x, before, _, gain = inputs()
    check_refuses(
        [
            (lambda: rms_norm(torch.ones(())), ShapeError, "x must have a last dim"),
            (
                lambda: rms_norm(x, before=before[:3]),
                ShapeError,
                r"before must have the shape \(5, 6\)",
            ),
            (lambda: layer_norm(x, after=before[0]), ShapeError, "after must have the shape"),
            (
                lambda: rms_norm(x, gain_D=gain[:5]),
                ShapeError,
                r"gain_D must have the shape \(6,\)",
            ),
            (lambda: rms_norm(x.long()), DtypeError, "x must be floating point"),
            (lambda: rms_norm(x, gain_D=gain.to("meta")), DeviceError, "gain_D must be on cpu"),
            (lambda: rms_norm(x, eps=0.0), ConfigError, "eps must be above 0"),
            (lambda: rms_norm(x, impl="fast"), UnsupportedError, "impl must be one of"),
        ]
    )


@pytest.mark.interpreter
def test_rows_too_wide_for_a_kernel_are_refused():
    with pytest.raises(UnsupportedError, match="at most 16384"):
        rms_norm(torch.ones(1, 16_385), impl="triton")


def strided(device="cpu", dtype=torch.float32):
    """Queries and keys as they lie in the output of one projection, and a transposed residual."""
    fused = torch.randn(7, 5, 8, dtype=dtype, device=device)
    return fused[:, 1:4], torch.randn(3, 7, 8, dtype=dtype, device=device).transpose(0, 1)


@pytest.mark.interpreter
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_strided_rows(impl):
    x, after = (t.requires_grad_() for t in strided())
    upstream = torch.randn(7, 8, 3).transpose(1, 2)
    runs = []
    for norm, kind in ((rms_norm, False), (layer_norm, True)):
        runs.append(torch.autograd.grad(norm(x, after=after, impl=impl), (x, after), upstream))
        a = x.detach().contiguous().requires_grad_()
        around = a - a.mean(-1, keepdim=True) if kind else a
        expected = around / (around.square().mean(-1, keepdim=True) + EPS).sqrt()
        (grad,) = torch.autograd.grad(expected, a, upstream)
        torch.testing.assert_close(norm(x, after=after, impl=impl), expected + after)
        torch.testing.assert_close(runs[-1][0], grad)
        assert torch.equal(runs[-1][1], upstream)


@pytest.mark.interpreter
def test_tensors_of_several_dtypes_keep_the_widest():
    x, before, after, gain = inputs(3, 8)
    narrow = x.detach().bfloat16().requires_grad_()
    for impl in ("reference", "triton"):
        y = rms_norm(narrow, before=before, after=after, gain_D=gain, impl=impl)
        grads = torch.autograd.grad(y.sum(), (narrow, before, after, gain))
        assert [g.dtype for g in grads] == [torch.bfloat16, *[torch.float32] * 3]
        expected = rms_norm(narrow.float(), before=before, after=after, gain_D=gain)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, expected)
        # The gradient of the wide tensor is not the narrow one's, widened.
        assert not torch.equal(grads[1], grads[0].float())


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_a_row_of_zeros_and_one_of_nan_stay_by_themselves(norm):
    x = torch.randn(4, 8)
    x[1], x[2] = 0.0, torch.nan
    x.requires_grad_()
    y = norm(x)
    assert torch.equal(y[1], torch.zeros(8))
    assert bool(y[2].isnan().all())
    assert torch.equal(y[[0, 3]], norm(x[[0, 3]]))
    y.sum().backward()
    assert bool(x.grad[[0, 1, 3]].isfinite().all())


def test_a_second_derivative_is_refused_not_wrong():
    x, *_ = inputs()
    (grad,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum(), x)


@pytest.mark.parametrize("case", [c for c in CASES if c.device == "cpu"], ids=lambda c: c.name)
def test_half_precision_is_within_the_error_budget(case):
    form = (case.kind, case.before, case.after, case.affine, case.swish)
    operator, formula = call_of(form)
    halves = inputs(case.rows, case.width, dtype=torch.bfloat16)
    exact = run_with_gradients(formula, fresh(halves, dtype=torch.float64))
    low = run_with_gradients(formula, fresh(halves))
    check_run_budget(run_with_gradients(operator, fresh(halves)), low, exact)


@pytest.mark.interpreter
def test_kernels_compile_without_spills():
    shared = {"SWISH": False, "STRIDED": True, "DOUBLE": False, "GAIN": True}
    strides = ["width", "x_outer", "x_inner", "before_outer", "before_inner"]
    numbers = dict.fromkeys(["rows", "inner", *strides], "i32")
    pointers = {f"{n}_ptr": "*bf16" for n in ("x", "before", "gain")}
    forward = KernelVariant(
        "_forward_kernel",
        {**numbers, **pointers, "after_ptr": "*bf16", "y_ptr": "*bf16", "after_outer": "i32",
         "after_inner": "i32", "eps": "fp32"},
        {**shared, "CENTRED": True, "BEFORE": True, "AFTER": True, "R": 4, "BLOCK_D": 512},
        aligned=[*strides, *pointers, "after_ptr", "y_ptr", "after_outer", "after_inner"],
    )  # fmt: skip
    backward = KernelVariant(
        "_backward_kernel",
        {**numbers, **pointers, "grad_ptr": "*bf16", "grad_a_ptr": "*bf16", "parts_ptr": "*fp32",
         "tiles": "i32", "grad_outer": "i32", "grad_inner": "i32", "eps": "fp32"},
        {**shared, "CENTRED": True, "BEFORE": True, "R": 4, "BLOCK_D": 512},
        aligned=[*strides, *pointers, "grad_ptr", "grad_a_ptr", "grad_outer", "grad_inner"],
    )  # fmt: skip
    for done in compile_kernels("gem_precision.kernels.row_norm.kernel", [forward, backward]):
        assert done.stack_bytes == 0
        assert "ld.global.v4" in done.ptx


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("width", [7, 130])
def test_right_on_odd_sizes(width):
    # Expected values come from the CPU: under the sanitizer every kernel of torch is slow too.
    operator, formula = call_of(FORMS[3])
    given = inputs(19, width)
    with poisoned_empty("all"):
        kernel = run_with_gradients(
            lambda *x: operator(*x, impl="triton"), fresh(given, device="cuda")
        )
    for tensors in (kernel.outputs, kernel.gradients):
        tensors[:] = [t.cpu() for t in tensors]
    low, exact = (run_with_gradients(formula, fresh(given, dtype=d)) for d in (None, torch.float64))
    check_run_budget(kernel, low, exact)

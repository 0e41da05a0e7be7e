from functools import partial

import pytest
import torch

from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.impl import _announced
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_interpreted_kernel,
    check_kernel_on_gpu,
    check_reference_gradients,
    check_refuses,
    check_registration,
    check_run_budget,
    check_runs_equal,
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
    check_registration(
        torch.ops.gem_precision.row_norm,
        (x, None, after, None, False, False, EPS, "reference", 0.25, 7),
        cost=row_norm_cost(**size, after=True),
        backward_cost=row_norm_backward_cost(**size),
    )
    check_registration(
        torch.ops.gem_precision.row_norm_backward,
        (torch.randn(5, 6), x.detach(), None, None, False, False, EPS, "reference", after.detach()),
        cost=row_norm_backward_cost(**size, added=True),
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
            (lambda: rms_norm(x, dropout=1.0), ConfigError, r"dropout must be in \[0, 1\)"),
            (lambda: layer_norm(x, seed=-1), ConfigError, "seed must be in"),
            (lambda: rms_norm(x, impl="fast"), UnsupportedError, "impl must be one of"),
        ]
    )


@pytest.mark.interpreter
def test_rows_too_wide_for_a_kernel_are_refused():
    with pytest.raises(UnsupportedError, match="at most 16384"):
        rms_norm(torch.ones(1, 16_385), impl="triton")


@pytest.mark.gpu
def test_rows_too_wide_for_a_kernel_go_to_the_reference(caplog):
    x = torch.randn(3, 16_385, device="cuda", requires_grad=True)
    _announced.clear()
    with caplog.at_level("INFO", logger="gem_opkit.impl"):
        y = rms_norm(x)
    # Once for the caller's word, and once for the operator's, which is resolved by then.
    assert {r.message.rpartition(" ")[2] for r in caplog.records} == {"reference"}
    torch.testing.assert_close(y.cpu(), rms_norm(x.detach().cpu()))
    y.sum().backward()
    assert bool(x.grad.isfinite().all())


def thinned(form, *, dropout, seed):
    """The operator with dropout, and the plain formula times the places where it is not 0."""
    kind, swish = form
    norm = rms_norm if kind == "rms" else layer_norm

    def operator(x, after, impl="auto"):
        given = {"swish": swish, "eps": EPS, "dropout": dropout, "seed": seed}
        return norm(x, after=after, impl=impl, **given)

    def kept(x):
        return norm(torch.randn_like(x.detach()), dropout=dropout, seed=seed) != 0

    def formula(x, after):
        plain = norm(x, swish=swish, eps=EPS, impl="reference")
        return plain * kept(x) / (1 - dropout) + after

    return operator, formula


@pytest.mark.parametrize("form", [("rms", False), ("layer", True)])
def test_gradients_with_dropout(form):
    x, _, after, _ = inputs(dtype=torch.float64)
    operator, formula = thinned(form, dropout=0.4, seed=2**40 + 1)
    assert torch.autograd.gradcheck(operator, (x, after))
    torch.testing.assert_close(operator(x, after), formula(x, after))


@pytest.mark.interpreter
@pytest.mark.parametrize("width", [3, 24])
def test_kernel_drops_what_the_reference_drops(width):
    for form in (("rms", False), ("layer", True)):
        x, _, after, _ = inputs(41, width)
        operator, _ = thinned(form, dropout=0.3, seed=2**61 - 1)
        runs = [
            run_with_gradients(partial(operator, impl=impl), fresh((x, after)))
            for impl in ("triton", "reference")
        ]
        check_runs_equal(*runs)


def test_dropout_drops_its_share_by_seed():
    x = torch.randn(400, 96)
    drawn = [rms_norm(x, dropout=0.25, seed=seed) == 0 for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    # 38,400 elements: the share is within four standard deviations.
    for dropped in drawn:
        assert abs(dropped.float().mean() - 0.25) < 4 * (0.25 * 0.75 / x.numel()) ** 0.5
        # Of no row or column alone.
        assert 0 < dropped.float().mean(0).min() < dropped.float().mean(0).max() < 1
        assert dropped.float().mean(1).max() < 0.6
    kept = rms_norm(x, dropout=0.25, seed=1)[~drawn[0]]
    torch.testing.assert_close(kept, rms_norm(x)[~drawn[0]] / 0.75)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [130, 3072])
def test_dropout_on_a_gpu_drops_what_the_cpu_drops(width):
    operator, formula = thinned(("rms", False), dropout=0.3, seed=2**50 + 3)
    check_kernel_on_gpu(operator, formula, [inputs(301, width)[i] for i in (0, 2)])


WHERE = [
    ("reference", "cpu"),
    pytest.param("triton", "cpu", marks=pytest.mark.interpreter),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("impl", "device"), WHERE)
def test_another_gradient_is_added_before_rounding(impl, device):
    x, before, grad, gain = (t.detach().to(device) for t in inputs(9, 24))
    added = torch.randn(24, 9, device=device).T
    for centred, swish in ((False, False), (True, True)):
        call = (grad, x, before, gain, centred, swish, EPS, impl)
        plain, of_gain = torch.ops.gem_precision.row_norm_backward(*call)
        both, same = torch.ops.gem_precision.row_norm_backward(*call, added=added)
        torch.testing.assert_close(both, plain + added)
        assert torch.equal(same, of_gain)
    # In fp16 the sum is rounded once: off by half a unit in the last place, 2^-11 at most.
    low = [t.half() for t in (grad, x, added)]
    rest = (None, None, False, False, EPS)
    both, _ = torch.ops.gem_precision.row_norm_backward(*low[:2], *rest, impl, added=low[2])
    wide = (t.float() for t in low[:2])
    exact, _ = torch.ops.gem_precision.row_norm_backward(*wide, *rest, impl)
    error = (both.float() - (exact + low[2].float())).abs()
    assert (error <= 1.001 * 2.0**-11 * both.float().abs() + 1e-6).all()


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
         "after_inner": "i32", "eps": "fp32", "seed": "i64"},
        {**shared, "CENTRED": True, "BEFORE": True, "AFTER": True, "R": 4, "BLOCK_D": 512,
         "DROP": 2**30, "KEPT_SCALE": 4 / 3},
        aligned=[*strides, *pointers, "after_ptr", "y_ptr", "after_outer", "after_inner"],
    )  # fmt: skip
    backward = KernelVariant(
        "_backward_kernel",
        {**numbers, **pointers, "grad_ptr": "*bf16", "grad_a_ptr": "*bf16", "parts_ptr": "*fp32",
         "added_ptr": "*bf16", "added_outer": "i32", "added_inner": "i32", "tiles": "i32",
         "grad_outer": "i32", "grad_inner": "i32", "eps": "fp32", "seed": "i64"},
        {**shared, "CENTRED": True, "BEFORE": True, "ADDED": True, "R": 2, "BLOCK_D": 512,
         "AHEAD": 3, "DROP": 2**30, "KEPT_SCALE": 4 / 3},
        aligned=[*strides, *pointers, "grad_ptr", "grad_a_ptr", "grad_outer", "grad_inner",
                 "added_ptr", "added_outer", "added_inner"],
    )  # fmt: skip
    for done in compile_kernels("gem_precision.kernels.row_norm.kernel", [forward, backward]):
        assert done.stack_bytes == 0
        # 16 bytes a lane; rows that are asked for ahead go to shared memory by cp.async.cg.
        ahead = done.variant.constants.get("AHEAD", 1) > 1
        assert ("cp.async.cg" if ahead else "ld.global.v4") in done.ptx


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

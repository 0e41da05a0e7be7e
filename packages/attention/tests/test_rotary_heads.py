import pytest
import torch

from gem_attention.costs import rotary_heads_backward_cost, rotary_heads_cost
from gem_attention.kernels.rotary_heads.cases import CASES
from gem_attention.ops import rotary_heads
from gem_attention.rotary import apply_rotary, rotary_angles
from gem_jagged.batch import Layout
from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import ConfigError, DtypeError, GemError, ShapeError, UnsupportedError
from gem_opkit.impl import _announced
from gem_opkit.testing import (
    LENGTH_CASES,
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_interpreted_kernel,
    check_kernel_on_gpu,
    check_ragged_edges,
    check_reference_gradients,
    check_refuses,
    check_registration,
    check_run_budget,
    fresh,
    poisoned_empty,
    run_with_gradients,
    take_sequences,
)
from gem_precision.norms import rms_normalize

EPS, SCALE = 1e-6, 60.0
# heads, key heads, normed, rotary
FORMS = [
    (2, 2, True, "position"),
    (3, 1, True, "rote"),
    (2, 1, False, "position"),
    (1, 1, True, "none"),
    (0, 2, True, "position"),
]


def call_of(form, *, heads_first=False):
    """The operator and its plain formula on (qkv, layout, gaps)."""
    heads, key_heads, normed, rotary = form

    def operator(qkv, layout, gaps, impl="auto"):
        return rotary_heads(
            qkv,
            layout,
            heads=heads,
            key_heads=key_heads,
            normed=normed,
            rotary=rotary,
            gap_seconds_T=gaps if rotary == "rote" else None,
            rote_time_scale_s=SCALE,
            eps=EPS,
            impl=impl,
        )

    def formula(qkv, layout, gaps):
        wide = torch.promote_types(qkv.dtype, torch.float32)
        x = qkv[:, : heads + key_heads].to(wide)
        if normed:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        width = qkv.shape[2]
        pair = torch.arange(width // 2, device=qkv.device, dtype=wide)
        places = [torch.arange(n, device=qkv.device) for n in layout.lengths.tolist()]
        place = torch.cat([*places, torch.zeros(0, device=qkv.device)]).to(wide)
        angle = place[:, None] * 10_000.0 ** (-2 * pair / width)
        if rotary == "rote":
            angle = angle + torch.log1p(gaps.to(wide) / SCALE)[:, None] * 100.0 ** (
                -2 * pair / width
            )
        if rotary != "none":
            c, s = angle.cos()[:, None], angle.sin()[:, None]
            even, odd = x[..., 0::2], x[..., 1::2]
            x = torch.stack([even * c - odd * s, even * s + odd * c], dim=-1).flatten(-2)
        x = x.to(qkv.dtype)
        return x[:, :heads], x[:, heads:], qkv[:, heads + key_heads :]

    return operator, formula


def inputs(form, lengths=(3, 0, 6, 1), *, width=8, dtype=torch.float32):
    heads, key_heads, *_ = form
    draw = torch.Generator().manual_seed(0)
    total = sum(lengths)
    qkv = torch.randn(total, heads + 2 * key_heads, width, generator=draw).to(dtype)
    gaps = torch.rand(total, generator=draw) * 1e5
    return qkv.requires_grad_(), Layout.from_lengths(list(lengths)), gaps


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_reference_gradients(form):
    operator, formula = call_of(form)
    check_reference_gradients(operator, inputs(form), reference=formula)


def test_registration():
    qkv, _, gaps = inputs(FORMS[1])
    size = {"total_tokens": 10, "heads": 3, "key_heads": 1, "width": 8, "element_bytes": 4}
    place, rates = torch.arange(10), torch.rand(2, 4)
    backward_cost = rotary_heads_backward_cost(**size, normed=True)
    check_registration(
        torch.ops.gem_attention.rotary_heads,
        (qkv, place, gaps, rates, 3, 1, True, True, SCALE, EPS, "reference"),
        cost=rotary_heads_cost(**size),
        backward_cost=backward_cost,
    )
    check_registration(
        torch.ops.gem_attention.rotary_heads,
        (qkv, place, gaps, rates, 3, 1, True, False, SCALE, EPS, "reference"),
        cost=rotary_heads_cost(**size, copies_values=False),
        backward_cost=backward_cost,
    )
    grads = [torch.randn(10, heads, 8) for heads in (3, 1, 1)]
    check_registration(
        torch.ops.gem_attention.rotary_heads_backward,
        (*grads, qkv.detach(), place, gaps, rates, True, SCALE, EPS, "reference"),
        cost=backward_cost,
    )


def test_compiles_whole():
    operator, _ = call_of(FORMS[0])
    sets = [inputs(FORMS[0], lengths) for lengths in ((3, 0, 5), (2, 7, 2), (9, 4, 1, 1))]
    check_compiles_whole(operator, sets, max_graphs=3)


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_interpreted_kernel(form):
    operator, formula = call_of(form)
    check_interpreted_kernel(operator, formula, inputs(form, (3, 0, 30), width=12))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_kernel_on_gpu(form):
    operator, formula = call_of(form)
    check_kernel_on_gpu(operator, formula, inputs(form, (300, 0, 1, 2048), width=128))
    check_kernel_on_gpu(operator, formula, inputs(form, (30, 0, 7), width=24))


def test_ragged_edges():
    operator, formula = call_of(FORMS[1])
    cases = [case for case in LENGTH_CASES if sum(case.lengths) < 500]
    check_ragged_edges(operator, formula, lambda case: inputs(FORMS[1], case.lengths), cases=cases)


def test_alone_equals_in_batch():
    lengths = (3, 0, 6, 1)
    operator, _ = call_of(FORMS[1])
    qkv, _, gaps = inputs(FORMS[1], lengths)

    def make(picked):
        return (
            take_sequences(qkv, lengths, picked),
            Layout.from_lengths([lengths[i] for i in picked]),
            take_sequences(gaps, lengths, picked),
        )

    check_alone_equals_in_batch(operator, make, lengths, leaves=[qkv], bitwise=True)


def test_refuses():
    qkv, layout, _ = inputs(FORMS[0])
    given = {"heads": 2, "key_heads": 2}
    check_refuses(
        [
            (lambda: rotary_heads(qkv[:9], layout, **given), ShapeError, "have 10 tokens of 2"),
            (lambda: rotary_heads(qkv, layout, heads=3, key_heads=2), ShapeError, "qkv must have"),
            (lambda: rotary_heads(qkv[..., :7], layout, **given), ShapeError, "must be even"),
            (lambda: rotary_heads(qkv.long(), layout, **given), DtypeError, "floating point"),
            (lambda: rotary_heads(qkv, layout, **given, eps=0.0), ConfigError, "eps must be"),
            (lambda: rotary_heads(qkv, layout, **given, rotary="rote"), ConfigError, "be given"),
            (lambda: rotary_heads(qkv, layout, **given, rotary="x"), ConfigError, "rotary must"),
            (
                lambda: rotary_heads(qkv, layout, **given, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


@pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("reference", "cpu"),
        pytest.param("triton", "cpu", marks=pytest.mark.interpreter),
        pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("heads", [3, 0])
def test_values_stay_where_they_lie(heads, impl, device):
    qkv, layout, _ = fresh(inputs((heads, 2, True, "position")), device=device)
    given = {"heads": heads, "key_heads": 2, "impl": impl}
    copied = rotary_heads(qkv, layout, **given)
    beside = rotary_heads(qkv, layout, **given, copies_values=False)
    for a, b in zip(copied, beside, strict=True):
        assert torch.equal(a, b)
    assert beside[2].data_ptr() == qkv[:, heads + 2 :].data_ptr()
    assert copied[2].data_ptr() != beside[2].data_ptr()
    upstream = [torch.randn_like(x) for x in copied]
    wanted, got = (torch.autograd.grad(x, qkv, upstream)[0] for x in (copied, beside))
    assert torch.equal(wanted, got)


@pytest.mark.interpreter
def test_fp64_is_refused_by_the_kernel():
    qkv, layout, _ = inputs(FORMS[0], dtype=torch.float64)
    with pytest.raises(UnsupportedError, match='must be "reference" or "auto" for fp64'):
        rotary_heads(qkv, layout, heads=2, key_heads=2, impl="triton")


@pytest.mark.gpu
def test_fp64_on_a_gpu_is_given_to_the_reference(caplog):
    qkv, layout, _ = fresh(inputs(FORMS[0], dtype=torch.float64), device="cuda")
    _announced.clear()
    with caplog.at_level("INFO", logger="gem_opkit.impl"):
        given = rotary_heads(qkv, layout, heads=2, key_heads=2)
    assert [r.message for r in caplog.records] == [
        "rotary_heads: impl='auto' on cuda runs reference"
    ]
    expected = rotary_heads(qkv.cpu(), layout.to("cpu"), heads=2, key_heads=2)
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b)


def test_equals_norm_and_rotation_one_after_the_other():
    qkv, layout, _ = inputs(FORMS[0])
    q, k, v = rotary_heads(qkv, layout, heads=2, key_heads=2)
    place = torch.cat([torch.arange(n) for n in layout.lengths.tolist()])
    expected = apply_rotary(rms_normalize(qkv[:, :4]), *rotary_angles(place, 8))
    torch.testing.assert_close(torch.cat([q, k], dim=1), expected)
    assert torch.equal(v, qkv[:, 4:])


@pytest.mark.parametrize("case", [c for c in CASES if c.device == "cpu"], ids=lambda c: c.name)
def test_half_precision_is_within_the_error_budget(case):
    form = (case.heads, case.key_heads, True, case.rotary)
    operator, formula = call_of(form)
    lengths = [case.length] * case.sequences
    given = inputs(form, lengths, width=case.width, dtype=torch.bfloat16)
    exact = run_with_gradients(formula, fresh(given, dtype=torch.float64))
    low = run_with_gradients(formula, fresh(given))
    check_run_budget(run_with_gradients(operator, fresh(given)), low, exact)


@pytest.mark.interpreter
def test_kernels_compile_without_spills():
    numbers = dict.fromkeys(("tokens", "heads", "key_heads", "width"), "i32")
    numbers |= {"time_scale": "fp32", "eps": "fp32"}
    common = {"position_ptr": "*i64", "gap_ptr": "*fp32", "rates_ptr": "*fp32", "qkv_ptr": "*bf16"}
    constants = {"NORMED": True, "TURNED": True, "GAPS": True, "H": 4, "G": 4, "BLOCK_K": 128}
    pointers = {
        "_forward_kernel": ("q_ptr", "k_ptr", "v_ptr"),
        "_backward_kernel": ("grad_q_ptr", "grad_k_ptr", "grad_v_ptr", "out_ptr"),
    }
    variants = [
        KernelVariant(
            kernel,
            {**numbers, **common, **dict.fromkeys(names, "*bf16")},
            {**constants, "TOKENS": 4, "VALUES": True},
            warps=1,
            aligned=[*common, *names, "width"],
        )
        for kernel, names in pointers.items()
    ]
    for done in compile_kernels("gem_attention.kernels.rotary_heads.kernel", variants):
        # Sine and cosine of large angles keep a table of a few words beside the registers.
        assert done.stack_bytes <= 64
        assert "ld.global.v4" in done.ptx


@pytest.mark.gpu
@pytest.mark.memcheck
def test_right_on_odd_sizes():
    operator, formula = call_of(FORMS[1])
    given = inputs(FORMS[1], (3, 0, 6), width=14)
    with poisoned_empty("all"):
        kernel = run_with_gradients(
            lambda *x: operator(*x, impl="triton"), fresh(given, device="cuda")
        )
    for tensors in (kernel.outputs, kernel.gradients):
        tensors[:] = [t.cpu() for t in tensors]
    low, exact = (run_with_gradients(formula, fresh(given, dtype=d)) for d in (None, torch.float64))
    check_run_budget(kernel, low, exact)


@pytest.mark.parametrize(
    ("gap", "scale", "said"),
    [
        (torch.zeros(1), 60.0, "one gap for each of 5 tokens; got 1"),
        (torch.zeros(3), 60.0, "one gap for each of 5 tokens; got 3"),
        (torch.zeros(5, device="meta"), 60.0, "gap_seconds_T must be on cpu like qkv; got meta"),
        (torch.zeros(5, requires_grad=True), 60.0, "must require no gradient"),
        (torch.zeros(5), 0.0, "rote_time_scale_s must be above 0"),
    ],
)
def test_gaps_that_a_kernel_would_misread_are_refused(gap, scale, said):
    layout = Layout.from_lengths([2, 3])
    with pytest.raises(GemError, match=said):
        rotary_heads(
            torch.randn(5, 3, 8),
            layout,
            heads=1,
            key_heads=1,
            rotary="rote",
            gap_seconds_T=gap,
            rote_time_scale_s=scale,
        )

import sys
from functools import partial
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies

from gem_attention.activations import ACTIVATION_NAMES, activate, activate_backward
from gem_attention.kernels.generalized_attention import op
from gem_attention.kernels.generalized_attention.cases import CASES
from gem_attention.kernels.generalized_attention.cost import (
    generalized_attention_backward_cost,
    generalized_attention_cost,
)
from gem_attention.ops import generalized_attention
from gem_attention.patterns import visible_pairs, window_mask
from gem_jagged.batch import Layout
from gem_opkit.errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_equal_up_to_rounding,
    check_interpreted_kernel,
    check_kernel_on_gpu,
    check_ragged_edges,
    check_reference_gradients,
    check_refuses,
    check_registration,
    check_run_budget,
    check_runs_equal,
    fresh,
    run_with_gradients,
    take_sequences,
    upstream_like,
)

sys.path.insert(0, str(Path(__file__).parent))

from support_matrix import ACTIVATION_CASES, ACTIVATION_WIDTHS, ACTIVATIONS_INTERPRETED

SMALL = [case for case in CASES if case.device == "cpu" and sum(case.q_lengths) < 1000]

# The definitions, apart from the package's table.
PLAIN = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "fast_gelu": lambda x: (
        x * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    ),
    "taylor_gelu": lambda x: (
        0.5 * x + 0.3989422804 * x**2 - 0.0664903801 * x**4 + 0.0099735570 * x**6
    ),
    "relu": lambda x: x.clamp(min=0),
    "relu_squared": lambda x: x.clamp(min=0) ** 2,
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "hard_swish": lambda x: x * (x + 3).clamp(0, 6) / 6,
    "identity": lambda x: x,
}
MIXED = ("silu", "identity", "gelu", "relu_squared")


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpreter)])
def impl(request):
    return request.param


def inputs(q_lengths, k_lengths=None, *, heads=2, kv_heads=2, width=4, dtype=torch.float32):
    k_lengths = q_lengths if k_lengths is None else k_lengths
    q = torch.randn(sum(q_lengths), heads, width, dtype=dtype)
    k, v = (torch.randn(sum(k_lengths), kv_heads, width, dtype=dtype) for _ in range(2))
    layouts = (Layout.from_lengths(q_lengths), Layout.from_lengths(k_lengths))
    return (*(x.requires_grad_() for x in (q, k, v)), *layouts)


def oracle(q, k, v, q_layout, k_layout, *, activation="gelu", window=(None, None), scale=None):
    """One sequence and head after the other, with the mask that defines the window."""
    heads, groups = q.shape[1], k.shape[1]
    names = (activation,) * heads if isinstance(activation, str) else activation
    scale = q.shape[2] ** -0.5 if scale is None else scale
    q_lengths, k_lengths = q_layout.lengths.tolist(), k_layout.lengths.tolist()
    outs = [q.new_zeros(0, heads, v.shape[2])]
    sequences = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    for q_i, k_i, v_i in sequences:
        visible = window_mask(len(q_i), len(k_i), *window).to(q.device)
        by_head = []
        for h, name in enumerate(names):
            g = h // (heads // groups)
            p = PLAIN[name](q_i[:, h] @ k_i[:, g].T * scale)
            by_head.append(p.masked_fill(~visible, 0) @ v_i[:, g])
        outs.append(torch.stack(by_head, dim=1))
    return torch.cat(outs) + (q.sum() + k.sum() + v.sum()) * 0


def variant(fn=generalized_attention, **options):
    return lambda q, k, v, q_layout, k_layout: fn(q, k, v, q_layout, k_layout, **options)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_reference_gradients(activation):
    options = {"activation": activation, "window": (1, 1)}
    check_reference_gradients(
        variant(**options),
        inputs((3, 0, 2), (2, 1, 3), heads=2, kv_heads=1, width=2),
        reference=variant(oracle, **options),
    )


def test_registration():
    q, k, v, q_layout, k_layout = inputs((3, 0, 4), (2, 2, 6), heads=4, kv_heads=2)
    pairs = visible_pairs(q_layout.lengths, k_layout.lengths, 1, 2)
    size = {
        "visible_pairs": pairs,
        "q_tokens": 7,
        "k_tokens": 10,
        "heads": 4,
        "kv_heads": 2,
        "head_width": 4,
        "value_width": 4,
        "element_bytes": 4,
    }
    places = (q_layout.offsets_O, k_layout.offsets_O, q_layout.lengths, k_layout.lengths)
    rest = (*places, ",".join(MIXED), 1, 2, 0.5, False, pairs, "reference")
    check_registration(
        torch.ops.gem_attention.generalized_attention,
        (q, k, v, *rest),
        cost=generalized_attention_cost(**size),
        backward_cost=generalized_attention_backward_cost(**size),
    )
    q, k, v = (x.detach() for x in (q, k, v))
    check_registration(
        torch.ops.gem_attention.generalized_attention_backward,
        (torch.randn_like(q), q, k, v, *rest),
        cost=generalized_attention_backward_cost(**size),
    )


def counted(fn=generalized_attention, **options):
    """The operator with its visible pairs as an argument, as a graph needs them."""

    def run(q, k, v, q_layout, k_layout, pairs):
        return fn(q, k, v, q_layout, k_layout, visible_pairs=pairs, **options)

    return run


def counted_inputs(q_lengths, k_lengths=None, *, window=(None, None), **options):
    args = inputs(q_lengths, k_lengths, **options)
    return (*args, visible_pairs(args[3].lengths, args[4].lengths, *window))


def test_compiles_whole():
    check_compiles_whole(
        counted(activation=("gelu", "silu"), window=(2, 1)),
        [
            counted_inputs((3, 0, 5), (2, 4, 3), window=(2, 1)),
            counted_inputs((2, 7, 2), (9, 3, 4), window=(2, 1)),
            counted_inputs((9, 4, 2, 3), (2, 2, 2, 8), window=(2, 1)),
        ],
    )


# Grouped heads, a width that is no power of two, tails of both kinds of tile.
UNEQUAL = ((70, 37, 0, 5, 1), (41, 90, 3, 5, 0))


def by_impl(**options):
    """The operator as the kernel checks call it, with ``impl`` of theirs."""

    def run(q, k, v, q_layout, k_layout, *, impl):
        return generalized_attention(q, k, v, q_layout, k_layout, impl=impl, **options)

    return run


@pytest.mark.interpreter
@pytest.mark.parametrize(("activation", "window"), ACTIVATIONS_INTERPRETED)
def test_interpreted_kernel(activation, window):
    options = {"activation": activation, "window": window}
    check_interpreted_kernel(
        by_impl(**options),
        partial(oracle, **options),
        inputs(*UNEQUAL, heads=2, kv_heads=1, width=24),
    )


@pytest.fixture(params=["plain", "chosen"])
def kernels(request, monkeypatch):
    """The kernels for any GPU, and those that this GPU is given."""
    if request.param == "plain":
        from gem_attention.kernels.generalized_attention import kernel

        monkeypatch.setattr(op, "_kernels", lambda *_, **__: kernel)


HALVES = (torch.bfloat16, torch.float16)
GPU_UNEQUAL = ((300, 129, 0, 37, 1, 513), (257, 300, 3, 64, 0, 513))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ACTIVATION_CASES, ids=lambda case: case.id)
def test_kernel_on_gpu(case, kernels):
    options = {"activation": case.activation, "window": case.window}
    args = inputs(*GPU_UNEQUAL, heads=4, kv_heads=2, width=case.width)
    if case.activation == "taylor_gelu":
        options["scale"] = 0.02  # scores stay in its range
    check_kernel_on_gpu(
        by_impl(**options),
        partial(oracle, **options),
        args,
        dtypes=[getattr(torch, name) for name in case.dtypes],
    )


@pytest.mark.parametrize(
    ("activation", "window"), [("silu", (None, None)), (("gelu", "relu"), (3, 1))]
)
def test_ragged_edges(activation, window, impl):
    # Mirrored keys put empty sequences against full ones.
    options = {"activation": activation, "window": window}
    check_ragged_edges(
        counted(**options, impl=impl),
        lambda *args: oracle(*args[:5], **options),
        lambda case: counted_inputs(case.lengths, case.lengths[::-1], window=window),
        compiled=impl == "reference",  # the graph calls the same operator
    )


@pytest.mark.parametrize("window", [(None, None), (2, 1)])
def test_alone_equals_in_batch(window, impl):
    q_lengths, k_lengths = (3, 0, 40, 1, 7), (5, 2, 33, 0, 7)
    q, k, v, _, _ = inputs(q_lengths, k_lengths)

    def make(picked):
        return (
            take_sequences(q, q_lengths, picked),
            take_sequences(k, k_lengths, picked),
            take_sequences(v, k_lengths, picked),
            Layout.from_lengths([q_lengths[i] for i in picked]),
            Layout.from_lengths([k_lengths[i] for i in picked]),
        )

    attend = variant(activation=("gelu", "silu"), window=window, impl=impl)
    check_alone_equals_in_batch(attend, make, q_lengths, leaves=[q, k, v])


def test_refuses(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k, v, layout, k_layout = inputs((3, 0, 4), (2, 2, 6))
    attend = generalized_attention
    check_refuses(
        [
            (lambda: attend(q[0], k, v, layout, k_layout), ShapeError, "q_THK must have 3 dims"),
            (lambda: attend(q, k[..., :3], v, layout, k_layout), ShapeError, "k_SGK has K=3 but"),
            (
                lambda: attend(q, k[:9], v[:9], layout, k_layout),
                ShapeError,
                "k_layout.lengths must sum",
            ),
            (
                lambda: attend(q, k, v, layout, Layout.from_lengths([2, 2])),
                ShapeError,
                "k_layout must have the 3 sequences",
            ),
            (
                lambda: attend(q, k, v, layout, k_layout, window=(0, -2)),
                ShapeError,
                "window must .* got right -2",
            ),
            (
                lambda: attend(q, k, v, layout, k_layout, activation=("gelu",)),
                ShapeError,
                "activation must name one activation for each of 2 heads; got 1 names",
            ),
            (
                lambda: attend(q, k, v, layout, k_layout, activation="softmax"),
                UnsupportedError,
                "activation must be one of gelu.*; got 'softmax'; softmax is",
            ),
            (lambda: attend(q.int(), k, v, layout, k_layout), DtypeError, "q_THK must be float32"),
            (lambda: attend(q, k, v.to("meta"), layout, k_layout), DeviceError, "v_SGV must be on"),
            (
                lambda: attend(q, k, v, layout, k_layout, impl="triton"),
                UnsupportedError,
                'generalized_attention: impl="triton" .* use impl="reference"',
            ),
            *(
                (
                    lambda x=x: attend(*x, layout, k_layout, impl="triton"),
                    UnsupportedError,
                    "widths of at most 256; got .* use impl=",
                )
                for x in ([y.double() for y in (q, k, v)], [y.repeat(1, 1, 65) for y in (q, k, v)])
            ),
            (
                lambda: torch.ops.gem_attention.generalized_attention(
                    *(q, k, v, layout.offsets_O, k_layout.offsets_O, None, None, "relu"),
                    *(None, None, 0.5, False, 0, "reference"),
                ),
                UnsupportedError,
                "generalized_attention: lengths must be in host memory",
            ),
        ]
    )


@pytest.mark.interpreter
def test_interpreted_backward_of_few_queries():
    # In one pass, with one longer sequence among them, which takes the split kernels.
    options = {"activation": ("silu", "gelu")}
    lengths = ((32, 1, 0, 5, 50, 1, 1), (70, 4, 7, 0, 33, 1, 0))
    check_interpreted_kernel(
        by_impl(**options), partial(oracle, **options), inputs(*lengths, width=16)
    )


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_cases_equal_the_masked_oracle(case):
    args = inputs(
        case.q_lengths,
        case.k_lengths,
        heads=case.heads,
        kv_heads=case.kv_heads,
        width=case.head_width,
    )
    options = {"activation": "silu", "window": case.window}
    check_runs_equal(
        run_with_gradients(variant(**options), fresh(args)),
        run_with_gradients(variant(oracle, **options), fresh(args)),
    )


def test_history_equals_the_oracle_with_an_activation_a_head():
    # Long enough that sequences are cut into several tasks and chunks.
    lengths, keys = (200, 7, 131, 0, 160, 1), (150, 90, 131, 5, 0, 220)
    args = inputs(lengths, keys, heads=4, kv_heads=2, dtype=torch.float64)
    for window in [(None, None), (None, 0), (20, 20), (0, 0)]:
        options = {"activation": MIXED, "window": window, "scale": 0.02}
        check_runs_equal(
            run_with_gradients(variant(**options), fresh(args)),
            run_with_gradients(variant(oracle, **options), fresh(args)),
            what=f"{window}: ",
        )


@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_activation_is_its_definition_and_its_derivative(name):
    x = torch.linspace(-4, 4, 401, dtype=torch.float64, requires_grad=True)
    expected = PLAIN[name](x)
    assert torch.allclose(activate(name, x.detach().clone()), expected, atol=1e-12)
    grad = torch.randn_like(x)
    (wanted,) = torch.autograd.grad(expected, x, grad)
    got = activate_backward(name, grad.clone(), x.detach())
    # At a kink every slope between the two sides is a derivative.
    smooth = torch.ones_like(x, dtype=torch.bool)
    for kink in (-3.0, 0.0, 3.0):
        smooth &= (x - kink).abs() > 1e-9
    assert torch.allclose(got[smooth], wanted[smooth], atol=1e-12)
    assert activate(name, torch.zeros(1)).item() == 0.0


@pytest.mark.parametrize(("bound", "error"), [(0.5, 1e-5), (1.0, 1.1e-3), (1.25, 6.5e-3)])
def test_taylor_gelu_is_close_to_gelu_for_small_scores_only(bound, error):
    x = torch.linspace(-bound, bound, 1001, dtype=torch.float64)
    assert (activate("taylor_gelu", x) - F.gelu(x)).abs().max() < error
    assert (activate("taylor_gelu", 2 * torch.ones(1)) - F.gelu(2 * torch.ones(1))).abs() > 0.1


@pytest.mark.parametrize("width", [16, 48, 80, 96, 128])
def test_every_head_width(width):
    args = inputs((40, 3), width=width)
    check_runs_equal(
        run_with_gradients(variant(), fresh(args)),
        run_with_gradients(variant(oracle), fresh(args)),
    )


def test_a_side_beyond_int32_is_an_open_side():
    inputs_ = inputs((5, 4), (7, 2))
    for window, open_window in [((2**31, 0), (None, 0)), ((1, 2**63 - 1), (1, None))]:
        check_runs_equal(
            run_with_gradients(variant(window=window), fresh(inputs_)),
            run_with_gradients(variant(window=open_window), fresh(inputs_)),
            what=f"{window}: ",
        )


def test_no_keys_give_zero_and_no_gradient(impl):
    q, k, v, layout, k_layout = inputs((2, 1, 0), (0, 0, 3))
    out = generalized_attention(q, k, v, layout, k_layout, activation="silu", impl=impl)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    assert torch.equal(q.grad, torch.zeros_like(q))
    assert torch.equal(k.grad, torch.zeros_like(k))
    assert torch.equal(v.grad, torch.zeros_like(v))


def test_tokens_behind_the_last_sequence_get_nothing(impl):
    q, k, v = (torch.randn(10, 2, 4, requires_grad=True) for _ in range(3))
    layout = Layout.from_lengths([3, 4])
    out = generalized_attention(q, k, v, layout, layout, impl=impl)
    upstream = torch.randn_like(out)
    upstream[7:] = torch.nan
    out.backward(upstream)
    assert torch.equal(out[7:], torch.zeros(3, 2, 4))
    for x in (q, k, v):
        assert torch.equal(x.grad[7:], torch.zeros(3, 2, 4))
        assert torch.isfinite(x.grad).all()


def test_a_poisoned_sequence_leaves_the_others_alone(impl):
    q, k, v, layout, _ = inputs((5, 9, 0, 8))
    with torch.no_grad():
        for x in (q, k, v):
            x[5:14] = torch.nan
    for window in [(None, None), (2, 2)]:
        out = generalized_attention(q, k, v, layout, layout, window=window, impl=impl)
        gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        for x in (out, *gradients):
            assert torch.isfinite(x[:5]).all()
            assert torch.isfinite(x[14:]).all()


def test_empty_batch_after_a_warm_call(impl):
    q, k, v, layout, _ = inputs((3, 4))
    generalized_attention(q, k, v, layout, layout, impl=impl)
    for lengths in ([], [0, 0]):
        empty = Layout.from_lengths(lengths)
        leaves = [x[:0].detach().requires_grad_() for x in (q, k, v)]
        generalized_attention(*leaves, empty, empty, impl=impl).sum().backward()
        assert all(leaf.grad.shape == (0, 2, 4) for leaf in leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_in_the_budget(dtype):
    args = inputs((33, 5, 0, 12), (20, 9, 3, 12), heads=4, kv_heads=2, width=16)
    low = fresh(args, dtype=dtype)
    options = {"activation": MIXED, "window": (7, 3)}
    check_run_budget(
        run_with_gradients(variant(**options), fresh(low)),
        run_with_gradients(variant(oracle, **options), fresh(low)),
        run_with_gradients(variant(oracle, **options), fresh(low, dtype=torch.float64)),
    )


def test_same_bits_in_ten_runs():
    args = inputs((90, 7, 200, 0, 31), (16, 16, 3, 16, 16), heads=4, kv_heads=2, width=16)
    first = run_with_gradients(variant(activation=MIXED), fresh(args))
    for _ in range(10):
        again = run_with_gradients(variant(activation=MIXED), fresh(args))
        for a, b in zip(
            first.outputs + first.gradients, again.outputs + again.gradients, strict=True
        ):
            assert torch.equal(a, b)


def test_strided_operands(impl):
    layout = Layout.from_lengths([5, 0, 7])
    fused = torch.randn(12, 3, 2, 4, requires_grad=True)
    by_head = torch.randn(3, 2, 12, 4, requires_grad=True)
    for base, views in (
        (fused, fused.unbind(1)),
        (by_head, [x.transpose(0, 1) for x in by_head]),
    ):
        out = generalized_attention(*views, layout, layout, impl=impl)
        plain = [x.detach().contiguous().requires_grad_() for x in views]
        expected = generalized_attention(*plain, layout, layout, impl=impl)
        assert torch.equal(out, expected)
        upstream = torch.randn(2, 4, 12).permute(2, 0, 1)
        (got,) = torch.autograd.grad(out, base, upstream)
        (wanted,) = torch.autograd.grad(views, base, torch.autograd.grad(expected, plain, upstream))
        check_equal_up_to_rounding(got, wanted)


@pytest.mark.parametrize(("width", "value_width"), [(4, 7), (48, 16), (16, 80)])
def test_values_may_have_another_width(width, value_width, impl):
    q, k, _, layout, _ = inputs((4, 6), width=width)
    args = (q, k, torch.randn(10, 2, value_width, requires_grad=True), layout, layout)
    check_runs_equal(
        run_with_gradients(variant(impl=impl), fresh(args)), run_with_gradients(oracle, fresh(args))
    )


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
def test_any_scale(scale, impl):
    args = inputs((20, 3), (9, 30))
    options = {"activation": ("gelu", "relu"), "window": (4, 0), "scale": scale}
    check_runs_equal(
        run_with_gradients(variant(**options, impl=impl), fresh(args)),
        run_with_gradients(variant(oracle, **options), fresh(args)),
    )


def test_runs_where_torch_demands_determinism(impl):
    args = inputs((9, 4), (5, 6))
    torch.use_deterministic_algorithms(True)
    try:
        run = run_with_gradients(variant(impl=impl), fresh(args))
    finally:
        torch.use_deterministic_algorithms(False)
    check_runs_equal(run, run_with_gradients(variant(oracle), fresh(args)))


@hypothesis.given(
    sides=strategies.lists(
        strategies.tuples(strategies.integers(0, 40), strategies.integers(0, 70)), max_size=3
    ),
    window=strategies.tuples(*[strategies.none() | strategies.integers(0, 40)] * 2),
    tail=strategies.integers(0, 40),
    grouped=strategies.booleans(),
    names=strategies.tuples(*[strategies.sampled_from(ACTIVATION_NAMES)] * 2),
)
@hypothesis.settings(max_examples=4)
@pytest.mark.interpreter
def test_kernel_equals_the_reference_on_random_lengths(sides, window, tail, grouped, names):
    # The reference is held to the masks by the tests above.
    q_lengths, k_lengths = [q for q, _ in sides], [k for _, k in sides]
    q = torch.randn(sum(q_lengths) + tail, 2, 16, requires_grad=True)
    k, v = (
        torch.randn(sum(k_lengths) + tail, 1 if grouped else 2, 16, requires_grad=True)
        for _ in range(2)
    )
    args = (q, k, v, Layout.from_lengths(q_lengths), Layout.from_lengths(k_lengths))
    options = {"activation": names, "window": window, "scale": 0.2}
    check_runs_equal(
        run_with_gradients(variant(**options, impl="triton"), fresh(args)),
        run_with_gradients(variant(**options, impl="reference"), fresh(args)),
    )


@pytest.mark.interpreter
def test_interpreter_is_refused_the_dtype_that_it_gets_wrong():
    q, k, v, layout, _ = inputs((3, 4), dtype=torch.bfloat16)
    check_refuses(
        [
            (
                lambda: generalized_attention(q, k, v, layout, layout, impl="triton"),
                UnsupportedError,
                "have float32 or float16 on a CPU; got torch.bfloat16",
            )
        ]
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("wrong", [[0, 10, 60], [-9, 10, 32]])
def test_offsets_beyond_the_tokens_read_nothing_outside(wrong):
    base = [torch.full((64, 2, 16), torch.nan) for _ in range(3)]
    q, k, v = (x[16:48] for x in base)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    offsets_O = torch.tensor(wrong)
    out = torch.ops.gem_attention.generalized_attention(
        *(q, k, v, offsets_O, offsets_O, None, None, "silu"),
        *(None, None, 0.25, False, 0, "triton"),
    )
    layout = Layout.from_lengths([10, 22])
    right = generalized_attention(
        q, k, v, layout, layout, activation="silu", scale=0.25, impl="reference"
    )
    check_equal_up_to_rounding(out, right)


def test_the_log_says_once_which_kernel_ran(caplog, monkeypatch):
    monkeypatch.setattr(op, "_announced", set())
    q, k, v, *_ = inputs((3, 4))
    with caplog.at_level("INFO"):
        for _ in range(2):
            op._kernels(
                *(q, k, v),
                batch=2,
                window=(None, None),
                deterministic=False,
                activations="gelu",
                backward=False,
            )
    assert [r.message for r in caplog.records] == [
        "generalized_attention: kernel runs on cpu for torch.float32, K=4, V=4"
    ]


@pytest.mark.gpu
def test_reference_on_gpu_equals_cpu_and_waits_for_nothing():
    args = inputs((90, 7, 200, 0, 31), (40, 9, 211, 3, 0), heads=4, kv_heads=2, width=16)
    attend = variant(activation=MIXED, window=(16, 40), impl="reference")
    here = run_with_gradients(attend, fresh(args))
    there = fresh(args, device="cuda")
    upstream = [upstream_like(x, seed=i).cuda() for i, x in enumerate(here.outputs)]
    torch.autograd.grad([attend(*there)], there[:3], upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = (attend(*there),)
        gradients = torch.autograd.grad(outputs, there[:3], upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip((*outputs, *gradients), here.outputs + here.gradients, strict=True):
        check_equal_up_to_rounding(a.detach().cpu(), b, noise_scale=16.0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ACTIVATION_WIDTHS, ids=lambda case: case.id)
def test_every_head_width_on_gpu(case):
    q, k, _, *layouts = inputs((130, 0, 67), (70, 9, 200), width=case.width)
    v = torch.randn(279, 2, case.value_width, requires_grad=True)
    options = {"activation": ("silu", "gelu"), "window": case.window}
    check_kernel_on_gpu(
        by_impl(**options),
        partial(oracle, **options),
        (q, k, v, *layouts),
        dtypes=[getattr(torch, name) for name in case.dtypes],
    )


@pytest.mark.gpu
def test_short_queries_on_gpu():
    for longest in (32, 64):
        q_lengths = (longest, 1, 0, longest - 1, 5, 100, 1, 1, 1, 1)
        k_lengths = (300, 64, 7, 0, 129, 50, 1, 1, 0, 33)
        options = {"activation": ("silu", "gelu")}
        check_kernel_on_gpu(
            by_impl(**options),
            partial(oracle, **options),
            inputs(q_lengths, k_lengths, width=64),
            dtypes=(torch.float32, *HALVES),
        )


def far_scores(level, *, width, dtype):
    """Inputs on the GPU whose scores all lie within a few units of ``level``."""
    lengths = (333, 5, 129, 3, 9, 31), (257, 70, 131, 500, 1, 65)
    q, k, v, *layouts = (
        x.detach() if torch.is_tensor(x) else x for x in inputs(*lengths, width=width)
    )
    q = q / width**0.5
    q[..., -1], k[..., -1] = 1.0, level
    return fresh((*(x.requires_grad_() for x in (q, k, v)), *layouts), dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("level", [-12.0, -50.0, -100.0, 12.0, 100.0])
def test_scores_far_from_zero_on_gpu(level, kernels):
    # What decides is the largest weight that such scores could have, which is |level|.
    for name in ("silu", "gelu", "fast_gelu", "relu"):
        for dtype in (torch.float32, *HALVES):
            args = far_scores(level, width=64, dtype=dtype)
            options = {"activation": name, "scale": 1.0}
            plain = partial(oracle, **options)
            check_run_budget(
                run_with_gradients(variant(**options, impl="triton"), fresh(args)),
                run_with_gradients(plain, fresh(args)),
                run_with_gradients(plain, fresh(args, dtype=torch.float64)),
                what=f"{name} {dtype}: ",
            )


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 96])
def test_same_bits_in_ten_runs_on_gpu(width):
    args = inputs((900, 7, 2000, 0, 31), heads=4, kv_heads=2, width=width)
    args = fresh(args, dtype=torch.bfloat16, device="cuda")
    for window in [(None, None), (64, 16)]:
        attend = variant(activation=MIXED, window=window, deterministic=True, impl="triton")
        first = run_with_gradients(attend, fresh(args))
        for _ in range(10):
            again = run_with_gradients(attend, fresh(args))
            for a, b in zip(
                first.outputs + first.gradients, again.outputs + again.gradients, strict=True
            ):
                assert torch.equal(a, b)


@pytest.mark.gpu
def test_poison_and_tails_on_gpu(kernels):
    # NaN in one sequence, in the rows behind the last, and in the gradient that arrives there.
    q, k, v = (
        torch.randn(800, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    layout = Layout.from_lengths([129, 300, 0, 301], device="cuda")
    with torch.no_grad():
        for x in (q, k, v):
            x[129:429] = torch.nan
            x[730:] = torch.nan
    for window in [(None, None), (None, 0), (64, 64)]:
        for name in ("silu", "gelu", "relu"):
            out = generalized_attention(
                q, k, v, layout, layout, activation=name, window=window, impl="triton"
            )
            upstream = torch.randn_like(out)
            upstream[730:] = torch.nan
            gradients = torch.autograd.grad(out, (q, k, v), upstream)
            for x in (out, *gradients):
                assert torch.isfinite(x[:129]).all()
                assert torch.isfinite(x[429:]).all()
                assert not x[730:].any()


@pytest.mark.gpu
def test_slices_of_a_fused_tensor_and_int64_offsets_on_gpu(kernels):
    lengths = [300, 1, 0, 129, 64]
    fused = torch.randn(
        sum(lengths), 3, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    views = fused.unbind(1)
    apart = [x.detach().clone().requires_grad_() for x in views]
    found = []
    for operands, dtype in ((views, torch.int64), (apart, torch.int32)):
        layout = Layout.from_lengths(lengths, device="cuda", dtype=dtype)
        out = generalized_attention(*operands, layout, layout, activation="silu", impl="triton")
        found.append((out, operands))
    assert torch.equal(found[0][0], found[1][0])
    upstream = torch.randn_like(found[0][0])
    for a, b in zip(*(torch.autograd.grad(out, x, upstream) for out, x in found), strict=True):
        check_equal_up_to_rounding(a, b, noise_scale=4.0)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(kernels):
    q, k, v = (
        torch.randn(2_200_000, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    layout = Layout.from_lengths([1000] * 2200, device="cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = generalized_attention(*leaves, layout, layout, activation="relu", impl="triton")
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, upstream)
    last = Layout.from_lengths([1000], device="cuda")
    alone = [x[-1000:].detach().clone().requires_grad_() for x in leaves]
    expected = generalized_attention(*alone, last, last, activation="relu", impl="triton")
    wanted = torch.autograd.grad(expected, alone, upstream[-1000:])
    for a, b in zip((out, *gradients), (expected, *wanted), strict=True):
        check_equal_up_to_rounding(a[-1000:].detach(), b.detach(), noise_scale=16.0)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
def test_memory_is_that_of_inputs_and_results(deterministic):
    layout = Layout.from_lengths([(37 * i) % 1024 for i in range(256)], device="cuda")
    q, k, v = (
        torch.randn(layout.total_tokens, 4, 128, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    upstream = torch.randn_like(q)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = generalized_attention(*leaves, layout, layout, deterministic=deterministic)
    torch.autograd.grad(out, leaves, upstream)
    peak = torch.cuda.max_memory_allocated() - before + 4 * q.nbytes
    # q, k, v, out, the gradient of out and three gradients.
    assert peak <= 1.1 * 8 * q.nbytes, f"{peak / (8 * q.nbytes):.3f}"

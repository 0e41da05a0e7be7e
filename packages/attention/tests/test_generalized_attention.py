import pytest
import torch
import torch.nn.functional as F

from gem_attention.activations import ACTIVATION_NAMES, activate, activate_backward
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
        visible = window_mask(len(q_i), len(k_i), *window)
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
    rest = (*places, ",".join(MIXED), 1, 2, 0.5, pairs, "reference")
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


@pytest.mark.parametrize(
    ("activation", "window"), [("silu", (None, None)), (("gelu", "relu"), (3, 1))]
)
def test_ragged_edges(activation, window):
    # Mirrored keys put empty sequences against full ones.
    options = {"activation": activation, "window": window}
    check_ragged_edges(
        counted(**options),
        lambda *args: oracle(*args[:5], **options),
        lambda case: counted_inputs(case.lengths, case.lengths[::-1], window=window),
    )


@pytest.mark.parametrize("window", [(None, None), (2, 1)])
def test_alone_equals_in_batch(window):
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

    attend = variant(activation=("gelu", "silu"), window=window)
    check_alone_equals_in_batch(attend, make, q_lengths, leaves=[q, k, v])


def test_refuses():
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
        ]
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


def test_no_keys_give_zero_and_no_gradient():
    q, k, v, layout, k_layout = inputs((2, 1, 0), (0, 0, 3))
    out = generalized_attention(q, k, v, layout, k_layout, activation="silu")
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    assert torch.equal(q.grad, torch.zeros_like(q))
    assert torch.equal(k.grad, torch.zeros_like(k))
    assert torch.equal(v.grad, torch.zeros_like(v))


def test_tokens_behind_the_last_sequence_get_nothing():
    q, k, v = (torch.randn(10, 2, 4, requires_grad=True) for _ in range(3))
    layout = Layout.from_lengths([3, 4])
    out = generalized_attention(q, k, v, layout, layout)
    upstream = torch.randn_like(out)
    upstream[7:] = torch.nan
    out.backward(upstream)
    assert torch.equal(out[7:], torch.zeros(3, 2, 4))
    for x in (q, k, v):
        assert torch.equal(x.grad[7:], torch.zeros(3, 2, 4))
        assert torch.isfinite(x.grad).all()


def test_a_poisoned_sequence_leaves_the_others_alone():
    q, k, v, layout, _ = inputs((5, 9, 0, 8))
    with torch.no_grad():
        for x in (q, k, v):
            x[5:14] = torch.nan
    for window in [(None, None), (2, 2)]:
        out = generalized_attention(q, k, v, layout, layout, window=window)
        gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        for x in (out, *gradients):
            assert torch.isfinite(x[:5]).all()
            assert torch.isfinite(x[14:]).all()


def test_empty_batch_after_a_warm_call():
    q, k, v, layout, _ = inputs((3, 4))
    generalized_attention(q, k, v, layout, layout)
    for lengths in ([], [0, 0]):
        empty = Layout.from_lengths(lengths)
        leaves = [x[:0].detach().requires_grad_() for x in (q, k, v)]
        generalized_attention(*leaves, empty, empty).sum().backward()
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


def test_strided_operands():
    layout = Layout.from_lengths([5, 0, 7])
    fused = torch.randn(12, 3, 2, 4, requires_grad=True)
    by_head = torch.randn(3, 2, 12, 4, requires_grad=True)
    for base, views in (
        (fused, fused.unbind(1)),
        (by_head, [x.transpose(0, 1) for x in by_head]),
    ):
        out = generalized_attention(*views, layout, layout)
        plain = [x.detach().contiguous().requires_grad_() for x in views]
        expected = generalized_attention(*plain, layout, layout)
        assert torch.equal(out, expected)
        upstream = torch.randn(2, 4, 12).permute(2, 0, 1)
        (got,) = torch.autograd.grad(out, base, upstream)
        (wanted,) = torch.autograd.grad(views, base, torch.autograd.grad(expected, plain, upstream))
        check_equal_up_to_rounding(got, wanted)


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

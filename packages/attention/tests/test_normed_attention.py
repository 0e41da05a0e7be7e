import pytest
import torch
import torch.nn.functional as F

from gem_attention.kernels.normed_attention.cases import CASES
from gem_attention.kernels.normed_attention.cost import (
    normed_attention_backward_cost,
    normed_attention_cost,
)
from gem_attention.kernels.normed_attention.kernel import normed_constants, rows_constants
from gem_attention.ops import normed_attention
from gem_attention.patterns import visible_pairs
from gem_jagged.batch import Layout
from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import ConfigError, DtypeError, ShapeError, UnsupportedError
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
    check_runs_equal,
    fresh,
    run_with_gradients,
    take_sequences,
)

SMALL = [case for case in CASES if case.device == "cpu"]
ACTIVATE = {
    "gelu": F.gelu,
    "fast_gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpreter)])
def impl(request):
    return request.param


def inputs(lengths, keys, *, heads=1, kv_heads=1, width=6, tail=0, dtype=torch.float32):
    x = torch.randn(sum(lengths) + tail, heads * width, dtype=dtype) + 0.3
    k, v = (torch.randn(sum(keys) + tail, kv_heads, width, dtype=dtype) for _ in range(2))
    layouts = [Layout.from_lengths(list(each)) for each in (lengths, keys)]
    return (*(t.requires_grad_() for t in (x, k, v)), *layouts)


def oracle(x, k, v, layout, k_layout, *, activation="gelu", scale=None):
    """One sequence and head after the other, with torch's norms."""
    width, heads = k.shape[2], x.shape[1] // k.shape[2]
    names = [activation] * heads if isinstance(activation, str) else activation
    scale = width**-0.5 if scale is None else scale
    q = F.layer_norm(x, (x.shape[1],), eps=1e-6)
    lengths, keys = layout.lengths.tolist(), k_layout.lengths.tolist()
    lengths.append(x.shape[0] - sum(lengths))
    keys.append(k.shape[0] - sum(keys))
    outs = []
    for b, (q_i, k_i, v_i) in enumerate(
        zip(q.split(lengths), k.split(keys), v.split(keys), strict=True)
    ):
        by_head = []
        for h in range(heads):
            g = h // (heads // k.shape[1])
            score = scale * q_i[:, h * width : (h + 1) * width] @ k_i[:, g].T
            read = ACTIVATE[names[h]](score) @ v_i[:, g]
            by_head.append(read if b < layout.batch else read * 0)
        outs.append(torch.cat(by_head, dim=1))
    a = torch.cat(outs).to(q.dtype) + q
    return F.rms_norm(a, (x.shape[1],), eps=1e-6) + x + (k.sum() + v.sum()) * 0


def variant(fn=normed_attention, **options):
    return lambda x, k, v, layout, k_layout, **more: fn(
        x, k, v, layout, k_layout, **options, **more
    )


def test_reference_gradients():
    options = {"activation": ("gelu", "relu")}
    check_reference_gradients(
        variant(**options),
        inputs((3, 0, 2), (2, 3, 0), heads=2, width=2),
        reference=variant(oracle, **options),
    )


def test_registration():
    x, k, v, layout, k_layout = inputs((3, 0, 6), (2, 5, 4), heads=2, width=4)
    size = {
        "visible_pairs": 30,
        "tokens": 9,
        "k_tokens": 11,
        "heads": 2,
        "kv_heads": 1,
        "head_width": 4,
        "token_bytes": 4,
        "key_bytes": 4,
    }
    offsets, lengths = (layout.offsets_O, k_layout.offsets_O), (layout.lengths, k_layout.lengths)
    places, numbers = (*offsets, *lengths), (5, "gelu", 0.5, 1e-6, 1e-5)
    check_registration(
        torch.ops.gem_attention.normed_attention,
        (x, k, v, *places, *numbers, True, 30, "reference"),
        cost=normed_attention_cost(**size),
        backward_cost=normed_attention_backward_cost(**size),
    )
    x, k, v = (t.detach() for t in (x, k, v))
    grad, rest = torch.randn_like(x), (*places, *numbers, 30, "reference")
    check_registration(
        torch.ops.gem_attention.normed_attention_backward,
        (grad, x, k, v, x[:0].clone(), x[:0].clone(), *rest),
        cost=normed_attention_backward_cost(**size),
    )
    # Of what the kernels keep the reference needs nothing.
    for normed, kept in ((x[:0].clone(), 1), (torch.randn_like(x), 2)):
        check_registration(
            torch.ops.gem_attention.normed_attention_backward,
            (grad, x, k, v, normed, torch.randn_like(x), *rest),
            cost=normed_attention_backward_cost(**size, kept=kept),
        )


def counted(**options):
    """The operator with its visible pairs as an argument, as a graph needs them."""

    def run(x, k, v, layout, k_layout, pairs):
        return normed_attention(x, k, v, layout, k_layout, visible_pairs=pairs, **options)

    return run


def counted_inputs(lengths, keys, **options):
    args = inputs(lengths, keys, **options)
    return (*args, visible_pairs(args[3].lengths, args[4].lengths, None, None))


def test_compiles_whole(impl):
    made = [
        counted_inputs(lengths, (5,) * len(lengths))
        for lengths in ((3, 0, 9), (2, 7, 2), (9, 4, 2, 3))
    ]
    check_compiles_whole(counted(impl=impl), made)


def with_impl(**options):
    """The operator as the kernel checks call it, with ``impl`` of theirs."""
    return lambda *args, impl: normed_attention(*args, impl=impl, **options)


# Steps of 16 tokens: one, several, a last one; sequences without keys and without tokens; tails.
@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("activation", "width", "heads", "kv_heads"),
    [("gelu", 24, 1, 1), ("silu", 16, 1, 1), (("gelu", "relu", "silu", "relu"), 12, 4, 2)],
)
def test_interpreted_kernel(activation, width, heads, kv_heads):
    check_interpreted_kernel(
        with_impl(activation=activation),
        variant(oracle, activation=activation),
        inputs(
            (70, 0, 33, 5), (9, 4, 0, 128), heads=heads, kv_heads=kv_heads, width=width, tail=140
        ),
    )


GPU_LENGTHS = ((1300, 0, 33, 5, 129), (100, 4, 0, 128, 1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("activation", "width", "dtypes", "heads", "kv_heads"),
    [
        ("gelu", 128, (torch.bfloat16, torch.float16), 1, 1),
        ("silu", 64, (torch.bfloat16,), 1, 1),
        ("relu", 40, (torch.bfloat16,), 1, 1),
        ("gelu", 128, (torch.bfloat16, torch.float16), 4, 4),
        (("silu", "gelu"), 64, (torch.bfloat16,), 2, 1),
        ("relu", 40, (torch.bfloat16,), 3, 3),
    ],
)
def test_kernel_on_gpu(activation, width, dtypes, heads, kv_heads):
    x, k, v, *layouts = inputs(*GPU_LENGTHS, width=width, heads=heads, kv_heads=kv_heads, tail=3)
    k, v = ((t.detach() / width**0.5).requires_grad_() for t in (k, v))
    check_kernel_on_gpu(
        with_impl(activation=activation),
        variant(oracle, activation=activation),
        (x, k, v, *layouts),
        dtypes=dtypes,
    )


def test_ragged_edges(impl):
    check_ragged_edges(
        counted(impl=impl),
        lambda *args: oracle(*args[:5]),
        lambda case: counted_inputs(case.lengths, (5,) * len(case.lengths)),
        compiled=impl == "reference",  # the graph calls the same operator
    )


def test_alone_equals_in_batch(impl):
    lengths, keys = (3, 0, 40, 1, 16), (5, 2, 9, 0, 3)
    x, k, v, *_ = inputs(lengths, keys)

    def make(picked):
        layouts = [Layout.from_lengths([ls[i] for i in picked]) for ls in (lengths, keys)]
        return (
            take_sequences(x, lengths, picked),
            *(take_sequences(t, keys, picked) for t in (k, v)),
            *layouts,
        )

    check_alone_equals_in_batch(variant(impl=impl), make, lengths, leaves=[x, k, v])


def test_refuses(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, k, v, layout, k_layout = inputs((3, 0, 4), (2, 1, 3))
    call = normed_attention
    check_refuses(
        [
            (lambda: call(x[0], k, v, layout, k_layout), ShapeError, "x_TD must have 2 dims"),
            (
                lambda: call(x[:, :5], k, v, layout, k_layout),
                ShapeError,
                "x_TD must have a width D that heads of 6 fill; got 5",
            ),
            (
                lambda: call(x, k, v[:2], layout, k_layout),
                ShapeError,
                "v_SGK has S=2 but k_SGK has S=6",
            ),
            (lambda: call(x, k, v.half(), layout, k_layout), DtypeError, "v_SGK must be"),
            (
                lambda: call(x, k, v, layout, k_layout, activation="tanh"),
                UnsupportedError,
                "activation must be one of",
            ),
            (
                lambda: call(x, k, v, layout, k_layout, eps=0.0),
                ConfigError,
                "eps must be above 0; got 0.0",
            ),
            (lambda: call(x, k, v, layout, k_layout, out_eps=1), DtypeError, "out_eps must be a"),
            (
                lambda: call(x, k, v, layout, k_layout, impl="triton"),
                UnsupportedError,
                'normed_attention: impl="triton" .* use impl="reference"',
            ),
            (
                lambda: call(torch.cat([x] * 2731, 1), k, v, layout, k_layout, impl="triton"),
                UnsupportedError,
                "must have heads of at most 256 columns .* got 16386 columns in heads of 6",
            ),
        ]
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("heads", [1, 2])
def test_what_is_kept_is_what_the_cost_says(heads):
    x, k, v, layout, k_layout = inputs((3, 0, 6), (2, 5, 4), heads=heads, width=4)
    given = (layout.offsets_O, k_layout.offsets_O, None, None, 5, "gelu", 0.5, 1e-6, 1e-5)
    size = {"visible_pairs": 30, "tokens": 9, "k_tokens": 11, "heads": heads, "kv_heads": 1}
    size |= {"head_width": 4, "token_bytes": 4, "key_bytes": 4}
    outs = []
    for keep in (False, True):
        out, *kept = torch.ops.gem_attention.normed_attention(x, k, v, *given, keep, 30, "triton")
        cost = normed_attention_cost(**size, keeps=2 * keep)
        written = out.numel() + sum(t.numel() for t in kept)
        assert cost.bytes == 4 * (x.numel() + 2 * k.numel() + written)
        assert [t.shape[0] for t in kept] == [9 * keep] * 2
        outs.append(out)
    if heads == 1:  # a forward alone is another kernel
        check_equal_up_to_rounding(*(out.detach() for out in outs))
    else:
        assert torch.equal(*outs)
    # The public function keeps only what a backward may want.
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        normed_attention(x, k, v, layout, k_layout, impl="triton")
    assert seen.count(x.shape) == 3


@pytest.mark.interpreter
def test_a_forward_alone_of_one_head_is_one_kernel():
    lengths, keys = (70, 0, 33, 5), (9, 4, 0, 128)
    args = [t.detach() if torch.is_tensor(t) else t for t in inputs(lengths, keys, tail=140)]
    with torch.profiler.profile() as profile:
        out = normed_attention(*args, impl="triton")
    names = {event.name for event in profile.events()}
    assert "gem_attention::normed_attention" in names
    assert "gem_attention::generalized_attention" not in names
    check_equal_up_to_rounding(out, oracle(*args))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_cases_equal_the_oracle(case):
    args = inputs(
        case.q_lengths, case.keys, heads=case.heads, kv_heads=case.kv_heads, width=case.head_width
    )
    check_runs_equal(
        run_with_gradients(variant(activation="silu"), fresh(args)),
        run_with_gradients(variant(oracle, activation="silu"), fresh(args)),
    )


def test_tokens_of_another_dtype_than_keys():
    # Under autocast keys come in bf16 and tokens stay float32.
    x, k, v, *layouts = inputs((30, 0, 12), (9, 4, 128), width=16)
    low = [(t.detach().bfloat16()).requires_grad_() for t in (k, v)]
    out = normed_attention(x, *low, *layouts)
    gradients = torch.autograd.grad(out.sum(), (x, *low))
    assert [t.dtype for t in (out, *gradients)] == [torch.float32] * 2 + [torch.bfloat16] * 2
    wide = oracle(x, *(t.float() for t in low), *layouts)
    check_equal_up_to_rounding(out.detach(), wide.detach())


def test_strided_operands(impl):
    layouts = [Layout.from_lengths(list(each)) for each in ((5, 0, 7), (3, 2, 4))]
    both = torch.randn(9, 2, 1, 4, requires_grad=True)
    x = torch.randn(4, 12).t().requires_grad_()
    out = normed_attention(x, *both.unbind(1), *layouts, impl=impl)
    plain = [t.detach().contiguous().requires_grad_() for t in (x, *both.unbind(1))]
    expected = normed_attention(*plain, *layouts, impl=impl)
    assert torch.equal(out, expected)
    upstream = torch.randn(4, 12).t()
    got = torch.autograd.grad(out, (x, both), upstream)
    wanted = torch.autograd.grad(expected, plain, upstream)
    check_equal_up_to_rounding(got[0], wanted[0])
    check_equal_up_to_rounding(got[1], torch.stack(wanted[1:], dim=1))


@pytest.mark.parametrize("heads", [1, 2])
def test_a_poisoned_sequence_leaves_the_others_alone(impl, heads):
    x, k, v, *layouts = inputs((5, 9, 8), (4, 3, 6), heads=heads, kv_heads=heads)
    with torch.no_grad():
        x[5:14], k[4:7], v[4:7] = torch.nan, torch.nan, torch.nan
    out = normed_attention(x, k, v, *layouts, impl=impl)
    grad_x, *gradients = torch.autograd.grad(out, (x, k, v), torch.randn_like(out))
    for rows, (begin, end) in (
        (out, (5, 14)),
        (grad_x, (5, 14)),
        *((g, (4, 7)) for g in gradients),
    ):
        assert torch.isfinite(rows[:begin]).all()
        assert torch.isfinite(rows[end:]).all()


def kernel(dtype, width):
    single = dtype == "fp32"
    constants = normed_constants(width, 128, "gelu", single=single)
    constants |= {"FAST": not single, "STRETCH": 512}
    arguments = (
        dict.fromkeys(("x_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
        | dict.fromkeys(("entries_ptr", "count_ptr"), "*i32")
        | dict.fromkeys(("q_offsets_ptr", "k_offsets_ptr"), "*i64")
        | dict.fromkeys(("q_tokens", "k_tokens", "batch"), "i32")
        | dict.fromkeys(("scale", "eps", "out_eps"), "fp32")
        | dict.fromkeys(("stride_x_t", "stride_k_s", "stride_v_s"), "i32")
    )
    name = "normed_attention_forward_kernel"
    return KernelVariant(name, arguments, constants, 4, constants["STAGES"])


def rows_of_heads(name, pointers, numbers, width=512):
    arguments = dict.fromkeys(pointers, "*bf16") | {"rows": "i32"} | numbers
    constants = rows_constants(width)
    return KernelVariant(name, arguments, constants, constants.pop("num_warps"))


def test_normed_attention_compiles():
    variants = [
        kernel("bf16", 128),
        rows_of_heads(
            "normed_heads_out_kernel",
            ("x_ptr", "read_ptr", "out_ptr"),
            {"eps": "fp32", "out_eps": "fp32", "stride_x_t": "i32"},
        ),
        rows_of_heads(
            "normed_heads_finish_kernel",
            ("x_ptr", "grad_q_ptr", "grad_a_ptr", "grad_ptr", "grad_x_ptr"),
            {"eps": "fp32", "stride_x_t": "i32", "stride_g_t": "i32"},
        ),
    ]
    *_, out_rows, finish_rows = variants
    for report in compile_kernels("gem_attention.kernels.normed_attention.kernel", variants):
        if report.variant in (out_rows, finish_rows):
            assert report.stack_bytes == 0
            assert "ld.global.v4" in report.ptx
            continue
        assert any(word in report.ptx for word in ("mma.sync", "wgmma", "tcgen05.mma"))
        if report.capability == 90:
            assert report.stack_bytes == 0


def on_gpu(width=128, dtype=torch.bfloat16, heads=1):
    args = inputs(*GPU_LENGTHS, width=width, heads=heads, kv_heads=heads)
    return fresh(args, dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 4])
def test_same_bits_in_ten_runs_on_gpu(heads):
    args = on_gpu(heads=heads)
    first = run_with_gradients(variant(impl="triton"), fresh(args))
    for _ in range(10):
        again = run_with_gradients(variant(impl="triton"), fresh(args))
        for a, b in zip(
            first.outputs + first.gradients, again.outputs + again.gradients, strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 4])
def test_a_captured_graph_is_right_for_other_lengths(heads):
    x, k, v, layout, k_layout = on_gpu(heads=heads)
    upstream = torch.randn_like(x)
    attend = variant(impl="triton", visible_pairs=0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(attend(x, k, v, layout, k_layout), (x, k, v), upstream)
    torch.cuda.current_stream().wait_stream(side)
    offsets_O = layout.offsets_O.clone()
    captured = Layout(offsets_O, layout.lengths, layout.max_length, layout.total_tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(x, k, v, captured, k_layout)
        gradients = torch.autograd.grad(out, (x, k, v), upstream)
    for lengths in ([0, 1467, 0, 0, 0], [5, 6, 7, 1000, 449]):
        other = Layout.from_lengths(lengths, device="cuda")
        offsets_O.copy_(other.offsets_O)
        graph.replay()
        expected = attend(x, k, v, other, k_layout)
        wanted = torch.autograd.grad(expected, (x, k, v), upstream)
        for a, b in zip((out, *gradients), (expected, *wanted), strict=True):
            check_equal_up_to_rounding(a.detach(), b.detach(), noise_scale=4.0)

import sys
from functools import partial
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies

from gem_attention.flash_compat import pooled_attention_varlen_func
from gem_attention.kernels.pooled_attention import op
from gem_attention.kernels.pooled_attention.cases import CASES
from gem_attention.kernels.pooled_attention.cost import (
    pooled_attention_backward_cost,
    pooled_attention_cost,
)
from gem_attention.ops import jagged_flash_attention, pooled_attention
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

from support_matrix import POOLED_CASES

SMALL = [case for case in CASES if case.device == "cpu" and sum(case.keys) < 1000]
PLAIN = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu, "identity": lambda x: x}


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpreter)])
def impl(request):
    return request.param


@pytest.fixture
def short_chunks(monkeypatch):
    """Let the kernels cut sequences of a few keys into chunks, as they cut giants on a GPU."""
    from gem_attention.kernels.pooled_attention import kernel

    monkeypatch.setattr(kernel, "LEAST_SPLIT", 32)
    monkeypatch.setattr(kernel, "SPLIT_ROWS", 1)


def inputs(
    lengths, *, seeds=3, heads=2, kv_heads=2, width=4, value_width=None, tail=0, dtype=torch.float32
):
    q = torch.randn(seeds, heads, width, dtype=dtype)
    k, v = (
        torch.randn(sum(lengths) + tail, kv_heads, columns, dtype=dtype)
        for columns in (width, value_width or width)
    )
    return (*(x.requires_grad_() for x in (q, k, v)), Layout.from_lengths(lengths))


def oracle(seeds, k, v, layout, *, activation="softmax", scale=None):
    """One sequence and head after the other."""
    scale = seeds.shape[2] ** -0.5 if scale is None else scale
    heads, groups = seeds.shape[1], k.shape[1]
    names = (activation,) * heads if isinstance(activation, str) else activation
    lengths = layout.lengths.tolist()
    outs = [seeds.new_zeros(0, seeds.shape[0], heads, v.shape[2])]
    for k_i, v_i in zip(
        k[: sum(lengths)].split(lengths), v[: sum(lengths)].split(lengths), strict=True
    ):
        by_head = []
        for h, name in enumerate(names):
            g = h // (heads // groups)
            score = seeds[:, h] @ k_i[:, g].T * scale
            weight = score.softmax(-1) if name == "softmax" else PLAIN[name](score)
            by_head.append(weight @ v_i[:, g])
        outs.append(torch.stack(by_head, dim=1)[None])
    return torch.cat(outs) + (seeds.sum() + k.sum() + v.sum()) * 0


def variant(fn=pooled_attention, **options):
    return lambda seeds, k, v, layout: fn(seeds, k, v, layout, **options)


KINDS = ["softmax", "silu", ("gelu", "relu")]


@pytest.mark.parametrize("activation", KINDS)
def test_reference_gradients(activation):
    check_reference_gradients(
        variant(activation=activation),
        inputs((2, 0, 3), seeds=2, heads=2, kv_heads=1, width=2),
        reference=variant(oracle, activation=activation),
    )


@pytest.mark.parametrize("activations", ["softmax", "silu,gelu,relu,identity"])
def test_registration(activations):
    q, k, v, layout = inputs((3, 0, 6), heads=4)
    size = {
        "batch": 3,
        "seeds": 3,
        "k_tokens": 9,
        "heads": 4,
        "kv_heads": 2,
        "head_width": 4,
        "value_width": 4,
        "element_bytes": 4,
    }
    rest = (layout.offsets_O, layout.lengths, activations, 0.5, False, 9, "reference")
    check_registration(
        torch.ops.gem_attention.pooled_attention,
        (q, k, v, *rest),
        cost=pooled_attention_cost(**size),
        backward_cost=pooled_attention_backward_cost(**size),
    )
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = torch.randn(3, 3, 4, 4), torch.empty(0, 3, 4)
    check_registration(
        torch.ops.gem_attention.pooled_attention_backward,
        (torch.randn_like(out), q, k, v, out, lse, *rest),
        cost=pooled_attention_backward_cost(**size),
    )


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_compiles_whole(activation, impl):
    check_compiles_whole(
        variant(activation=activation, impl=impl),
        [inputs((3, 0, 5)), inputs((2, 7, 2)), inputs((9, 4, 2, 3))],
    )


def with_impl(**options):
    """The operator as the kernel checks call it, with ``impl`` of theirs."""

    def run(seeds, k, v, layout, *, impl):
        return pooled_attention(seeds, k, v, layout, impl=impl, **options)

    return run


# Chunks of 64 keys: one, several, a last one of one key; grouped heads; a tail.
@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("activation", "kv_heads"),
    [("softmax", 1), ("silu", 1), (("gelu", "relu"), 2), (("gelu", "relu"), 1)],
)
def test_interpreted_kernel(activation, kv_heads, short_chunks):
    check_interpreted_kernel(
        with_impl(activation=activation),
        partial(oracle, activation=activation),
        inputs((70, 0, 129, 5, 1), seeds=9, kv_heads=kv_heads, width=24, value_width=20, tail=40),
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("seeds", "heads", "kv_heads", "case"),
    POOLED_CASES,
    ids=[f"{seeds}-{case.id}" for seeds, _, _, case in POOLED_CASES],
)
def test_kernel_on_gpu(seeds, heads, kv_heads, case):
    widths = (case.width, case.value_width)
    for activation in ("softmax", "fast_gelu"):
        check_kernel_on_gpu(
            with_impl(activation=activation),
            variant(activation=activation, impl="reference"),
            gpu_inputs((300, 129, 0, 37, 1, 2513), seeds, widths, heads, kv_heads),
            dtypes=[getattr(torch, name) for name in case.dtypes],
        )


def gpu_inputs(lengths, seeds, widths, heads=2, kv_heads=2, tail=3):
    """Values of length about 1, so that what cancels is no larger than the gradient."""
    options = {"width": widths[0], "value_width": widths[1], "tail": tail}
    q, k, v, layout = inputs(lengths, seeds=seeds, heads=heads, kv_heads=kv_heads, **options)
    return q, k, (v.detach() / widths[1] ** 0.5).requires_grad_(), layout


@pytest.mark.parametrize("activation", ["softmax", ("gelu", "relu")])
def test_ragged_edges(activation, impl):
    check_ragged_edges(
        variant(activation=activation, impl=impl),
        variant(oracle, activation=activation),
        lambda case: inputs(case.lengths),
        compiled=impl == "reference",  # the graph calls the same operator
    )


@pytest.mark.parametrize("activation", KINDS)
def test_alone_equals_in_batch(activation, impl):
    lengths = (3, 0, 40, 1, 16)
    seeds, k, v, _ = inputs(lengths)

    def make(picked):
        tokens = (take_sequences(x, lengths, picked) for x in (k, v))
        return (seeds, *tokens, Layout.from_lengths([lengths[i] for i in picked]))

    check_alone_equals_in_batch(
        variant(activation=activation, impl=impl),
        make,
        lengths,
        leaves=[seeds, k, v],
        split="sequences",
    )


def test_refuses(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k, v, layout = inputs((3, 0, 4))
    attend = pooled_attention
    check_refuses(
        [
            (lambda: attend(q[0], k, v, layout), ShapeError, "seeds_PHK must have 3 dims"),
            (lambda: attend(q, k[:6], v, layout), ShapeError, "v_SGV has S=7 but k_SGK has S=6"),
            (
                lambda: attend(q, k, v, Layout.from_lengths([8])),
                ShapeError,
                "k_layout.lengths must sum to at most the 7 tokens of k_SGK; got 8",
            ),
            (
                lambda: attend(q, k, v, layout, activation=("softmax", "gelu")),
                UnsupportedError,
                "activation must be one of .* got 'softmax'",
            ),
            (
                lambda: attend(q, k, v, layout, activation=("gelu",)),
                ShapeError,
                "activation must name one activation for each of 2 heads",
            ),
            (lambda: attend(q, k.half(), v, layout), DtypeError, "k_SGK must be torch.float32"),
            (lambda: attend(q, k, v, layout.to("meta")), DeviceError, "k_layout.offsets_O must be"),
            (
                lambda: attend(q, k, v, layout, impl="triton"),
                UnsupportedError,
                'pooled_attention: impl="triton" .* use impl="reference"',
            ),
            (
                lambda: attend(*(x.double() for x in (q, k, v)), layout, impl="triton"),
                UnsupportedError,
                "pooled_attention: .* widths of at most 256; got .* use impl=",
            ),
            (
                lambda: torch.ops.gem_attention.pooled_attention(
                    *(q, k, v, layout.offsets_O, None, "softmax", 0.5, False, 0, "reference")
                ),
                UnsupportedError,
                "pooled_attention: lengths must be in host memory",
            ),
        ]
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_descriptors_reach_what_pointers_reach(activation, short_chunks, monkeypatch):
    # Neither outside a sequence nor outside a chunk, tails and rows behind the last offset too.
    from gem_attention.kernels.pooled_attention import kernel

    args = inputs((70, 0, 129, 5, 1), seeds=9, kv_heads=1, width=16, tail=40)
    attend = variant(activation=activation, impl="triton")
    by_pointers = run_with_gradients(attend, fresh(args))
    monkeypatch.setattr(kernel, "describes", lambda *_: True)
    by_descriptors = run_with_gradients(attend, fresh(args))
    for a, b in zip(
        by_pointers.outputs + by_pointers.gradients,
        by_descriptors.outputs + by_descriptors.gradients,
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.interpreter
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_more_seeds_than_a_program_holds(activation, short_chunks):
    check_interpreted_kernel(
        with_impl(activation=activation),
        partial(oracle, activation=activation),
        inputs((70, 0, 33), seeds=70, kv_heads=1, width=16),
    )


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_cases_equal_the_oracle(case):
    args = inputs(case.keys, heads=case.heads, kv_heads=case.kv_heads, width=case.head_width)
    for activation in ("softmax", "gelu"):
        check_runs_equal(
            run_with_gradients(variant(activation=activation), fresh(args)),
            run_with_gradients(variant(oracle, activation=activation), fresh(args)),
        )


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_empty_sequence_gives_zero_and_no_gradient(activation, impl):
    seeds, k, v, layout = inputs((0, 3, 0))
    out = pooled_attention(seeds, k, v, layout, activation=activation, impl=impl)
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    upstream = torch.randn_like(out)
    upstream[[0, 2]] = torch.nan
    out.backward(upstream)
    assert all(torch.isfinite(x.grad).all() for x in (seeds, k, v))


def test_seeds_are_queries_repeated_for_every_sequence():
    seeds, k, v, layout = inputs((4, 0, 70), seeds=5, dtype=torch.float64)
    out = pooled_attention(seeds, k, v, layout)
    repeated = seeds.repeat(3, 1, 1)
    same = jagged_flash_attention(repeated, k, v, Layout.constant(3, 5), layout).view_as(out)
    check_equal_up_to_rounding(out.detach(), same.detach())
    upstream = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, (seeds, k, v), upstream),
        torch.autograd.grad(same, (seeds, k, v), upstream),
        strict=True,
    ):
        check_equal_up_to_rounding(a, b, noise_scale=4.0)


def test_many_seeds_are_cut_and_still_right(monkeypatch):
    from gem_attention.chunked import plan

    monkeypatch.setattr(plan, "_CPU_BUDGET", 512)
    args = inputs((30, 0, 50), seeds=41, dtype=torch.float64)
    check_runs_equal(
        run_with_gradients(variant(), fresh(args)),
        run_with_gradients(variant(oracle), fresh(args)),
    )


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_tokens_behind_the_last_sequence_are_not_read(activation, impl):
    seeds, k, v, _ = inputs((7, 3))
    with torch.no_grad():
        k[7:], v[7:] = torch.nan, torch.nan
    layout = Layout.from_lengths([3, 4])
    out = pooled_attention(seeds, k, v, layout, activation=activation, impl=impl)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(seeds.grad).all()
    assert torch.equal(k.grad[7:], torch.zeros(3, 2, 4))
    assert torch.equal(v.grad[7:], torch.zeros(3, 2, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_in_the_budget(dtype):
    low = fresh(inputs((33, 5, 0, 12), heads=4, kv_heads=2, width=16), dtype=dtype)
    check_run_budget(
        run_with_gradients(variant(), fresh(low)),
        run_with_gradients(variant(oracle), fresh(low)),
        run_with_gradients(variant(oracle), fresh(low, dtype=torch.float64)),
    )


def test_same_bits_in_ten_runs():
    args = inputs((90, 7, 200, 0, 31), heads=4, kv_heads=2, width=16)
    first = run_with_gradients(variant(), fresh(args))
    for _ in range(10):
        again = run_with_gradients(variant(), fresh(args))
        for a, b in zip(
            first.outputs + first.gradients, again.outputs + again.gradients, strict=True
        ):
            assert torch.equal(a, b)


def test_strided_operands(impl):
    layout = Layout.from_lengths([5, 0, 7])
    fused = torch.randn(12, 2, 2, 4, requires_grad=True)
    seeds = torch.randn(2, 3, 4).transpose(0, 1).requires_grad_()
    out = pooled_attention(seeds, *fused.unbind(1), layout, impl=impl)
    plain = [x.detach().contiguous().requires_grad_() for x in (seeds, *fused.unbind(1))]
    expected = pooled_attention(*plain, layout, impl=impl)
    assert torch.equal(out, expected)
    upstream = torch.randn(4, 2, 3, 3).permute(2, 3, 1, 0)
    got = torch.autograd.grad(out, (seeds, fused), upstream)
    wanted = torch.autograd.grad(expected, plain, upstream)
    check_equal_up_to_rounding(got[0], wanted[0])
    check_equal_up_to_rounding(got[1], torch.stack(wanted[1:], dim=1))


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
def test_any_scale(scale, impl):
    for activation in ("softmax", "relu"):
        args = inputs((20, 3))
        check_runs_equal(
            run_with_gradients(variant(activation=activation, scale=scale, impl=impl), fresh(args)),
            run_with_gradients(partial(oracle, activation=activation, scale=scale), fresh(args)),
        )


def test_int32_offsets_are_accepted(impl):
    seeds, k, v, layout = inputs((3, 4))
    narrow = Layout.from_lengths([3, 4], dtype=torch.int32)
    assert torch.equal(
        pooled_attention(seeds, k, v, narrow, impl=impl),
        pooled_attention(seeds, k, v, layout, impl=impl),
    )


def test_nothing_to_pool(impl):
    # No seeds, no sequences, no keys.
    for seeds, lengths in ((0, (3, 2)), (3, ()), (3, (0, 0))):
        args = inputs(lengths, seeds=seeds)
        out = pooled_attention(*args, impl=impl)
        out.sum().backward()
        assert torch.equal(out, torch.zeros(len(lengths), seeds, 2, 4))
        assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in args[:3])


def test_a_poisoned_sequence_leaves_the_others_alone(impl):
    seeds, k, v, layout = inputs((5, 9, 0, 8))
    with torch.no_grad():
        k[5:14], v[5:14] = torch.nan, torch.nan
    for activation in ("softmax", "silu"):
        out = pooled_attention(seeds, k, v, layout, activation=activation, impl=impl)
        upstream = torch.randn_like(out)
        _, *gradients = torch.autograd.grad(out, (seeds, k, v), upstream)
        assert torch.isfinite(out[[0, 2, 3]]).all()
        for x in gradients:
            assert torch.isfinite(x[:5]).all()
            assert torch.isfinite(x[14:]).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("level", [-12.0, -50.0, -100.0])
def test_low_scores_with_lengths_that_no_tile_divides(level, short_chunks):
    # A row or key beyond the end scores 0, far above every true score.
    check_low_scores(low_scores((97, 33, 1), level), "triton")


def low_scores(lengths, level, *, seeds=5, width=16):
    """Inputs whose scores all lie within a few units of ``level``."""
    q, k, v, layout = (
        x.detach() if torch.is_tensor(x) else x for x in inputs(lengths, seeds=seeds, width=width)
    )
    q, k, v = q / width**0.5, k.clone(), v / width**0.5
    q[..., -1], k[..., -1] = 1.0, level  # last, so that only one sum is large
    return (*(x.requires_grad_() for x in (q, k, v)), layout)


def check_low_scores(args, impl):
    exact = run_with_gradients(partial(oracle, scale=1.0), fresh(args, dtype=torch.float64))
    low = run_with_gradients(partial(from_lse, scale=1.0), fresh(args))
    actual = run_with_gradients(variant(scale=1.0, impl=impl), fresh(args))
    check_run_budget(actual, low, exact, what=f"{args[0].dtype}: ")


def from_lse(seeds, k, v, layout, *, scale):
    """The oracle, rounded as whoever keeps the logsumexp alone."""
    out = []
    for k_i, v_i in zip(*(x.split(layout.lengths.tolist()) for x in (k, v)), strict=True):
        score = torch.einsum("phk,shk->phs", seeds, k_i) * scale
        p = (score - score.logsumexp(-1, keepdim=True)).exp()
        out.append(torch.einsum("phs,shv->phv", p, v_i))
    return torch.stack(out)


@hypothesis.given(
    lengths=strategies.lists(strategies.integers(0, 90), max_size=3),
    tail=strategies.integers(0, 40),
    seeds=strategies.integers(1, 40),
    grouped=strategies.booleans(),
    activation=strategies.sampled_from(["softmax", "silu"]),
)
@hypothesis.settings(
    max_examples=6, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@pytest.mark.interpreter
def test_kernel_equals_the_reference_on_random_lengths(
    lengths, tail, seeds, grouped, activation, short_chunks
):
    args = inputs(lengths, seeds=seeds, kv_heads=1 if grouped else 2, width=16, tail=tail)
    check_runs_equal(
        run_with_gradients(variant(activation=activation, impl="triton"), fresh(args)),
        run_with_gradients(variant(activation=activation, impl="reference"), fresh(args)),
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("wrong", [[0, 10, 60], [-9, 10, 32]])
def test_offsets_beyond_the_tokens_read_nothing_outside(wrong):
    # What a caller with device offsets alone may hand over; the rows that exist stay right.
    base = [torch.full((64, 2, 16), torch.nan) for _ in range(2)]
    k, v = (x[16:48] for x in base)
    for x in (k, v):
        x.copy_(torch.randn_like(x))
    seeds = torch.randn(3, 2, 16)
    out, _ = torch.ops.gem_attention.pooled_attention(
        *(seeds, k, v, torch.tensor(wrong), None, "softmax", 0.25, False, 0, "triton")
    )
    right = pooled_attention(seeds, k, v, Layout.from_lengths([10, 22]), impl="reference")
    check_equal_up_to_rounding(out, right)


def test_the_log_says_once_which_kernels_ran(caplog, monkeypatch):
    monkeypatch.setattr(op, "_announced", set())
    seeds, k, v, _ = inputs((3, 4), seeds=100)
    with caplog.at_level("INFO"):
        for _ in range(2):
            op._forward_kernels(seeds, k, v, "softmax", 2)
            op._backward_kernels(seeds, k, v, "softmax")
    assert [r.message for r in caplog.records] == [
        "pooled_attention forward: kernel runs on cpu for torch.float32, P=100, K=4, V=4",
        "pooled_attention backward: repeated runs on cpu for torch.float32, P=100, K=4, V=4",
    ]


@pytest.mark.gpu
def test_reference_on_gpu_equals_cpu_and_waits_for_nothing():
    args = inputs((90, 7, 200, 0, 31), seeds=5, heads=4, kv_heads=2, width=16)
    attend = variant(impl="reference")
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


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_varlen_call_is_the_operator(activation, impl):
    lengths = (7, 0, 12)
    seeds, k, v, layout = inputs(lengths, tail=3)
    cu = layout.offsets_O.to(torch.int32)

    def by_offsets(seeds, k, v, layout):
        return pooled_attention_varlen_func(
            seeds, k, v, cu_seqlens_k=cu, activation=activation, softmax_scale=0.7, impl=impl
        )

    check_runs_equal(
        run_with_gradients(by_offsets, fresh((seeds, k, v, layout))),
        run_with_gradients(
            partial(oracle, activation=activation, scale=0.7), fresh((seeds, k, v, layout))
        ),
    )


def test_varlen_call_refuses():
    seeds, k, v, layout = inputs((3, 4))
    pool = partial(pooled_attention_varlen_func, seeds, k, v)
    check_refuses(
        [
            (
                lambda: pool(cu_seqlens_k=[0, 3, 7]),
                DtypeError,
                "pooled_attention_varlen_func: cu_seqlens_k must be a tensor",
            ),
            (
                lambda: pool(cu_seqlens_k=layout.offsets_O.to("meta")),
                DeviceError,
                "cu_seqlens_k must be on cpu like k",
            ),
            (
                lambda: pool(cu_seqlens_k=torch.tensor([0, 9])),
                ShapeError,
                "cu_seqlens_k.lengths must sum to at most the 7 tokens of k",
            ),
            (
                lambda: pool(cu_seqlens_k=layout.offsets_O, activation="tanh"),
                UnsupportedError,
                "activation must be one of",
            ),
        ]
    )

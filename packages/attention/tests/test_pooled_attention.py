import pytest
import torch
import torch.nn.functional as F

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

SMALL = [case for case in CASES if case.device == "cpu" and sum(case.keys) < 1000]
PLAIN = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu, "identity": lambda x: x}


def inputs(lengths, *, seeds=3, heads=2, kv_heads=2, width=4, dtype=torch.float32):
    q = torch.randn(seeds, heads, width, dtype=dtype)
    k, v = (torch.randn(sum(lengths), kv_heads, width, dtype=dtype) for _ in range(2))
    return (*(x.requires_grad_() for x in (q, k, v)), Layout.from_lengths(lengths))


def oracle(seeds, k, v, layout, *, activation="softmax"):
    """One sequence and head after the other."""
    heads, groups = seeds.shape[1], k.shape[1]
    names = (activation,) * heads if isinstance(activation, str) else activation
    lengths = layout.lengths.tolist()
    outs = [seeds.new_zeros(0, seeds.shape[0], heads, v.shape[2])]
    for k_i, v_i in zip(k.split(lengths), v.split(lengths), strict=True):
        by_head = []
        for h, name in enumerate(names):
            g = h // (heads // groups)
            score = seeds[:, h] @ k_i[:, g].T / seeds.shape[2] ** 0.5
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
    rest = (layout.offsets_O, layout.lengths, activations, 0.5, 9, "reference")
    check_registration(
        torch.ops.gem_attention.pooled_attention,
        (q, k, v, *rest),
        cost=pooled_attention_cost(**size),
        backward_cost=pooled_attention_backward_cost(**size),
    )
    q, k, v = (x.detach() for x in (q, k, v))
    out = torch.randn(3, 3, 4, 4)
    check_registration(
        torch.ops.gem_attention.pooled_attention_backward,
        (torch.randn_like(out), q, k, v, out, *rest),
        cost=pooled_attention_backward_cost(**size),
    )


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_compiles_whole(activation):
    check_compiles_whole(
        variant(activation=activation), [inputs((3, 0, 5)), inputs((2, 7, 2)), inputs((9, 4, 2, 3))]
    )


@pytest.mark.parametrize("activation", ["softmax", ("gelu", "relu")])
def test_ragged_edges(activation):
    check_ragged_edges(
        variant(activation=activation),
        variant(oracle, activation=activation),
        lambda case: inputs(case.lengths),
    )


@pytest.mark.parametrize("activation", KINDS)
def test_alone_equals_in_batch(activation):
    lengths = (3, 0, 40, 1, 16)
    seeds, k, v, _ = inputs(lengths)

    def make(picked):
        tokens = (take_sequences(x, lengths, picked) for x in (k, v))
        return (seeds, *tokens, Layout.from_lengths([lengths[i] for i in picked]))

    check_alone_equals_in_batch(
        variant(activation=activation), make, lengths, leaves=[seeds, k, v], split="sequences"
    )


def test_refuses():
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
        ]
    )


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_cases_equal_the_oracle(case):
    args = inputs(case.keys, heads=case.heads, kv_heads=case.kv_heads, width=case.head_width)
    for activation in ("softmax", "gelu"):
        check_runs_equal(
            run_with_gradients(variant(activation=activation), fresh(args)),
            run_with_gradients(variant(oracle, activation=activation), fresh(args)),
        )


def test_empty_sequence_gives_zero_and_no_gradient():
    seeds, k, v, layout = inputs((0, 3, 0))
    out = pooled_attention(seeds, k, v, layout)
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


def test_tokens_behind_the_last_sequence_are_not_read():
    seeds, k, v, _ = inputs((7, 3))
    with torch.no_grad():
        k[7:], v[7:] = torch.nan, torch.nan
    out = pooled_attention(seeds, k, v, Layout.from_lengths([3, 4]))
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


def test_strided_operands():
    layout = Layout.from_lengths([5, 0, 7])
    fused = torch.randn(12, 2, 2, 4, requires_grad=True)
    seeds = torch.randn(2, 3, 4).transpose(0, 1).requires_grad_()
    out = pooled_attention(seeds, *fused.unbind(1), layout)
    plain = [x.detach().contiguous().requires_grad_() for x in (seeds, *fused.unbind(1))]
    expected = pooled_attention(*plain, layout)
    assert torch.equal(out, expected)
    upstream = torch.randn(4, 2, 3, 3).permute(2, 3, 1, 0)
    got = torch.autograd.grad(out, (seeds, fused), upstream)
    wanted = torch.autograd.grad(expected, plain, upstream)
    check_equal_up_to_rounding(got[0], wanted[0])
    check_equal_up_to_rounding(got[1], torch.stack(wanted[1:], dim=1))


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

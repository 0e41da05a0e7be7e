import random
import sys
from functools import partial
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies

from gem_attention import softmax_dispatch
from gem_attention.choosing import readable_rows
from gem_attention.kernels.jagged_flash_attention.cases import CASES
from gem_attention.kernels.jagged_flash_attention.cost import (
    jagged_flash_attention_backward_cost,
    jagged_flash_attention_cost,
)
from gem_attention.ops import jagged_flash_attention
from gem_attention.patterns import causal_mask, visible_pairs, window_mask
from gem_jagged.batch import Layout
from gem_opkit import tuning
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

from support_matrix import INTERPRETED_WIDTHS, KERNEL_WINDOWS, PATTERN_CASES, WIDTH_CASES

SMALL = [case for case in CASES if case.device == "cpu" and sum(case.q_lengths) < 1000]


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpreter)])
def impl(request):
    return request.param


def inputs(q_lengths, k_lengths=None, *, heads=2, kv_heads=2, width=4, dtype=torch.float32):
    k_lengths = q_lengths if k_lengths is None else k_lengths
    q = torch.randn(sum(q_lengths), heads, width, dtype=dtype)
    k, v = (torch.randn(sum(k_lengths), kv_heads, width, dtype=dtype) for _ in range(2))
    layouts = (Layout.from_lengths(q_lengths), Layout.from_lengths(k_lengths))
    return (*(x.requires_grad_() for x in (q, k, v)), *layouts)


def oracle(q, k, v, q_layout, k_layout, *, window=(None, None), scale=None, from_lse=False):
    """One sequence and head after the other, with the mask that defines the window.

    ``from_lse`` rounds as whoever keeps the logsumexp alone: its size times eps is the error of
    every probability.
    """
    heads, groups = q.shape[1], k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    q_lengths, k_lengths = q_layout.lengths.tolist(), k_layout.lengths.tolist()
    outs, lses = [], []
    sequences = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    for q_i, k_i, v_i in sequences:
        visible = window_mask(len(q_i), len(k_i), *window).to(q.device)
        rows = visible.any(1)
        out = q.new_zeros(len(q_i), heads, v.shape[2])
        lse = q.new_full((len(q_i), heads), -torch.inf)
        for h in range(heads) if rows.any() else ():
            g = h // (heads // groups)
            score = (q_i[rows, h] @ k_i[:, g].T * scale).masked_fill(~visible[rows], -torch.inf)
            total = score.logsumexp(-1)
            p = (score - total[:, None]).exp() if from_lse else score.softmax(-1)
            here = (rows, torch.tensor(h, device=q.device))
            out = out.index_put(here, p @ v_i[:, g])
            lse = lse.index_put(here, total.to(lse.dtype))
        outs.append(out)
        lses.append(lse)
    anchor = (q.sum() + k.sum() + v.sum()) * 0
    return torch.cat([q.new_zeros(0, heads, v.shape[2]), *outs]) + anchor, torch.cat(
        [q.new_zeros(0, heads), *lses]
    )


def variant(**options):
    def run(q, k, v, q_layout, k_layout):
        return jagged_flash_attention(q, k, v, q_layout, k_layout, return_lse=True, **options)

    return run


WINDOWS = [(None, None), (None, 0), (1, 2), (2, None), (0, 0)]


@pytest.mark.parametrize("window", WINDOWS)
def test_reference_gradients(window):
    # Only rows that see a key: the numeric derivative of -inf is not a number.
    args = inputs((3, 0, 2), (2, 1, 3), heads=2, kv_heads=1, width=2)
    masks = [window_mask(q, k, *window) for q, k in ((3, 2), (0, 1), (2, 3))]
    rows = torch.cat([mask.any(1) for mask in masks])

    def seen(fn):
        def run(*args):
            out, lse = fn(*args)
            return out, lse[rows]

        return run

    check_reference_gradients(
        seen(variant(window=window)),
        args,
        reference=seen(lambda *args: oracle(*args, window=window)),
    )


@pytest.mark.parametrize("return_lse", [True, False])
def test_registration(return_lse):
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
    places = (q_layout.offsets_O, k_layout.offsets_O, q_layout.lengths, k_layout.lengths, 1, 2, 0.5)
    check_registration(
        torch.ops.gem_attention.jagged_flash_attention,
        (q, k, v, *places, return_lse, False, pairs, "reference"),
        cost=jagged_flash_attention_cost(**size),
        backward_cost=jagged_flash_attention_backward_cost(**size),
    )
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = torch.ops.gem_attention.jagged_flash_attention(
        q, k, v, *places, return_lse, False, pairs, "reference"
    )
    check_registration(
        torch.ops.gem_attention.jagged_flash_attention_backward,
        (out, lse if return_lse else None, q, k, v, out, lse, *places, True, pairs, "reference"),
        cost=jagged_flash_attention_backward_cost(**size),
    )


def counted(**options):
    """The operator with its visible pairs as an argument, as a graph needs them."""

    def run(q, k, v, q_layout, k_layout, pairs):
        return jagged_flash_attention(
            q, k, v, q_layout, k_layout, visible_pairs=pairs, return_lse=True, **options
        )

    return run


def counted_inputs(q_lengths, k_lengths=None, *, window=(None, None), **options):
    args = inputs(q_lengths, k_lengths, **options)
    return (*args, visible_pairs(args[3].lengths, args[4].lengths, *window))


@pytest.mark.parametrize(
    ("window", "impl"),
    [
        ((None, None), "reference"),
        ((1, 2), "reference"),
        pytest.param((1, 2), "triton", marks=pytest.mark.interpreter),
    ],
)
def test_compiles_whole(window, impl):
    check_compiles_whole(
        counted(window=window, impl=impl),
        [
            counted_inputs((3, 0, 5), (2, 4, 3), window=window),
            counted_inputs((2, 7, 2), (9, 3, 4), window=window),
            counted_inputs((9, 4, 2, 3), (2, 2, 2, 8), window=window),
        ],
    )


# Grouped heads, a width that is no power of two, tails of both kinds of tile.
MIXED = ((70, 37, 0, 5, 1), (41, 90, 3, 5, 0))


def with_lse(**options):
    """The operator as the kernel checks call it, with ``impl`` of theirs."""

    def run(q, k, v, q_layout, k_layout, *, impl):
        return jagged_flash_attention(
            q, k, v, q_layout, k_layout, return_lse=True, impl=impl, **options
        )

    return run


@pytest.mark.interpreter
@pytest.mark.parametrize("window", KERNEL_WINDOWS)
def test_interpreted_kernel(window):
    check_interpreted_kernel(
        with_lse(window=window),
        partial(oracle, window=window),
        inputs(*MIXED, heads=2, kv_heads=1, width=24),
    )


@pytest.fixture(params=["plain", "chosen"])
def kernels(request, monkeypatch):
    """The kernels for any GPU, and those that this GPU is given."""
    if request.param == "plain":
        from gem_attention.kernels.jagged_flash_attention import kernel

        monkeypatch.setattr(softmax_dispatch, "_kernels", lambda *_, **__: kernel)


# On the GPU the reference is the operator's own, held to the masks by the tests on the CPU. It too
# forms the difference dP - rowsum(dO · out), whose rounding the autograd of the oracle has not.
HALVES = (torch.bfloat16, torch.float16)
GPU_MIXED = ((300, 129, 0, 37, 1, 513), (257, 300, 3, 64, 0, 513))


def gpu_inputs(q_lengths, k_lengths, *, widths, heads=4, kv_heads=2):
    q, k, _, *layouts = inputs(
        q_lengths, k_lengths, heads=heads, kv_heads=kv_heads, width=widths[0]
    )
    v = torch.randn(sum(k_lengths), kv_heads, widths[1], requires_grad=True)
    return q, k, v, *layouts


@pytest.mark.gpu
@pytest.mark.parametrize("case", PATTERN_CASES, ids=lambda case: case.id)
def test_kernel_on_gpu(case, kernels):
    check_case_on_gpu(case, gpu_inputs(*GPU_MIXED, widths=(case.width, case.value_width)))


def check_case_on_gpu(case, operands):
    check_kernel_on_gpu(
        with_lse(window=case.window),
        variant(window=case.window, impl="reference"),
        operands,
        dtypes=[getattr(torch, name) for name in case.dtypes],
    )


@pytest.mark.parametrize(("window", "mirrored"), [((None, None), False), ((3, 1), True)])
def test_ragged_edges(window, mirrored, impl):
    # Mirrored lengths put empty keys against queries, and more queries than keys.
    def make(case):
        keys = case.lengths[::-1] if mirrored else None
        return counted_inputs(case.lengths, keys, window=window)

    check_ragged_edges(
        counted(window=window, impl=impl),
        lambda *args: oracle(*args[:5], window=window),
        make,
        compiled=impl == "reference",  # the graph calls the same operator
    )


@pytest.mark.parametrize("window", [(None, None), (2, 1), (None, 0)])
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

    check_alone_equals_in_batch(
        variant(window=window, impl=impl), make, q_lengths, leaves=[q, k, v]
    )


def test_refuses(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k, v, layout, k_layout = inputs((3, 0, 4), (2, 2, 6))
    attend = jagged_flash_attention
    check_refuses(
        [
            (lambda: attend(q[0], k, v, layout, k_layout), ShapeError, "q_THK must have 3 dims"),
            (lambda: attend(q, k[..., :3], v, layout, k_layout), ShapeError, "k_SGK has K=3 but"),
            (lambda: attend(q, k, v[:9], layout, k_layout), ShapeError, "v_SGV has S=9 but"),
            (
                lambda: attend(q, k.repeat(1, 2, 1)[:, :3], v.repeat(1, 2, 1)[:, :3], layout),
                ShapeError,
                "G must divide the 2 query heads; got 3",
            ),
            (lambda: attend(q[..., :0], k[..., :0], v, layout), ShapeError, "K must be above 0"),
            (lambda: attend(q[:6], k, v, layout, k_layout), ShapeError, "sum to at most the 6"),
            (lambda: attend(q, k[:9], v[:9], layout, k_layout), ShapeError, "k_layout.lengths"),
            (
                lambda: attend(q, k, v, layout, Layout.from_lengths([2, 2])),
                ShapeError,
                "k_layout must have the 3 sequences of q_layout; got 2",
            ),
            (
                lambda: attend(q, k, v, layout, k_layout, window=(-1, 0)),
                ShapeError,
                "window must .* got left -1; None is",
            ),
            (
                lambda: attend(q, k, v, layout, k_layout, causal=True, window=(2, 1)),
                ShapeError,
                "causal=True; got right 1",
            ),
            (lambda: attend(q.long(), k, v, layout, k_layout), DtypeError, "q_THK must be float32"),
            (lambda: attend(q, k.double(), v, layout, k_layout), DtypeError, "k_SGK must be"),
            (lambda: attend(q, k, v.to("meta"), layout, k_layout), DeviceError, "v_SGV must be on"),
            (
                lambda: attend(q, k, v, layout.to("meta"), k_layout),
                DeviceError,
                "q_layout.offsets_O must be on cpu",
            ),
            (
                lambda: attend(q, k, v, layout, k_layout, impl="triton"),
                UnsupportedError,
                'jagged_flash_attention: impl="triton" .* use impl="reference"',
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
                lambda: torch.ops.gem_attention.jagged_flash_attention(
                    *(q, k, v, layout.offsets_O, k_layout.offsets_O, None, None, None, None),
                    *(0.5, False, False, 0, "reference"),
                ),
                UnsupportedError,
                "lengths must be in host memory",
            ),
            *(
                (lambda w=w: attend(q, k, v, layout, k_layout, window=w), error, message)
                for w, error, message in (
                    (3, ShapeError, "window must be a pair"),
                    ((1.5, 0), DtypeError, "window must have sides .* got left 1.5"),
                    ((0, True), DtypeError, "window must have sides .* got right True"),
                    ((torch.tensor(2), 0), DtypeError, "window must have sides .* got left tensor"),
                )
            ),
            (
                lambda: attend(q, k, v, layout, k_layout, impl="cuda"),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


def test_graph_without_counted_pairs_is_refused():
    q, k, v, layout, _ = inputs((3, 4))
    torch._dynamo.reset()
    whole = torch.compile(jagged_flash_attention, fullgraph=True, backend="eager")
    with pytest.raises((UnsupportedError, torch._dynamo.exc.TorchDynamoException)):
        whole(q, k, v, layout)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_cases_equal_the_masked_oracle(case):
    args = inputs(
        case.q_lengths,
        case.k_lengths,
        heads=case.heads,
        kv_heads=case.kv_heads,
        width=case.head_width,
    )
    actual = run_with_gradients(variant(window=case.window), fresh(args))
    expected = run_with_gradients(lambda *args: oracle(*args, window=case.window), fresh(args))
    check_runs_equal(actual, expected)


def test_history_equals_the_oracle_in_every_pattern():
    # Long enough that sequences are cut into several tasks and chunks.
    lengths, keys = (200, 7, 131, 0, 160, 1), (150, 90, 131, 5, 0, 220)
    for k_lengths in (None, keys):
        args = inputs(lengths, k_lengths, dtype=torch.float64)
        for window in [(None, None), (None, 0), (20, 20), (5, 40), (64, None), (0, 0)]:
            actual = run_with_gradients(variant(window=window), fresh(args))
            expected = run_with_gradients(lambda *a, w=window: oracle(*a, window=w), fresh(args))
            check_runs_equal(actual, expected, what=f"{window}: ")


def test_long_sequence_is_cut_and_still_right(monkeypatch):
    from gem_attention.chunked import plan

    monkeypatch.setattr(plan, "_CPU_BUDGET", 512)
    args = inputs((90, 3, 70), dtype=torch.float64)
    for window in [(None, None), (None, 0), (8, 8)]:
        actual = run_with_gradients(variant(window=window), fresh(args))
        expected = run_with_gradients(lambda *a, w=window: oracle(*a, window=w), fresh(args))
        check_runs_equal(actual, expected, what=f"{window}: ")


def test_window_of_the_whole_past_is_causal(impl):
    q, k, v, layout, _ = (x.detach() if torch.is_tensor(x) else x for x in inputs((5, 9)))
    past = jagged_flash_attention(q, k, v, layout, window=(8, 0), impl=impl)
    causal = jagged_flash_attention(q, k, v, layout, causal=True, impl=impl)
    check_equal_up_to_rounding(past, causal)
    check_equal_up_to_rounding(
        jagged_flash_attention(q, k, v, layout, causal=True, window=(2, None), impl=impl),
        jagged_flash_attention(q, k, v, layout, window=(2, 0), impl=impl),
    )


@pytest.mark.parametrize(
    ("q_tokens", "k_tokens", "window"),
    [
        (6, 6, (3, 0)),
        (6, 6, (3, 3)),
        (6, 6, (0, 3)),
        (4, 7, (1, 1)),
        (7, 4, (1, 2)),
        (5, 3, (None, 0)),
    ],
)
def test_the_window_shows_what_its_mask_says(q_tokens, k_tokens, window, impl):
    # With the identity as values, a row of the output is that query's probabilities.
    q, k, _, layout, k_layout = inputs((q_tokens,), (k_tokens,), width=8)
    v = torch.eye(k_tokens)[:, None, :].expand(-1, 2, -1)
    out = jagged_flash_attention(q, k, v, layout, k_layout, window=window, impl=impl)
    mask = window_mask(q_tokens, k_tokens, *window)
    assert torch.equal(out > 0, mask[:, None, :].expand(-1, 2, -1))


@pytest.mark.parametrize("huge", [2**31 - 1, 2**40, 2**63 - 1])
def test_a_side_beyond_int32_is_an_open_side(huge, impl):
    # What a caller without limits writes (sys.maxsize) must not wrap to a window of nothing.
    inputs_ = inputs((5, 4), (7, 2), heads=1, kv_heads=1)
    for window, open_window in [
        ((huge, 0), (None, 0)),
        ((0, huge), (0, None)),
        ((huge, 1), (None, 1)),
        ((huge, huge), (None, None)),
    ]:
        check_runs_equal(
            run_with_gradients(variant(window=window, impl=impl), fresh(inputs_)),
            run_with_gradients(variant(window=open_window, impl=impl), fresh(inputs_)),
            what=f"{window}: ",
        )


@pytest.mark.parametrize("window", [(None, 0), (1, 0)])
def test_a_hidden_key_never_wins_over_a_very_low_score(window):
    # The first key of each sequence scores near the lowest float32, the hidden ones 0.
    lengths = (3, 5, 4)
    q, k, v, layout, _ = inputs(lengths)
    with torch.no_grad():
        q.fill_(1.0)
        k.fill_(0.0)
        k[[0, 3, 8]] = -3e38 / 4
    attend = variant(window=window, scale=1.0)
    run = run_with_gradients(attend, (q, k, v, layout, layout))
    doubles = fresh((q, k, v, layout, layout), dtype=torch.float64)
    exact = run_with_gradients(partial(oracle, window=window, scale=1.0), doubles)
    out, lse = run.outputs
    assert torch.equal(out[[0, 3, 8]], v.detach()[[0, 3, 8]])
    torch.testing.assert_close(out, exact.outputs[0].float())
    torch.testing.assert_close(lse, exact.outputs[1].float())
    torch.testing.assert_close(run.gradients[2], exact.gradients[2].float())


def test_keys_of_minus_infinity_are_not_replaced_by_hidden_ones():
    q, k, v, layout, _ = inputs((3,))
    with torch.no_grad():
        q.fill_(1.0)
        k[0] = -torch.inf
    out = jagged_flash_attention(q, k, v, layout, causal=True)
    assert out[0].isnan().all()  # 0/0: the first query sees nothing but that key
    assert torch.equal(out[1], v[1])


def test_without_a_window_every_probability_is_right(impl):
    q, k, _, layout, _ = inputs((7,), heads=1, kv_heads=1)
    v = torch.eye(7)[:, None, :]
    out = jagged_flash_attention(q, k, v, layout, causal=False, impl=impl)
    expected = (q[:, 0] @ k[:, 0].T / 2).softmax(-1)
    check_equal_up_to_rounding(out[:, 0].detach(), expected.detach())


@pytest.mark.parametrize("width", INTERPRETED_WIDTHS)
def test_every_head_width(width, impl):
    # Also above the longest sequence, which is what a backward may take for the other.
    args = inputs((40, 3), width=width)
    check_runs_equal(
        run_with_gradients(variant(impl=impl), fresh(args)), run_with_gradients(oracle, fresh(args))
    )


@pytest.mark.parametrize(("width", "value_width"), [(4, 7), (48, 16), (16, 80)])
def test_values_may_have_another_width(width, value_width, impl):
    q, k, _, layout, _ = inputs((4, 6), width=width)
    v = torch.randn(10, 2, value_width, requires_grad=True)
    args = (q, k, v, layout, layout)
    check_runs_equal(
        run_with_gradients(variant(impl=impl), fresh(args)), run_with_gradients(oracle, fresh(args))
    )


def test_empty_sequence_is_finite_and_has_no_rows(impl):
    q, k, v, layout, _ = inputs((0, 3))
    out = jagged_flash_attention(q, k, v, layout, impl=impl)
    out.sum().backward()
    assert out.shape[0] == 3
    assert all(torch.isfinite(x).all() for x in (out, q.grad, k.grad, v.grad))


def test_query_that_sees_no_key_gives_zero_and_no_gradient(impl):
    # Five queries, three keys, causal: the first two queries stand before the first key.
    q, k, v, layout, k_layout = inputs((5,), (3,))
    out, lse = jagged_flash_attention(
        q, k, v, layout, k_layout, causal=True, return_lse=True, impl=impl
    )
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.equal(lse[:2], torch.full_like(lse[:2], -torch.inf))
    assert torch.isfinite(lse[2:]).all()
    upstream = torch.randn_like(out), torch.randn_like(lse)
    torch.autograd.backward((out, lse), upstream)
    assert torch.equal(q.grad[:2], torch.zeros_like(q.grad[:2]))
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    # Whatever arrives there changes nothing.
    before = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    out, lse = jagged_flash_attention(
        q, k, v, layout, k_layout, causal=True, return_lse=True, impl=impl
    )
    upstream[0][:2], upstream[1][:2] = torch.nan, torch.nan
    torch.autograd.backward((out, lse), upstream)
    assert all(torch.equal(x.grad, b) for x, b in zip((q, k, v), before, strict=True))


def test_no_keys_at_all_give_lse_of_minus_infinity(impl):
    q, k, v, layout, k_layout = inputs((2, 1), (0, 0))
    out, lse = jagged_flash_attention(q, k, v, layout, k_layout, return_lse=True, impl=impl)
    assert torch.equal(lse, torch.full((3, 2), -torch.inf))
    assert torch.equal(out, torch.zeros_like(out))
    (out.sum() + lse.clamp(min=0).sum()).backward()
    assert torch.equal(q.grad, torch.zeros_like(q))
    assert k.grad.shape == (0, 2, 4)


def test_tokens_behind_the_last_sequence_get_nothing(impl):
    # A batch padded to 10 tokens, of which 7 belong to sequences; NaN arrives for the others.
    q, k, v = (torch.randn(10, 2, 4, requires_grad=True) for _ in range(3))
    layout = Layout.from_lengths([3, 4])
    out, lse = jagged_flash_attention(q, k, v, layout, return_lse=True, impl=impl)
    assert torch.equal(out[7:], torch.zeros(3, 2, 4))
    assert torch.equal(lse[7:], torch.full((3, 2), -torch.inf))
    upstream = torch.randn_like(out)
    upstream[7:] = torch.nan
    out.backward(upstream)
    for x in (q, k, v):
        assert torch.equal(x.grad[7:], torch.zeros(3, 2, 4))
        assert torch.isfinite(x.grad).all()


def test_a_poisoned_sequence_leaves_the_others_alone(impl):
    lengths = (5, 9, 0, 8)
    q, k, v, layout, _ = inputs(lengths)
    with torch.no_grad():
        for x in (q, k, v):
            x[5:14] = torch.nan
    for window in [(None, None), (2, 2)]:
        out = jagged_flash_attention(q, k, v, layout, window=window, impl=impl)
        gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        for x in (out, *gradients):
            assert torch.isfinite(x[:5]).all()
            assert torch.isfinite(x[14:]).all()


def test_empty_batch_after_a_warm_call(impl):
    q, k, v, layout, _ = inputs((3, 4))
    jagged_flash_attention(q, k, v, layout, impl=impl)
    for lengths in ([], [0, 0, 0]):
        empty = Layout.from_lengths(lengths)
        leaves = [x[:0].detach().requires_grad_() for x in (q, k, v)]
        out, lse = jagged_flash_attention(*leaves, empty, return_lse=True, impl=impl)
        (out.sum() + lse.sum()).backward()
        assert out.shape == (0, 2, 4)
        assert lse.shape == (0, 2)
        assert all(leaf.grad.shape == (0, 2, 4) for leaf in leaves)


def test_large_scores_do_not_overflow(impl):
    q, k, v, layout, _ = inputs((4, 6))
    for size in (1e2, 1e4, 1e9):
        out, lse = jagged_flash_attention(q * size, k * size, v, layout, return_lse=True, impl=impl)
        _, exact = oracle(q.double() * size, k.double() * size, v.double(), layout, layout)
        check_equal_up_to_rounding(lse.detach(), exact.detach().float())
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_far_from_zero_keep_their_precision(sign, impl):
    # All true scores at -200 or 200: a padded key counted with score 0 would drown or vanish.
    lengths = (3, 9)
    q = torch.ones(12, 1, 4) * 10
    k = torch.full((12, 1, 4), sign * 10) + torch.randn(12, 1, 4) / 100
    v, layout = torch.randn(12, 1, 4), Layout.from_lengths(lengths)
    out, lse = jagged_flash_attention(q, k, v, layout, return_lse=True, impl=impl)
    exact, exact_lse = oracle(q.double(), k.double(), v.double(), layout, layout)
    assert (out.double() - exact).abs().max() < 1e-3
    assert (lse.double() - exact_lse).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_in_the_budget(dtype):
    args = inputs((33, 5, 0, 12), (20, 9, 3, 12), heads=4, kv_heads=2, width=16)
    low = fresh(args, dtype=dtype)

    def plain(*args):
        out, lse = oracle(*args, window=(7, 3))
        return out, lse.to(torch.promote_types(lse.dtype, torch.float32))

    check_run_budget(
        run_with_gradients(variant(window=(7, 3)), fresh(low)),
        run_with_gradients(plain, fresh(low)),
        run_with_gradients(plain, fresh(low, dtype=torch.float64)),
    )


def test_same_bits_in_ten_runs():
    args = inputs((90, 7, 200, 0, 31), heads=4, kv_heads=2, width=16)
    for window in [(None, None), (16, 16)]:
        first = run_with_gradients(variant(window=window), fresh(args))
        for _ in range(10):
            again = run_with_gradients(variant(window=window), fresh(args))
            for a, b in zip(
                first.outputs + first.gradients, again.outputs + again.gradients, strict=True
            ):
                assert torch.equal(a, b)


def test_runs_where_torch_demands_determinism(impl):
    args = inputs((9, 4), (5, 6))
    torch.use_deterministic_algorithms(True)
    try:
        run = run_with_gradients(variant(window=(2, 2), impl=impl), fresh(args))
    finally:
        torch.use_deterministic_algorithms(False)
    check_runs_equal(run, run_with_gradients(variant(window=(2, 2), impl=impl), fresh(args)))


def test_strided_operands(impl):
    layout = Layout.from_lengths([5, 0, 7])
    fused = torch.randn(12, 3, 2, 4, requires_grad=True)
    by_head = torch.randn(3, 2, 12, 4, requires_grad=True)
    every_other = torch.randn(24, 3, 4, 8, requires_grad=True)
    for name, base, views in (
        ("slices of a fused tensor", fused, fused.unbind(1)),
        ("heads outside", by_head, [x.transpose(0, 1) for x in by_head]),
        ("steps of two", every_other, every_other[::2, :, ::2, ::2].unbind(1)),
        ("one row expanded", fused, [x[:1].expand(12, 2, 4) for x in fused.unbind(1)]),
    ):
        out = jagged_flash_attention(*views, layout, impl=impl)
        plain = [x.detach().contiguous().requires_grad_() for x in views]
        expected = jagged_flash_attention(*plain, layout, impl=impl)
        assert torch.equal(out, expected), name
        upstream = torch.randn(2, 4, 12).permute(2, 0, 1)
        (got,) = torch.autograd.grad(out, base, upstream)
        (wanted,) = torch.autograd.grad(views, base, torch.autograd.grad(expected, plain, upstream))
        check_equal_up_to_rounding(got, wanted, what=name)


def test_rows_that_int32_cannot_reach_are_copied():
    # 512 rows, more than a tile has, stay below 2^31 elements; meta tensors take no memory.
    for stride, taken in ((2**22 - 1, True), (2**22, False)):
        rows = torch.empty_strided((600, 2, 8), (stride, 8, 1), device="meta")
        assert (readable_rows(rows) is rows) == taken
        assert readable_rows(rows).stride() == ((stride, 8, 1) if taken else (16, 8, 1))


def test_gradient_of_the_logsumexp_alone():
    args = inputs((4, 6), dtype=torch.float64)
    _, lse = variant()(*args)
    _, expected = oracle(*args)
    upstream = torch.randn_like(lse)
    got = torch.autograd.grad(lse, args[:2], upstream)
    wanted = torch.autograd.grad(expected, args[:2], upstream)
    for a, b in zip(got, wanted, strict=True):
        check_equal_up_to_rounding(a, b)


def test_int32_offsets_are_accepted(impl):
    q, k, v, layout, _ = inputs((3, 4))
    narrow = Layout.from_lengths([3, 4], dtype=torch.int32)
    assert torch.equal(
        jagged_flash_attention(q, k, v, narrow, impl=impl),
        jagged_flash_attention(q, k, v, layout, impl=impl),
    )


def test_causal_is_the_causal_mask(impl):
    q, k, _, layout, k_layout = inputs((4,), (6,), width=8)
    v = torch.eye(6)[:, None, :].expand(-1, 2, -1)
    out = jagged_flash_attention(q, k, v, layout, k_layout, causal=True, impl=impl)
    assert torch.equal(out[:, 0] > 0, causal_mask(4, 6))


@pytest.mark.gpu
def test_reference_on_gpu_equals_cpu_and_waits_for_nothing():
    args = inputs((90, 7, 200, 0, 31), (40, 9, 211, 3, 0), heads=4, kv_heads=2, width=16)
    attend = variant(window=(16, 40), impl="reference")
    here = run_with_gradients(attend, fresh(args))
    there = fresh(args, device="cuda")
    upstream = [upstream_like(x, seed=i).cuda() for i, x in enumerate(here.outputs)]
    torch.autograd.grad(attend(*there), there[:3], upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = attend(*there)
        gradients = torch.autograd.grad(outputs, there[:3], upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip((*outputs, *gradients), here.outputs + here.gradients, strict=True):
        check_equal_up_to_rounding(a.detach().cpu(), b, noise_scale=16.0)


@hypothesis.given(
    sides=strategies.lists(
        strategies.tuples(strategies.integers(0, 40), strategies.integers(0, 70)), max_size=3
    ),
    window=strategies.tuples(*[strategies.none() | strategies.integers(0, 40)] * 2),
    tail=strategies.integers(0, 40),
    grouped=strategies.booleans(),
)
@hypothesis.settings(max_examples=6)
@pytest.mark.interpreter
def test_kernel_equals_the_reference_on_random_lengths(sides, window, tail, grouped):
    # The reference is held to the masks by the tests above.
    q_lengths, k_lengths = [q for q, _ in sides], [k for _, k in sides]
    q = torch.randn(sum(q_lengths) + tail, 2, 16, requires_grad=True)
    k, v = (
        torch.randn(sum(k_lengths) + tail, 1 if grouped else 2, 16, requires_grad=True)
        for _ in range(2)
    )
    args = (q, k, v, Layout.from_lengths(q_lengths), Layout.from_lengths(k_lengths))
    check_runs_equal(
        run_with_gradients(variant(window=window, impl="triton"), fresh(args)),
        run_with_gradients(variant(window=window, impl="reference"), fresh(args)),
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("level", [-12.0, -50.0, -100.0])
def test_low_scores_with_lengths_that_no_tile_divides(level):
    # A row or key beyond a sequence's end scores 0, far above every true score.
    args = low_scores((65, 33, 3, 9), (97, 70, 50, 1), level)
    exact = run_with_gradients(partial(oracle, scale=1.0), fresh(args, dtype=torch.float64))
    low = run_with_gradients(partial(oracle, scale=1.0, from_lse=True), fresh(args))
    check_run_budget(run_with_gradients(variant(scale=1.0, impl="triton"), fresh(args)), low, exact)


def low_scores(q_lengths, k_lengths, level, *, heads=2, width=16):
    """Inputs whose scores all lie within a few units of ``level``."""
    q, k, v, *layouts = (
        x.detach() if torch.is_tensor(x) else x
        for x in inputs(q_lengths, k_lengths, heads=heads, kv_heads=heads, width=width)
    )
    q, k, v = q / width**0.5, k.clone(), v / width**0.5
    q[..., -1], k[..., -1] = 1.0, level  # last, so that only one sum is large
    return (*(x.requires_grad_() for x in (q, k, v)), *layouts)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
def test_any_scale(scale, impl):
    for window in [(None, None), (4, 0)]:
        args = inputs((20, 3), (9, 30))
        check_runs_equal(
            run_with_gradients(variant(scale=scale, window=window, impl=impl), fresh(args)),
            run_with_gradients(partial(oracle, scale=scale, window=window), fresh(args)),
        )


@pytest.mark.interpreter
def test_kernel_needs_no_lengths_and_takes_offsets_of_any_stride():
    q, k, v, layout, _ = (x.detach() if torch.is_tensor(x) else x for x in inputs((5, 0, 7)))
    apart = torch.stack([layout.offsets_O, -layout.offsets_O], 1)[:, 0]
    out, lse = torch.ops.gem_attention.jagged_flash_attention(
        *(q, k, v, apart, apart, None, None, 2, 1, 0.5, False, False, 0, "triton")
    )
    expected = jagged_flash_attention(
        q, k, v, layout, window=(2, 1), return_lse=True, impl="reference"
    )
    check_equal_up_to_rounding(out, expected[0])
    check_equal_up_to_rounding(lse, expected[1])


@pytest.mark.interpreter
@pytest.mark.parametrize("wrong", [[0, 10, 60], [-9, 10, 32]])
def test_offsets_beyond_the_tokens_read_nothing_outside(wrong):
    # What a caller with device offsets alone may hand over; the rows that exist stay right.
    base = [torch.full((64, 2, 16), torch.nan) for _ in range(3)]
    q, k, v = (x[16:48] for x in base)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    offsets_O = torch.tensor(wrong)
    out, _ = torch.ops.gem_attention.jagged_flash_attention(
        *(q, k, v, offsets_O, offsets_O, None, None, None, None, 0.25, False, False, 0, "triton")
    )
    right = jagged_flash_attention(q, k, v, Layout.from_lengths([10, 22]), impl="reference")
    check_equal_up_to_rounding(out, right)


@pytest.mark.interpreter
def test_interpreter_is_refused_the_dtype_that_it_gets_wrong():
    q, k, v, layout, _ = inputs((3, 4), dtype=torch.bfloat16)
    check_refuses(
        [
            (
                lambda: jagged_flash_attention(q, k, v, layout, impl="triton"),
                UnsupportedError,
                "have float32 or float16 on a CPU; got torch.bfloat16",
            )
        ]
    )


@pytest.mark.interpreter
def test_tunings_are_at_most_as_many_as_buckets(monkeypatch, tmp_path):
    monkeypatch.setenv("GEM_CACHE_DIR", str(tmp_path))
    searched = []
    search = tuning._search
    monkeypatch.setattr(
        tuning, "_search", lambda bucket, *rest: searched.append(bucket) or search(bucket, *rest)
    )
    generator = random.Random(0)
    batches = [[generator.randint(0, 70) for _ in range(2)] for _ in range(20)]
    with tuning.searching():
        for lengths in batches:
            q, k, v, layout, _ = inputs(lengths, heads=1, kv_heads=1)
            jagged_flash_attention(q, k, v, layout, impl="triton")
    buckets = {tuning.length_bucket(sum(lengths), 2) for lengths in batches}
    assert len(searched) == len(buckets) > 1
    del searched[:]
    for lengths in batches[:3]:  # without a search nothing is timed, whatever the lengths
        q, k, v, layout, _ = inputs([2 * length for length in lengths], heads=1, kv_heads=1)
        jagged_flash_attention(q, k, v, layout, impl="triton")
    assert searched == []


def test_the_log_says_once_which_kernel_ran(caplog, monkeypatch):
    monkeypatch.setattr(softmax_dispatch, "_announced", set())
    q, k, v, *_ = inputs((3, 4))
    with caplog.at_level("INFO"):
        for _ in range(2):
            softmax_dispatch._kernels(q, k, v, batch=2, window=(None, None), deterministic=False)
    assert [r.message for r in caplog.records] == [
        "jagged_flash_attention: kernel runs on cpu for torch.float32, K=4, V=4"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("case", WIDTH_CASES, ids=lambda case: case.id)
def test_every_head_width_on_gpu(case):
    widths = (case.width, case.value_width)
    check_case_on_gpu(case, gpu_inputs((130, 0, 67), (70, 9, 200), widths=widths))


@pytest.mark.gpu
def test_short_queries_on_gpu():
    # The backward in one pass, with one longer sequence among them, which takes the split one.
    for longest in (32, 64):
        q_lengths = (longest, 1, 0, longest - 1, 5, 100, 1, 1, 1, 1)
        k_lengths = (300, 64, 7, 0, 129, 50, 1, 1, 0, 33)
        check_kernel_on_gpu(
            with_lse(),
            variant(impl="reference"),
            gpu_inputs(q_lengths, k_lengths, widths=(64, 64), heads=2),
            dtypes=(torch.float32, *HALVES),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("level", [-12.0, -50.0, -100.0])
@pytest.mark.parametrize("width", [64, 128])
def test_low_scores_on_gpu(level, width, kernels):
    for dtype in (torch.float32, *HALVES) if width == 64 else HALVES[:1]:
        lengths = (333, 5, 129, 3, 9, 31), (257, 70, 131, 500, 1, 65)
        args = fresh(low_scores(*lengths, level, width=width), dtype=dtype, device="cuda")
        exact = run_with_gradients(partial(oracle, scale=1.0), fresh(args, dtype=torch.float64))
        plain = variant(impl="reference", scale=1.0)
        if dtype is torch.float32:
            plain = partial(oracle, scale=1.0, from_lse=True)
        low = run_with_gradients(plain, fresh(args))
        actual = run_with_gradients(variant(scale=1.0, impl="triton"), fresh(args))
        check_run_budget(actual, low, exact, what=f"{dtype}: ")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 96])
def test_same_bits_in_ten_runs_on_gpu(width, kernels):
    args = inputs((900, 7, 2000, 0, 31), heads=4, kv_heads=2, width=width)
    args = fresh(args, dtype=torch.bfloat16, device="cuda")
    for window in [(None, None), (64, 16)]:
        attend = variant(window=window, deterministic=True, impl="triton")
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
        out, lse = jagged_flash_attention(
            q, k, v, layout, window=window, return_lse=True, impl="triton"
        )
        upstream = torch.randn_like(out)
        upstream[730:] = torch.nan
        gradients = torch.autograd.grad(out, (q, k, v), upstream)
        for x in (out, *gradients):
            assert torch.isfinite(x[:129]).all()
            assert torch.isfinite(x[429:]).all()
            assert not x[730:].any()
        assert torch.equal(lse[730:], torch.full_like(lse[730:], -torch.inf))


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_to_the_31_elements(kernels):
    lengths = [1000] * 2200
    q, k, v = (
        torch.randn(2_200_000, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    assert q.numel() > 2**31
    layout = Layout.from_lengths(lengths, device="cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = jagged_flash_attention(*leaves, layout, impl="triton")
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, upstream)
    last = Layout.from_lengths([1000], device="cuda")
    alone = [x[-1000:].detach().clone().requires_grad_() for x in leaves]
    expected = jagged_flash_attention(*alone, last, impl="triton")
    wanted = torch.autograd.grad(expected, alone, upstream[-1000:])
    for a, b in zip((out, *gradients), (expected, *wanted), strict=True):
        check_equal_up_to_rounding(a[-1000:].detach(), b.detach(), noise_scale=4.0)


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
    out = jagged_flash_attention(*leaves, layout, deterministic=deterministic)
    torch.autograd.grad(out, leaves, upstream)
    peak = torch.cuda.max_memory_allocated() - before + 4 * q.nbytes
    # q, k, v, out, the gradient of out and three gradients; the logsumexp.
    needed = 8 * q.nbytes + 4 * q.shape[0] * q.shape[1]
    assert peak <= 1.1 * needed, f"{peak / needed:.3f}"

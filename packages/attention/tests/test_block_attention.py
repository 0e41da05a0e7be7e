import sys
from functools import lru_cache, partial
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies

from gem_attention.kernels.block_attention.cases import CASES
from gem_attention.kernels.block_attention.cost import (
    block_attention_backward_cost,
    block_attention_cost,
)
from gem_attention.ops import block_attention, jagged_flash_attention
from gem_attention.patterns import block_mask, visible_pairs_block
from gem_attention.rotary import apply_rotary, rotary_angles, rote_angles
from gem_jagged.batch import Layout
from gem_jagged.offsets import positions
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, UnsupportedError
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

from support_matrix import BLOCK_CASES, BLOCK_INTERPRETED

SMALL = [case for case in CASES if case.device == "cpu" and sum(case.q_lengths) < 1000]


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpreter)])
def impl(request):
    return request.param


def inputs(lengths, *, heads=2, kv_heads=2, width=4, value_width=None, tail=0, dtype=torch.float32):
    q = torch.randn(sum(lengths) + tail, heads, width, dtype=dtype)
    k = torch.randn(sum(lengths) + tail, kv_heads, width, dtype=dtype)
    v = torch.randn(sum(lengths) + tail, kv_heads, value_width or width, dtype=dtype)
    return (*(x.requires_grad_() for x in (q, k, v)), Layout.from_lengths(lengths))


@lru_cache
def gaps(tokens, device="cpu"):
    """Seconds from 0 to a year, the same for every call; kept, because to copy them is to wait."""
    return (10.0 ** (7.5 * torch.rand(tokens, generator=torch.Generator().manual_seed(3)))).to(
        device
    )


def oracle(q, k, v, layout, *, block_tokens=64, scale=None, rotary="none"):
    """One sequence and head after the other, with the mask that defines the blocks."""
    heads, groups = q.shape[1], k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if rotary != "none":
        q, k = (turned(x, layout, rotary) for x in (q, k))
    lengths = layout.lengths.tolist()
    lengths.append(q.shape[0] - sum(lengths))
    outs = []
    for q_i, k_i, v_i in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        hidden = ~block_mask(len(q_i), block_tokens).to(q.device)
        by_head = []
        for h in range(heads):
            g = h // (heads // groups)
            score = (q_i[:, h] @ k_i[:, g].T * scale).masked_fill(hidden, -torch.inf)
            by_head.append(score.softmax(-1) @ v_i[:, g])
        outs.append(torch.stack(by_head, dim=1))
    outs[-1] = torch.zeros_like(outs[-1])
    return torch.cat(outs) + (q.sum() + k.sum() + v.sum()) * 0


def turned(x, layout, rotary):
    """By the place in the sequence, with angles in the precision of x, once rounded."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    pair = torch.arange(x.shape[2] // 2, device=x.device, dtype=wide)
    place = positions(layout.offsets_O, x.shape[0]).to(wide)
    angle = place[:, None] * 10_000.0 ** (-2 * pair / x.shape[2])
    if rotary == "rote":
        log_gap = torch.log1p(gaps(x.shape[0], x.device).to(wide) / 60.0)
        angle = angle + log_gap[:, None] * 100.0 ** (-2 * pair / x.shape[2])
    return apply_rotary(x, angle.cos(), angle.sin())


def variant(fn=block_attention, *, rotary="none", **options):
    def run(q, k, v, layout, **more):
        if fn is block_attention and rotary == "rote":
            more["gap_seconds_T"] = gaps(q.shape[0], q.device)
        return fn(q, k, v, layout, rotary=rotary, **options, **more)

    return run


@pytest.mark.parametrize("rotary", ["none", "rote"])
def test_reference_gradients(rotary):
    check_reference_gradients(
        variant(block_tokens=2, rotary=rotary),
        inputs((3, 0, 4), heads=2, kv_heads=1, width=2),
        reference=variant(oracle, block_tokens=2, rotary=rotary),
    )


@pytest.mark.parametrize("rotary", ["none", "rote"])
def test_registration(rotary):
    q, k, v, layout = inputs((3, 0, 6), heads=4)
    pairs = visible_pairs_block(layout.lengths, 4)
    size = {
        "visible_pairs": pairs,
        "tokens": 9,
        "heads": 4,
        "kv_heads": 2,
        "head_width": 4,
        "value_width": 4,
        "element_bytes": 4,
    }
    turns = (torch.rand(2, 2), torch.rand(9)) if rotary == "rote" else (None, None)
    rest = (layout.offsets_O, layout.lengths, *turns, 4, 0.5, pairs, "reference")
    check_registration(
        torch.ops.gem_attention.block_attention,
        (q, k, v, *rest),
        cost=block_attention_cost(**size),
        backward_cost=block_attention_backward_cost(**size),
    )
    q, k, v = (x.detach() for x in (q, k, v))
    check_registration(
        torch.ops.gem_attention.block_attention_backward,
        (torch.randn_like(q), q, k, v, torch.randn_like(q), *rest),
        cost=block_attention_backward_cost(**size),
    )


def counted(**options):
    """The operator with its visible pairs and gaps as arguments, as a graph needs them."""

    def run(q, k, v, layout, pairs, gap):
        more = {"gap_seconds_T": gap} if options.get("rotary") == "rote" else {}
        return block_attention(q, k, v, layout, visible_pairs=pairs, **more, **options)

    return run


def counted_inputs(lengths, block_tokens, **options):
    args = inputs(lengths, **options)
    return (*args, visible_pairs_block(args[3].lengths, block_tokens), gaps(args[0].shape[0]))


@pytest.mark.parametrize(
    ("rotary", "impl"),
    [
        ("none", "reference"),
        ("rote", "reference"),
        pytest.param("rote", "triton", marks=pytest.mark.interpreter),
    ],
)
def test_compiles_whole(rotary, impl):
    check_compiles_whole(
        counted(block_tokens=4, rotary=rotary, impl=impl),
        # A width of its own: with that of the offsets a graph would hold the two to be one number.
        [counted_inputs(lengths, 4, width=6) for lengths in ((3, 0, 9), (2, 7, 2), (9, 4, 2, 3))],
    )


def with_impl(**options):
    """The operator as the kernel checks call it, with ``impl`` of theirs."""
    attend = variant(**options)
    return lambda q, k, v, layout, *, impl: attend(q, k, v, layout, impl=impl)


# Blocks of which the last is partial, of one token too; groups of heads; a tail.
@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("block_tokens", "kv_heads", "rotary", "case"),
    BLOCK_INTERPRETED,
    ids=[f"{tokens}-{rotary}-{case.id}" for tokens, _, rotary, case in BLOCK_INTERPRETED],
)
def test_interpreted_kernel(block_tokens, kv_heads, rotary, case):
    check_interpreted_kernel(
        with_impl(block_tokens=block_tokens, rotary=rotary),
        variant(oracle, block_tokens=block_tokens, rotary=rotary),
        inputs(
            (70, 0, 129, 1),
            kv_heads=kv_heads,
            width=case.width,
            value_width=case.value_width,
            tail=40,
        ),
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("block_tokens", "heads", "kv_heads", "rotary", "case"),
    BLOCK_CASES,
    ids=[f"{tokens}-{heads}-{rotary}-{case.id}" for tokens, heads, _, rotary, case in BLOCK_CASES],
)
def test_kernel_on_gpu(block_tokens, heads, kv_heads, rotary, case):
    check_kernel_on_gpu(
        with_impl(block_tokens=block_tokens, rotary=rotary),
        variant(oracle, block_tokens=block_tokens, rotary=rotary),
        gpu_inputs((300, 129, 0, 37, 1, 513), heads, kv_heads, (case.width, case.value_width)),
        dtypes=[getattr(torch, name) for name in case.dtypes],
    )


def gpu_inputs(lengths, heads, kv_heads, widths):
    """Values of length about 1, so that what cancels is no larger than the gradient."""
    q, k, v, layout = inputs(
        lengths, heads=heads, kv_heads=kv_heads, width=widths[0], value_width=widths[1], tail=3
    )
    return q, k, (v.detach() / widths[1] ** 0.5).requires_grad_(), layout


def test_ragged_edges(impl):
    check_ragged_edges(
        counted(block_tokens=4, impl=impl),
        lambda *args: oracle(*args[:4], block_tokens=4),
        lambda case: counted_inputs(case.lengths, 4),
        compiled=impl == "reference",  # the graph calls the same operator
    )


def test_alone_equals_in_batch(impl):
    lengths = (3, 0, 40, 1, 16)
    q, k, v, _ = inputs(lengths)

    def make(picked):
        tokens = (take_sequences(x, lengths, picked) for x in (q, k, v))
        return (*tokens, Layout.from_lengths([lengths[i] for i in picked]))

    check_alone_equals_in_batch(
        variant(block_tokens=16, rotary="position", impl=impl), make, lengths, leaves=[q, k, v]
    )


def test_refuses(monkeypatch):
    q, k, v, layout = inputs((3, 0, 4))
    attend = block_attention
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_refuses(
        [
            (
                lambda: attend(q, k, v, layout, block_tokens=129, impl="triton"),
                UnsupportedError,
                'impl="triton" must have blocks of at most 128 tokens, .* got blocks of 129, K=4',
            ),
            (
                lambda: attend(*(x.repeat(1, 1, 40) for x in (q, k)), v, layout, impl="triton"),
                UnsupportedError,
                "values as wide as keys where .* got blocks of 64, K=160, V=4; use impl=",
            ),
        ]
    )
    monkeypatch.delenv("TRITON_INTERPRET")
    check_refuses(
        [
            (lambda: attend(q[0], k, v, layout), ShapeError, "q_THK must have 3 dims"),
            (lambda: attend(q, k[:6], v, layout), ShapeError, "k_TGK has T=6 but q_THK has T=7"),
            (lambda: attend(q, k, v, layout, block_tokens=0), ShapeError, "block_tokens must be"),
            (
                lambda: attend(q, k, v, Layout.from_lengths([8])),
                ShapeError,
                "layout.lengths must sum to at most the 7 tokens of q_THK; got 8",
            ),
            (lambda: attend(q, k.half(), v, layout), DtypeError, "k_TGK must be torch.float32"),
            (lambda: attend(q, k, v, layout.to("meta")), DeviceError, "layout.offsets_O must be"),
            (
                lambda: attend(q, k, v, layout, impl="triton"),
                UnsupportedError,
                'block_attention: impl="triton" .* use impl="reference"',
            ),
            (
                lambda: attend(*(x.double() for x in (q, k, v)), layout, impl="triton"),
                UnsupportedError,
                "block_attention: .* widths of at most 256; got .* use impl=",
            ),
            (
                lambda: attend(q, k, v, layout, rotary="rope"),
                ConfigError,
                "rotary must be one of none, position, rote; got 'rope'",
            ),
            (
                lambda: attend(q, k, v, layout, rotary="rote"),
                ConfigError,
                "gap_seconds_T must be given with rotary=.*; got None with 'rote'",
            ),
            (
                lambda: attend(q, k, v, layout, rotary="position", gap_seconds_T=gaps(7)),
                ConfigError,
                "gap_seconds_T must be .*; got gaps with 'position'",
            ),
            (
                lambda: attend(q, k, v, layout, rotary="rote", gap_seconds_T=gaps(6)),
                ShapeError,
                "gap_seconds_T has T=6 but q_THK has T=7",
            ),
            (
                lambda: attend(
                    q, k, v, layout, rotary="rote", gap_seconds_T=gaps(7).clone().requires_grad_()
                ),
                UnsupportedError,
                "gap_seconds_T must require no gradient; .* detach it",
            ),
            (
                lambda: attend(
                    q, k, v, layout, rotary="rote", gap_seconds_T=gaps(7), rote_time_scale_s=0.0
                ),
                ConfigError,
                "rote_time_scale_s must be above 0; got 0.0",
            ),
            (
                lambda: attend(*(x[..., :3] for x in (q, k, v)), layout, rotary="position"),
                ShapeError,
                "head_dim must be even and above 0; got 3",
            ),
        ]
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("rotary", ["none", "rote"])
def test_descriptors_reach_what_pointers_reach(rotary, monkeypatch):
    # Neither outside a block nor outside the tokens, tails and rows behind the last offset too.
    from gem_attention.kernels.block_attention import kernel

    args = inputs((70, 0, 129, 5, 1), kv_heads=1, width=16, tail=40)
    attend = variant(rotary=rotary, impl="triton", block_tokens=64)
    by_pointers = run_with_gradients(attend, fresh(args))
    monkeypatch.setattr(kernel, "describes", lambda *_: True)
    by_descriptors = run_with_gradients(attend, fresh(args))
    for a, b in zip(
        by_pointers.outputs + by_pointers.gradients,
        by_descriptors.outputs + by_descriptors.gradients,
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_cases_equal_the_masked_oracle(case):
    args = inputs(case.q_lengths, heads=case.heads, kv_heads=case.kv_heads, width=case.head_width)
    for block_tokens in (64, 5):
        check_runs_equal(
            run_with_gradients(variant(block_tokens=block_tokens), fresh(args)),
            run_with_gradients(variant(oracle, block_tokens=block_tokens), fresh(args)),
        )


@pytest.mark.parametrize("tokens", [3, 4, 5, 8, 9])
def test_a_block_shows_what_its_mask_says(tokens):
    # With the identity as values, a row of the output is that query's probabilities.
    q, k, _, layout = inputs((tokens,))
    v = torch.eye(tokens)[:, None, :].expand(-1, 2, -1)
    out = block_attention(q, k, v, layout, block_tokens=4)
    assert torch.equal(out[:, 0] > 0, block_mask(tokens, 4))


@pytest.mark.parametrize("block_tokens", [32, 64, 100, 128, 200])
def test_blocks_of_every_length_with_their_tails(block_tokens):
    args = inputs((130, 0, 64, 201, 1), heads=2, kv_heads=1)
    for rotary in ("none", "position", "rote"):
        options = {"block_tokens": block_tokens, "rotary": rotary}
        check_run_budget(
            run_with_gradients(variant(**options), fresh(args)),
            run_with_gradients(variant(oracle, **options), fresh(args)),
            run_with_gradients(variant(oracle, **options), fresh(args, dtype=torch.float64)),
            what=f"blocks of {block_tokens}, {rotary}: ",
        )


@pytest.mark.parametrize("rotary", ["position", "rote"])
def test_turning_inside_is_turning_before(rotary):
    # The place in the block stands for that in the sequence.
    q, k, v, layout = inputs((70, 0, 21), heads=4, kv_heads=2, dtype=torch.float64)
    gap = gaps(91)
    options = {"gap_seconds_T": gap} if rotary == "rote" else {}
    inside = block_attention(q, k, v, layout, block_tokens=16, rotary=rotary, **options)
    place = positions(layout.offsets_O, 91)
    angles = rote_angles(place, gap, 4) if rotary == "rote" else rotary_angles(place, 4)
    before = block_attention(
        apply_rotary(q, *angles), apply_rotary(k, *angles), v, layout, block_tokens=16
    )
    # Angles of the second are float32, of up to 70.
    torch.testing.assert_close(inside, before, rtol=0, atol=1e-5)
    untouched = block_attention(q, k, v, layout, block_tokens=16)
    assert (inside - untouched).abs().max() > 0.01


def test_a_block_as_long_as_the_sequence_is_full_attention():
    q, k, v, layout = inputs((40, 64, 0, 7))
    check_equal_up_to_rounding(
        block_attention(q, k, v, layout, block_tokens=64).detach(),
        jagged_flash_attention(q, k, v, layout).detach(),
    )


def test_tokens_behind_the_last_sequence_get_nothing(impl):
    q, k, v = (torch.randn(10, 2, 4, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        for x in (q, k, v):
            x[7:] = torch.nan
    out = block_attention(
        q, k, v, Layout.from_lengths([3, 4]), block_tokens=2, rotary="position", impl=impl
    )
    upstream = torch.randn_like(out)
    upstream[7:] = torch.nan
    out.backward(upstream)
    assert torch.equal(out[7:], torch.zeros(3, 2, 4))
    for x in (q, k, v):
        assert torch.equal(x.grad[7:], torch.zeros(3, 2, 4))
        assert torch.isfinite(x.grad).all()


def test_a_poisoned_block_leaves_the_others_alone(impl):
    q, k, v, layout = inputs((5, 11))
    with torch.no_grad():
        for x in (q, k, v):
            x[9:13] = torch.nan  # the second block of the second sequence
    out = block_attention(q, k, v, layout, block_tokens=4, impl=impl)
    gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    for x in (out, *gradients):
        assert torch.isfinite(x[:9]).all()
        assert torch.isfinite(x[13:]).all()


def test_empty_batch_after_a_warm_call(impl):
    q, k, v, layout = inputs((3, 4))
    block_attention(q, k, v, layout, impl=impl)
    for lengths in ([], [0, 0]):
        leaves = [x[:0].detach().requires_grad_() for x in (q, k, v)]
        block_attention(*leaves, Layout.from_lengths(lengths), impl=impl).sum().backward()
        assert all(leaf.grad.shape == (0, 2, 4) for leaf in leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_in_the_budget(dtype):
    low = fresh(inputs((33, 5, 0, 12), heads=4, kv_heads=2, width=16), dtype=dtype)
    check_run_budget(
        run_with_gradients(variant(block_tokens=8), fresh(low)),
        run_with_gradients(variant(oracle, block_tokens=8), fresh(low)),
        run_with_gradients(variant(oracle, block_tokens=8), fresh(low, dtype=torch.float64)),
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
    fused = torch.randn(12, 3, 2, 4, requires_grad=True)
    attend = variant(block_tokens=4, rotary="rote", impl=impl)
    out = attend(*fused.unbind(1), layout)
    plain = [x.detach().contiguous().requires_grad_() for x in fused.unbind(1)]
    expected = attend(*plain, layout)
    assert torch.equal(out, expected)
    upstream = torch.randn(2, 4, 12).permute(2, 0, 1)
    (got,) = torch.autograd.grad(out, fused, upstream)
    wanted = torch.stack(torch.autograd.grad(expected, plain, upstream), dim=1)
    check_equal_up_to_rounding(got, wanted)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
def test_any_scale(scale, impl):
    args = inputs((20, 3))
    options = {"block_tokens": 8, "scale": scale}
    check_runs_equal(
        run_with_gradients(variant(impl=impl, **options), fresh(args)),
        run_with_gradients(variant(oracle, **options), fresh(args)),
    )


def test_int32_offsets_are_accepted(impl):
    q, k, v, layout = inputs((3, 4))
    narrow = Layout.from_lengths([3, 4], dtype=torch.int32)
    attend = partial(block_attention, q, k, v, block_tokens=2, rotary="position", impl=impl)
    assert torch.equal(attend(narrow), attend(layout))


@pytest.mark.interpreter
@pytest.mark.parametrize("level", [-12.0, -50.0, -100.0])
def test_low_scores_with_lengths_that_no_block_divides(level):
    # A row or key beyond the end scores 0, far above every true score.
    check_low_scores(low_scores((97, 33, 1), level), "triton")


def low_scores(lengths, level, *, width=16):
    """Inputs whose scores all lie within a few units of ``level``."""
    q, k, v, layout = inputs(lengths, width=width)
    q, k, v = (x.detach() for x in (q / width**0.5, k, v / width**0.5))
    q[..., -1], k[..., -1] = 1.0, level  # last, so that only one sum is large
    return (*(x.requires_grad_() for x in (q, k, v)), layout)


def check_low_scores(args, impl):
    attend = variant(scale=1.0, block_tokens=64, impl=impl)
    by_oracle = variant(oracle, scale=1.0, block_tokens=64)
    check_run_budget(
        run_with_gradients(attend, fresh(args)),
        run_with_gradients(by_oracle, fresh(args)),
        run_with_gradients(by_oracle, fresh(args, dtype=torch.float64)),
        what=f"{args[0].dtype}: ",
    )


@hypothesis.given(
    lengths=strategies.lists(strategies.integers(0, 90), max_size=2),
    tail=strategies.integers(0, 20),
    block_tokens=strategies.integers(1, 128),
    grouped=strategies.booleans(),
    rotary=strategies.sampled_from(["none", "position", "rote"]),
)
@hypothesis.settings(max_examples=3)
@pytest.mark.interpreter
def test_kernel_equals_the_reference_on_random_lengths(
    lengths, tail, block_tokens, grouped, rotary
):
    args = inputs(lengths, kv_heads=1 if grouped else 2, width=16, tail=tail)
    options = {"block_tokens": block_tokens, "rotary": rotary}
    check_run_budget(
        run_with_gradients(variant(impl="triton", **options), fresh(args)),
        run_with_gradients(variant(oracle, **options), fresh(args)),
        run_with_gradients(variant(oracle, **options), fresh(args, dtype=torch.float64)),
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("wrong", [[0, 10, 60], [-9, 10, 32]])
def test_offsets_beyond_the_tokens_read_nothing_outside(wrong):
    # What a caller with device offsets alone may hand over; the rows that exist stay right.
    base = [torch.full((64, 2, 16), torch.nan) for _ in range(3)]
    q, k, v = (x[16:48] for x in base)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    lengths = torch.tensor([10, 22])
    out = torch.ops.gem_attention.block_attention(
        *(q, k, v, torch.tensor(wrong), lengths, None, None, 16, 0.25, 0, "triton")
    )
    right = block_attention(q, k, v, Layout.from_lengths(lengths), block_tokens=16)
    check_equal_up_to_rounding(out, right)


@pytest.mark.gpu
def test_reference_on_gpu_equals_cpu_and_waits_for_nothing():
    args = inputs((90, 7, 200, 0, 31), heads=4, kv_heads=2, width=16)
    attend = variant(block_tokens=32, impl="reference")
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

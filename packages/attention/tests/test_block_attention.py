import pytest
import torch

from gem_attention.kernels.block_attention.cases import CASES
from gem_attention.kernels.block_attention.cost import (
    block_attention_backward_cost,
    block_attention_cost,
)
from gem_attention.ops import block_attention, jagged_flash_attention
from gem_attention.patterns import block_mask, visible_pairs_block
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


def inputs(lengths, *, heads=2, kv_heads=2, width=4, dtype=torch.float32):
    q = torch.randn(sum(lengths), heads, width, dtype=dtype)
    k, v = (torch.randn(sum(lengths), kv_heads, width, dtype=dtype) for _ in range(2))
    return (*(x.requires_grad_() for x in (q, k, v)), Layout.from_lengths(lengths))


def oracle(q, k, v, layout, *, block_tokens=64):
    """One sequence and head after the other, with the mask that defines the blocks."""
    heads, groups = q.shape[1], k.shape[1]
    lengths = layout.lengths.tolist()
    outs = [q.new_zeros(0, heads, v.shape[2])]
    for q_i, k_i, v_i in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        hidden = ~block_mask(len(q_i), block_tokens)
        by_head = []
        for h in range(heads):
            g = h // (heads // groups)
            score = (q_i[:, h] @ k_i[:, g].T / q.shape[2] ** 0.5).masked_fill(hidden, -torch.inf)
            by_head.append(score.softmax(-1) @ v_i[:, g])
        outs.append(torch.stack(by_head, dim=1))
    return torch.cat(outs) + (q.sum() + k.sum() + v.sum()) * 0


def variant(fn=block_attention, **options):
    return lambda q, k, v, layout: fn(q, k, v, layout, **options)


def test_reference_gradients():
    check_reference_gradients(
        variant(block_tokens=2),
        inputs((3, 0, 4), heads=2, kv_heads=1, width=2),
        reference=variant(oracle, block_tokens=2),
    )


def test_registration():
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
    rest = (layout.offsets_O, layout.lengths, 4, 0.5, pairs, "reference")
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
    """The operator with its visible pairs as an argument, as a graph needs them."""

    def run(q, k, v, layout, pairs):
        return block_attention(q, k, v, layout, visible_pairs=pairs, **options)

    return run


def counted_inputs(lengths, block_tokens, **options):
    args = inputs(lengths, **options)
    return (*args, visible_pairs_block(args[3].lengths, block_tokens))


def test_compiles_whole():
    check_compiles_whole(
        counted(block_tokens=4),
        [counted_inputs(lengths, 4) for lengths in ((3, 0, 9), (2, 7, 2), (9, 4, 2, 3))],
    )


def test_ragged_edges():
    check_ragged_edges(
        counted(block_tokens=4),
        lambda *args: oracle(*args[:4], block_tokens=4),
        lambda case: counted_inputs(case.lengths, 4),
    )


def test_alone_equals_in_batch():
    lengths = (3, 0, 40, 1, 16)
    q, k, v, _ = inputs(lengths)

    def make(picked):
        tokens = (take_sequences(x, lengths, picked) for x in (q, k, v))
        return (*tokens, Layout.from_lengths([lengths[i] for i in picked]))

    check_alone_equals_in_batch(variant(block_tokens=16), make, lengths, leaves=[q, k, v])


def test_refuses():
    q, k, v, layout = inputs((3, 0, 4))
    attend = block_attention
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
        ]
    )


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
    check_runs_equal(
        run_with_gradients(variant(block_tokens=block_tokens), fresh(args)),
        run_with_gradients(variant(oracle, block_tokens=block_tokens), fresh(args)),
        what=f"blocks of {block_tokens}: ",
    )


def test_a_block_as_long_as_the_sequence_is_full_attention():
    q, k, v, layout = inputs((40, 64, 0, 7))
    check_equal_up_to_rounding(
        block_attention(q, k, v, layout, block_tokens=64).detach(),
        jagged_flash_attention(q, k, v, layout).detach(),
    )


def test_tokens_behind_the_last_sequence_get_nothing():
    q, k, v = (torch.randn(10, 2, 4, requires_grad=True) for _ in range(3))
    out = block_attention(q, k, v, Layout.from_lengths([3, 4]), block_tokens=2)
    upstream = torch.randn_like(out)
    upstream[7:] = torch.nan
    out.backward(upstream)
    assert torch.equal(out[7:], torch.zeros(3, 2, 4))
    for x in (q, k, v):
        assert torch.equal(x.grad[7:], torch.zeros(3, 2, 4))
        assert torch.isfinite(x.grad).all()


def test_a_poisoned_block_leaves_the_others_alone():
    q, k, v, layout = inputs((5, 11))
    with torch.no_grad():
        for x in (q, k, v):
            x[9:13] = torch.nan  # the second block of the second sequence
    out = block_attention(q, k, v, layout, block_tokens=4)
    gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    for x in (out, *gradients):
        assert torch.isfinite(x[:9]).all()
        assert torch.isfinite(x[13:]).all()


def test_empty_batch_after_a_warm_call():
    q, k, v, layout = inputs((3, 4))
    block_attention(q, k, v, layout)
    for lengths in ([], [0, 0]):
        leaves = [x[:0].detach().requires_grad_() for x in (q, k, v)]
        block_attention(*leaves, Layout.from_lengths(lengths)).sum().backward()
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


def test_strided_operands():
    layout = Layout.from_lengths([5, 0, 7])
    fused = torch.randn(12, 3, 2, 4, requires_grad=True)
    out = block_attention(*fused.unbind(1), layout, block_tokens=4)
    plain = [x.detach().contiguous().requires_grad_() for x in fused.unbind(1)]
    expected = block_attention(*plain, layout, block_tokens=4)
    assert torch.equal(out, expected)
    upstream = torch.randn(2, 4, 12).permute(2, 0, 1)
    (got,) = torch.autograd.grad(out, fused, upstream)
    wanted = torch.stack(torch.autograd.grad(expected, plain, upstream), dim=1)
    check_equal_up_to_rounding(got, wanted)


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

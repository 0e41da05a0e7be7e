"""The kernels on every length case, any strides and dtype, and rows behind the last offset."""

import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies

from gem_jagged.batch import Layout
from gem_jagged.ops import (
    jagged_concat,
    jagged_split,
    jagged_sum,
    jagged_to_padded,
    padded_to_jagged,
)
from gem_jagged.sums import kernel as sums
from gem_opkit.errors import UnsupportedError
from gem_opkit.testing import (
    LENGTH_CASES,
    check_refuses,
    check_runs_equal,
    length_case_id,
    poisoned_empty,
    run_with_gradients,
)

sys.path.insert(0, str(Path(__file__).parent))

from operator_calls import calls

pytestmark = pytest.mark.interpreter


def check_equal_to_reference(name, call, tensors):
    expected = run_with_gradients(lambda *x: call(*x, impl="reference"), tensors)
    with poisoned_empty("all"):
        actual = run_with_gradients(lambda *x: call(*x, impl="triton"), tensors)
    check_runs_equal(actual, expected, what=f"{name}: ")


@pytest.mark.parametrize("case", LENGTH_CASES, ids=length_case_id)
def test_every_length_case(case):
    for width in (1, 6):
        for name, call, tensors in calls(case.lengths, width):
            check_equal_to_reference(name, call, tensors)


# Short, empty, and long enough that a program sees one sequence or a sequence many programs.
SOME_LENGTHS = strategies.lists(
    strategies.just(0) | strategies.integers(1, 40) | strategies.integers(100, 3000), max_size=12
)


@hypothesis.given(lengths=SOME_LENGTHS, width=strategies.sampled_from([1, 3, 16]))
@hypothesis.settings(max_examples=6)
def test_random_lengths(lengths, width):
    for name, call, tensors in calls(lengths, width):
        check_equal_to_reference(name, call, tensors)


def test_any_strides():
    for name, call, tensors in calls((3, 0, 5), 4):
        turned = [
            x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
            for x in tensors
        ]
        check_equal_to_reference(f"{name}, transposed", call, turned)
        sliced = [
            torch.cat([x.detach(), x.detach()], -1)[..., 1:5].requires_grad_() for x in tensors
        ]
        if name != "jagged_dense_bmm":  # its matrices have a width of their own
            check_equal_to_reference(f"{name}, a slice of wider rows", call, sliced)


def test_fp64_is_summed_in_fp64():
    for name, call, tensors in calls((300, 0, 5), 2, dtype=torch.float64):
        if name != "jagged_dense_bmm":
            check_equal_to_reference(name, call, tensors)


MOVED = [
    *(torch.bool, torch.uint8, torch.int16, torch.uint32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
]


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_moves_every_dtype_unchanged(dtype):
    layout, other = Layout.from_lengths([2, 0, 3]), Layout.from_lengths([0, 1, 0])
    for width in (1, 3, 8):
        values = (torch.arange(5 * width) % 2).view(5, width).to(dtype)
        fill = 1.0
        for align in ("left", "right"):
            padded, expected = (
                jagged_to_padded(values, layout, fill=fill, align=align, impl=impl)
                for impl in ("triton", "reference")
            )
            assert same_bits(padded, expected)
            assert same_bits(padded_to_jagged(padded, layout, align=align, impl="triton"), values)
        joined, _ = jagged_concat(values, layout, values[:1], other, impl="triton")
        left, right = jagged_split(joined, layout, other, impl="triton")
        assert same_bits(left, values)
        assert same_bits(right, values[:1])


def test_words_wider_than_eight_bytes():
    layout, other = Layout.from_lengths([2, 0, 3]), Layout.from_lengths([0, 1, 0])
    values = torch.randn(5, 3, dtype=torch.complex128)
    joined, _ = jagged_concat(values, layout, values[:1], other, impl="triton")
    left, right = jagged_split(joined.conj(), layout, other, impl="triton")
    assert torch.equal(left, values.conj())
    assert torch.equal(right, values[:1].conj())
    check_refuses(
        [
            (
                lambda: jagged_to_padded(values, layout, impl="triton"),
                UnsupportedError,
                'use impl="reference"',
            )
        ]
    )


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def test_rows_behind_the_last_offset_are_not_read_and_get_zeros():
    # As in a captured graph that is replayed with fewer tokens than it was captured with. Only
    # the ops take such tensors: the public functions hold lengths and tokens to each other.
    ops, nan = torch.ops.gem_jagged, float("nan")
    offsets = torch.tensor([0, 2, 2, 5])
    values = torch.randn(9, 4)
    values[5:] = nan
    dense = torch.randn(3, 4)
    padded = ops.jagged_to_padded(values, offsets, 4, 3, 0.0, "left", "triton")
    assert padded.isfinite().all()
    for align in ("left", "right"):
        unpadded = ops.padded_to_jagged(padded + 1, offsets, 9, align, "triton")
        assert unpadded[:5].ne(0).all()
        assert unpadded[5:].eq(0).all()
    assert ops.jagged_sum(values, offsets, "triton").isfinite().all()
    spread = ops.jagged_mean_backward(dense, offsets, 9, "triton")
    added = ops.jagged_broadcast_add(values, offsets, dense, "triton")
    weights = torch.randn(3, 4, 4)
    product = ops.jagged_dense_bmm(values, offsets, weights, None, 3, "triton")
    gradients = ops.jagged_dense_bmm_backward(values, values, offsets, weights, 3, True, "triton")
    joined = ops.jagged_concat(values, offsets, values, offsets, "triton")
    left, right = ops.jagged_split(joined, offsets, offsets, 9, "triton")
    kept = ops.jagged_take_last_backward(values, offsets, offsets, 9, "triton")
    for rows in (spread, added, product, gradients[0], left, right, kept):
        assert rows[:5].isfinite().all()
        assert rows[5:].eq(0).all()
    assert joined[:10].isfinite().all()
    assert joined[10:].eq(0).all()
    assert gradients[1].isfinite().all()
    assert gradients[2].isfinite().all()


def test_an_index_that_names_no_sequence_gives_zeros():
    values, offsets = torch.randn(5, 4), torch.tensor([0, 2, 5])
    rows = torch.ops.gem_jagged.jagged_index_select(
        values, offsets, torch.tensor([7, 1, -1]), torch.tensor([0, 1, 4, 5]), 5, "triton"
    )
    assert torch.equal(rows[1:4], values[2:])
    assert rows[[0, 4]].eq(0).all()


def test_row_numbers_pass_int32():
    # Three sequences of 2^30 slots each of one byte; pages that nobody touches take no memory.
    length = 2**30
    padded = torch.empty((3, length, 1), dtype=torch.int8)
    layout = Layout.from_lengths([1, 2, 3], dtype=torch.int32)
    padded[0, 0], padded[1, :2], padded[2, :3] = 1, 2, 3
    values = padded_to_jagged(padded, layout, impl="triton")
    assert values[:, 0].tolist() == [1, 2, 2, 3, 3, 3]
    padded[0, -1], padded[1, -2:], padded[2, -3:] = 4, 5, 6
    values = padded_to_jagged(padded, layout, align="right", impl="triton")
    assert values[:, 0].tolist() == [4, 5, 5, 6, 6, 6]


def test_a_sum_has_the_same_bits_in_every_batch():
    values = torch.randn(1000, 8)
    alone = jagged_sum(values, Layout.from_lengths([1000]), impl="triton")
    batch = torch.cat([torch.randn(77, 8), values, torch.randn(300, 8)])
    together = jagged_sum(batch, Layout.from_lengths([70, 7, 1000, 300]), impl="triton")
    assert torch.equal(together[2], alone[0])


def test_gradients_behind_the_last_offset_are_zero():
    ops, offsets = torch.ops.gem_jagged, torch.tensor([0, 2, 2, 5])
    values = torch.randn(9, 4, requires_grad=True)
    dense, weights = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, 4)
    for out in (
        ops.jagged_broadcast_add(values, offsets, dense, "triton"),
        ops.jagged_dense_bmm(values, offsets, weights, None, 3, "triton"),
        ops.jagged_sum(values, offsets, "triton"),
        ops.jagged_mean(values, offsets, "triton"),
        ops.jagged_to_padded(values, offsets, 4, 3, 0.0, "left", "triton"),
    ):
        [grad] = torch.autograd.grad(out, values, torch.full_like(out, 2.0), retain_graph=True)
        assert grad[:5].ne(0).all()
        assert grad[5:].eq(0).all()


def test_tiles_within_one_sequence():
    """Rows of one word, of which a tile is long: also where some or all have no source."""
    ops = torch.ops.gem_jagged
    long = (3, 0, 1300, 700, 1, 2600, 5)
    layout, other = (Layout.from_lengths(lengths) for lengths in (long, (0, 2000, 5, *long[3:])))
    values = torch.arange(1, layout.total_tokens + 1)[:, None]
    kept = torch.minimum(layout.lengths, torch.tensor(1200)).cumsum(0)
    kept = torch.cat([kept.new_zeros(1), kept])
    chosen, chosen_offsets = torch.tensor([5, 2, 9]), torch.tensor([0, 2600, 3900, 5900])
    padded = torch.arange(1, 7 * 900 + 1).view(7, 900, 1)
    behind = 2100  # rows behind the last offset: whole tiles of them

    def with_tail(rows):
        return torch.cat([rows, rows.new_full((behind, 1), -1)])

    for align in ("left", "right"):
        rows = layout.total_tokens + behind
        # Sequences are longer than the padded length: 0 where a row has no source.
        found = ops.padded_to_jagged(padded, layout.offsets_O, rows, align, "triton")
        for b, (begin, length) in enumerate(zip(layout.offsets_O[:-1], long, strict=True)):
            own = found[begin : begin + length, 0]
            have = min(length, 900)
            row = padded[b, :, 0]
            if align == "left":
                assert torch.equal(own[:have], row[:have])
                assert own[have:].eq(0).all()
            else:
                assert torch.equal(own[length - have :], row[900 - have :])
                assert own[: length - have].eq(0).all()
        assert found[layout.total_tokens :].eq(0).all()
    cases = (
        lambda x, impl: ops.jagged_take_last(x, layout.offsets_O, kept, int(kept[-1]), impl),
        lambda x, impl: ops.jagged_take_last_backward(
            x[: int(kept[-1])], layout.offsets_O, kept, layout.total_tokens, impl
        ),
        lambda x, impl: ops.jagged_index_select(
            x, layout.offsets_O, chosen[:2], chosen_offsets[:3], 3900, impl
        ),
    )
    enough = torch.arange(1, other.total_tokens + 1)[:, None]
    expected = jagged_concat(values, layout, enough, other, impl="reference")[0]
    joined = ops.jagged_concat(
        with_tail(values), layout.offsets_O, with_tail(enough), other.offsets_O, "triton"
    )
    assert torch.equal(joined[: len(expected)], expected)
    assert joined[len(expected) :].eq(0).all()
    parts = ops.jagged_split(
        joined, layout.offsets_O, other.offsets_O, layout.total_tokens + behind, "triton"
    )
    for part, right in zip(parts, (values, enough), strict=True):
        assert torch.equal(part, with_tail(right).clamp(min=0))
    for call in cases:
        assert torch.equal(call(values, "triton"), call(values, "reference"))
    # Two sequences, and 2000 rows for an index that names none.
    found = ops.jagged_index_select(
        values, layout.offsets_O, chosen, chosen_offsets, 5900, "triton"
    )
    assert torch.equal(found[:3900], cases[2](values, "reference"))
    assert found[3900:].eq(0).all()


def test_offsets_and_indices_may_be_strided():
    """Every second number of a longer tensor: kernels must not read the numbers between."""
    ops = torch.ops.gem_jagged

    def spread(*numbers):
        apart = torch.full((2 * len(numbers),), 10**6)
        apart[::2] = torch.tensor(numbers)
        return apart[::2]

    offsets, other, indices = spread(0, 2, 2, 5), spread(0, 1, 1, 2), spread(2, 0)
    values, dense, weights = torch.randn(5, 4), torch.randn(3, 4), torch.randn(3, 4, 4)
    joined, padded = torch.randn(7, 4), torch.randn(3, 3, 4)
    selected = spread(0, 3, 5)
    for call in (
        lambda o, p, i, s, impl: ops.jagged_to_padded(values, o, 3, 3, 0.0, "left", impl),
        lambda o, p, i, s, impl: ops.padded_to_jagged(padded, o, 5, "right", impl),
        lambda o, p, i, s, impl: ops.jagged_concat(values, o, values[:2], p, impl),
        lambda o, p, i, s, impl: ops.jagged_split(joined, o, p, 5, impl),
        lambda o, p, i, s, impl: ops.jagged_take_last(values, o, p, 2, impl),
        lambda o, p, i, s, impl: ops.jagged_index_select(values, o, i, s, 5, impl),
        lambda o, p, i, s, impl: ops.jagged_index_select_backward(values, o, i, s, 5, impl),
        lambda o, p, i, s, impl: ops.jagged_sum(values, o, impl),
        lambda o, p, i, s, impl: ops.jagged_mean_backward(dense, o, 5, impl),
        lambda o, p, i, s, impl: ops.jagged_broadcast_add(values, o, dense, impl),
        lambda o, p, i, s, impl: ops.jagged_dense_bmm(values, o, weights, None, 3, impl),
        lambda o, p, i, s, impl: ops.jagged_dense_bmm_backward(
            values, values, o, weights, 3, True, impl
        ),
    ):
        near = [index.contiguous() for index in (offsets, other, indices, selected)]
        expected = call(*near, "triton")
        actual = call(offsets, other, indices, selected, "triton")
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_wide_rows_fit_a_grid(monkeypatch):
    """Matrices of 1024 x 1024 are summed as rows of 2^20; a second grid axis ends at 65,535."""
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(sums, "_long_sum_kernel", Recorder())
    partial, out = torch.zeros(1, 2**20), torch.zeros(1, 2**20)
    sums.add_long_sums(partial, torch.tensor([0, 1]), out, piece=8192)
    [grid] = grids
    assert max(grid[1:], default=1) <= 65_535
    assert 2**20 // 16 <= grid[0] < 2**31

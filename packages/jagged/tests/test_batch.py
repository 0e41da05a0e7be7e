import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gem_jagged.batch import Jagged, Layout
from gem_jagged.ops import (
    concat_layouts,
    jagged_concat,
    jagged_mean,
    jagged_split,
    jagged_to_padded,
    padded_to_jagged,
)
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError
from gem_opkit.testing import check_compiles_whole, check_refuses, ragged_lengths


def layout_of(offsets, lengths, max_length, dtype=torch.int64):
    return Layout(
        torch.tensor(offsets, dtype=dtype),
        torch.tensor(lengths, dtype=torch.int64),
        max_length,
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "lengths",
    [[2, 0, 3], (2, 0, 3), np.array([2, 0, 3], dtype=np.int32), torch.tensor([2, 0, 3])],
)
def test_lengths_of_any_host_kind_make_a_layout(lengths, dtype):
    layout = Layout.from_lengths(lengths, dtype=dtype).checked("values", 5)
    assert layout.offsets_O.tolist() == [0, 2, 2, 5]
    assert layout.offsets_O.dtype == dtype
    assert layout.lengths.dtype == torch.int64
    assert (layout.batch, layout.total_tokens, layout.max_length) == (3, 5, 3)


def test_a_layout_does_not_change_with_the_callers_array():
    lengths = np.array([2, 3])
    layout = Layout.from_lengths(lengths)
    lengths[0] = 9
    assert layout.lengths.tolist() == [2, 3]


@pytest.mark.parametrize("make", [lambda: Layout.from_lengths([]), lambda: Layout.constant(0, 5)])
def test_batch_of_none(make):
    layout = make().checked("values", 0)
    assert layout.offsets_O.tolist() == [0]
    assert (layout.batch, layout.total_tokens, layout.max_length) == (0, 0, 0)
    batch = Jagged.from_layout(torch.empty(0, 4), layout)
    assert batch.checked("values").to_list() == []


def test_constant_layout_equals_its_lengths():
    for length in (0, 1, 7):
        constant = Layout.constant(3, length, dtype=torch.int32).checked("values")
        assert constant.offsets_O.tolist() == Layout.from_lengths([length] * 3).offsets_O.tolist()


def test_offsets_are_kept_and_read_once():
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    layout = Layout.from_offsets(offsets).checked("values")
    assert layout.offsets_O is offsets
    assert layout.lengths.tolist() == [2, 0, 3]
    assert layout.max_length == 3


def test_list_round_trip_shares_memory():
    parts = [torch.randn(2, 3), torch.randn(0, 3), torch.randn(1, 3)]
    batch = Jagged.from_list(parts).checked("values")
    back = batch.to_list()
    assert all(torch.equal(a, b) for a, b in zip(parts, back, strict=True))
    assert back[0].data_ptr() == batch.values.data_ptr()


def test_with_values_shares_the_layout():
    batch = Jagged.from_lengths(torch.arange(5), [2, 0, 3])
    wide = batch.with_values(torch.zeros(5, 8))
    assert wide.offsets_O is batch.offsets_O
    assert wide.lengths is batch.lengths
    with pytest.raises(ShapeError, match="4 tokens but the lengths sum to 5"):
        batch.with_values(torch.zeros(4))


def test_moving_keeps_lengths_on_the_host():
    batch = Jagged.from_lengths(torch.arange(5), [2, 0, 3]).to("meta")
    assert batch.values.device.type == batch.offsets_O.device.type == "meta"
    assert batch.lengths.tolist() == [2, 0, 3]
    assert batch.layout.total_tokens == 5
    layout = Layout.from_lengths([1])
    assert layout.to("cpu") is layout


def test_fields_cannot_be_assigned():
    layout = Layout.from_lengths([1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.max_length = 3


@pytest.mark.parametrize("level", ["shapes", "values"])
def test_bad_host_memory_is_found_at_both_levels(level):
    values = torch.zeros(5)
    offsets, lengths = torch.tensor([0, 2, 5]), torch.tensor([2, 3])
    check_refuses(
        [
            (
                lambda: Jagged(torch.zeros(4), offsets, lengths, 3).checked(level),
                ShapeError,
                "values has 4 tokens but the lengths sum to 5",
            ),
            (
                lambda: Jagged(torch.zeros(6), offsets, lengths, 3).checked(level),
                ShapeError,
                "values has 6 tokens but the lengths sum to 5",
            ),
            (
                lambda: Jagged(values, offsets.float(), lengths, 3).checked(level),
                DtypeError,
                "offsets_O must be int32 or int64; got torch.float32",
            ),
            (
                lambda: Jagged(values, offsets[:2], lengths, 3).checked(level),
                ShapeError,
                "lengths has B=2 but offsets_O has B=1",
            ),
            (
                lambda: Jagged(values, offsets[:0], lengths, 3).checked(level),
                ShapeError,
                r"offsets_O must have one dim of B\+1",
            ),
            (
                lambda: Jagged(values, offsets, torch.tensor([6, -1]), 6).checked(level),
                ShapeError,
                r"lengths\[1\] must be at least 0; got -1",
            ),
            (
                lambda: Jagged(values, offsets, lengths.int(), 3).checked(level),
                DtypeError,
                "lengths must be int64 on the CPU; got torch.int32",
            ),
            (
                lambda: Jagged(values, offsets, lengths, 2).checked(level),
                ShapeError,
                "max_length must be the longest length, 3; got 2",
            ),
            (
                lambda: Jagged(values, offsets.to("meta"), lengths, 3).checked(level),
                DeviceError,
                "offsets_O must be on cpu",
            ),
            (
                lambda: Jagged(torch.tensor(1), offsets, lengths, 3).checked(level),
                ShapeError,
                "values must have a token dim",
            ),
        ]
    )


@pytest.mark.parametrize("lengths", [None, "abc", object(), [[1], [1, 2]]])
def test_what_is_no_list_of_numbers_is_refused(lengths):
    with pytest.raises(DtypeError, match=r"lengths must be a list, .*; got .*; count the tokens"):
        Layout.from_lengths(lengths)


def test_lengths_whose_sum_wraps_int64_are_refused():
    huge = [2**62, 2**62, 2**62, 2**62, 5]  # int64 would call this 5
    with pytest.raises(ShapeError, match=r"lengths must sum to less than 2\^63"):
        Layout.from_lengths(huge)
    wrapped = Layout(torch.zeros(6, dtype=torch.int64), torch.tensor(huge), 2**62, 5)
    with pytest.raises(ShapeError, match=r"lengths must sum to less than 2\^63"):
        wrapped.checked("shapes")


def test_sequences_on_different_devices_are_refused():
    with pytest.raises(DeviceError, match=r"sequences\[1\] must be on cpu .*; got meta"):
        Jagged.from_list([torch.zeros(2), torch.zeros(1, device="meta")])


def test_bad_offsets_are_found_by_their_values_and_name_the_first_bad_row():
    values = torch.zeros(5)

    def checked(offsets, lengths, max_length):
        layout = layout_of(offsets, lengths, max_length)
        return Jagged(values, layout.offsets_O, layout.lengths, max_length).checked("values")

    check_refuses(
        [
            (lambda: checked([1, 2, 5], [2, 3], 3), ShapeError, r"offsets_O\[0\] must be 0; got 1"),
            (
                lambda: checked([0, 4, 2, 1, 5], [4, 0, 0, 1], 4),
                ShapeError,
                r"offsets_O\[2\] must be at least 4.*got 2 \(row 1\)",
            ),
            (
                lambda: checked([0, 2, 9], [2, 3], 3),
                ShapeError,
                r"offsets_O\[2\] must be 5, as lengths\[1\] is 3; got 9 \(row 1\)",
            ),
            (
                lambda: checked([0, 3, 5], [2, 3], 3),
                ShapeError,
                r"offsets_O\[1\] must be 2, .* got 3 \(row 0\)",
            ),
            (
                lambda: Layout.from_offsets(torch.tensor([0, 3, 1, 0])),
                ShapeError,
                r"offsets_O\[2\] must be at least 3.*got 1 \(row 1\)",
            ),
        ]
    )
    # The same faults pass the level that reads no offset: that is what it promises.
    layout_of([0, 3, 5], [2, 3], 3).checked("shapes")


def test_refuses():
    layout = Layout.from_lengths([2, 3])
    check_refuses(
        [
            (lambda: Layout.from_lengths([1, -2]), ShapeError, r"lengths\[1\] .* got -2"),
            (lambda: Layout.from_lengths([[1], [2]]), ShapeError, "lengths must have one dim"),
            (lambda: Layout.from_lengths([1.5]), DtypeError, "lengths must be integers"),
            (lambda: Layout.from_lengths([True]), DtypeError, "got torch.bool"),
            (
                lambda: Layout.from_lengths(torch.zeros(2, dtype=torch.int64, device="meta")),
                DeviceError,
                "lengths must be in host memory; got meta",
            ),
            (
                lambda: Layout.from_lengths([1], dtype=torch.int16),
                DtypeError,
                "offsets_O must be int32 or int64; got torch.int16",
            ),
            (
                lambda: Layout.from_lengths([2**30, 2**30], dtype=torch.int32),
                ShapeError,
                "hold the total of 2147483648 tokens",
            ),
            (
                lambda: Layout.constant(2**16, 2**15, dtype=torch.int32),
                ShapeError,
                "hold the total of 2147483648 tokens",
            ),
            (lambda: Layout.constant(-1, 3), ShapeError, "batch must be at least 0; got -1"),
            (lambda: layout.checked("deep"), ConfigError, "level must be .* got 'deep'"),
            (lambda: Jagged.from_list([]), ShapeError, "sequences must have at least one"),
            (
                lambda: Jagged.from_list([torch.zeros(1, 2), torch.zeros(1, 3)]),
                ShapeError,
                r"sequences\[1\] must have shape \(length, 2\); got \(1, 3\)",
            ),
            (
                lambda: Jagged.from_list([torch.zeros(1), torch.zeros(1, dtype=torch.int64)]),
                DtypeError,
                r"sequences\[1\] must be torch.float32",
            ),
            (
                lambda: Jagged.from_lengths(torch.zeros(4), [2, 3]),
                ShapeError,
                "values has 4 tokens but the lengths sum to 5",
            ),
        ]
    )


@given(ragged_lengths(), st.sampled_from(["left", "right"]), st.booleans(), st.data())
def test_padding_there_and_back_changes_nothing(lengths, align, narrow, data):
    dtype = torch.int32 if narrow else torch.int64
    layout = Layout.from_lengths(lengths, dtype=dtype)
    values = torch.randint(-(2**62), 2**62, (layout.total_tokens, 2))
    spare = data.draw(st.integers(0, 3))
    padded = jagged_to_padded(values, layout, length=layout.max_length + spare, fill=7, align=align)
    assert torch.equal(padded_to_jagged(padded, layout, align=align), values)
    held = sum(lengths) * 2
    assert int((padded != 7).sum()) <= held
    batch = Jagged.from_layout(values, layout)
    again = Jagged.from_list(batch.to_list()) if lengths else batch
    assert torch.equal(again.values, values)
    assert again.offsets_O.tolist() == layout.offsets_O.tolist()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_joining_and_splitting_changes_nothing(pairs):
    left, right = (Layout.from_lengths([pair[side] for pair in pairs]) for side in (0, 1))
    a, b = torch.randn(left.total_tokens, 2), torch.randn(right.total_tokens, 2)
    joined, layout = jagged_concat(a, left, b, right)
    layout.checked("values", joined.shape[0])
    left_again, right_again = jagged_split(joined, left, right)
    assert torch.equal(left_again, a)
    assert torch.equal(right_again, b)
    # Means weighted by length add up to the mean of the whole.
    total = (
        jagged_mean(a, left) * left.lengths[:, None]
        + jagged_mean(b, right) * right.lengths[:, None]
    )
    torch.testing.assert_close(jagged_mean(joined, layout) * layout.lengths[:, None], total)


# Unlike every number of sequences and offsets below: equal sizes share a symbol of the graph.
WIDTH = 11


def block(values, layout, summary, summary_layout, joined_layout, weight):
    """What a layer does between its matmuls; every operator, and bundles built inside."""
    batch = Jagged.from_layout(values, layout)
    normed = batch.with_values(torch.nn.functional.layer_norm(batch.values @ weight, (WIDTH,)))
    joined, joined_layout = jagged_concat(
        normed.values, normed.layout, summary, summary_layout, layout=joined_layout
    )
    history, _ = jagged_split(joined, normed.layout, summary_layout)
    inner = Layout(layout.offsets_O, layout.lengths, layout.max_length, layout.total_tokens)
    padded = jagged_to_padded(history, inner)
    back = padded_to_jagged(padded * 2, inner)
    return jagged_mean(back, inner), jagged_mean(joined, joined_layout)


def test_a_block_is_one_graph_for_all_lengths():
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def inputs(lengths):
        layout = Layout.from_lengths(lengths)
        summary_layout = Layout.constant(len(lengths), 2)
        values = torch.randn(layout.total_tokens, WIDTH, requires_grad=True)
        summary = torch.randn(summary_layout.total_tokens, WIDTH, requires_grad=True)
        joined = concat_layouts(layout, summary_layout)
        return values, layout, summary, summary_layout, joined, weight

    check_compiles_whole(
        block, [inputs((3, 0, 5)), inputs((1, 7, 2)), inputs((6, 2, 9, 4))], max_graphs=2
    )


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_an_empty_batch_after_a_warm_one(lengths):
    whole = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = torch.randn(WIDTH, WIDTH)
    for sizes in ((3, 0, 5), lengths, (2, 2)):
        layout, summary = Layout.from_lengths(sizes), Layout.constant(len(sizes), 1)
        values, tokens = torch.randn(sum(sizes), WIDTH), torch.randn(len(sizes), WIDTH)
        joined = concat_layouts(layout, summary)
        mean, both = whole(values, layout, tokens, summary, joined, weight)
        assert mean.shape == both.shape == (len(sizes), WIDTH)
        assert mean.isfinite().all()
        eager = block(values, layout, tokens, summary, joined, weight)
        torch.testing.assert_close((mean, both), eager)

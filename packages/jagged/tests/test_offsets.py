import pytest
import torch
from hypothesis import given

from gem_jagged.offsets import lengths_to_offsets, offsets_to_lengths, positions, sequence_ids
from gem_opkit.errors import ShapeError
from gem_opkit.testing import check_compiles_whole, check_refuses, ragged_lengths


@given(ragged_lengths())
def test_lengths_and_offsets_are_inverse(lengths):
    lengths_B = torch.tensor(lengths, dtype=torch.int32)
    offsets_O = lengths_to_offsets(lengths_B)
    assert offsets_O.dtype == torch.int64
    assert offsets_O[0] == 0
    assert offsets_to_lengths(offsets_O).tolist() == lengths
    assert offsets_to_lengths(offsets_O.int()).dtype == torch.int64


@given(ragged_lengths())
def test_ids_and_positions_name_each_token(lengths):
    offsets_O = lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64)).int()
    total = sum(lengths)
    expected = [(row, place) for row, length in enumerate(lengths) for place in range(length)]
    ids, places = sequence_ids(offsets_O, total), positions(offsets_O, total)
    assert list(zip(ids.tolist(), places.tolist(), strict=True)) == expected
    assert ids.dtype == places.dtype == torch.int64


def test_tokens_past_the_end_belong_to_no_sequence():
    offsets_O = torch.tensor([0, 2, 3])
    assert sequence_ids(offsets_O, 5).tolist() == [0, 0, 1, 2, 2]
    assert positions(offsets_O, 5).tolist() == [0, 1, 0, 0, 1]


def test_offsets_past_the_tokens_are_refused():
    with pytest.raises(RuntimeError, match="out of bounds"):
        sequence_ids(torch.tensor([0, 2, 7]), 5)


def test_lengths_sum_beyond_int32():
    big = torch.tensor([2**31 - 1, 2**31 - 1], dtype=torch.int32)
    assert lengths_to_offsets(big).tolist() == [0, 2**31 - 1, 2**32 - 2]


def test_compiles_whole():
    def ids_and_positions(values_TD, offsets_O):
        total = values_TD.shape[0]
        return values_TD * (sequence_ids(offsets_O, total) + positions(offsets_O, total))[:, None]

    sets = []
    for lengths in ((3, 0, 5), (2, 7), (1, 1, 4, 4)):
        values = torch.randn(sum(lengths), 2, requires_grad=True)
        sets.append((values, lengths_to_offsets(torch.tensor(lengths))))
    check_compiles_whole(ids_and_positions, sets)


def test_refuses():
    empty = torch.zeros(0, dtype=torch.int64)
    check_refuses(
        [
            (lambda: sequence_ids(empty, 0), ShapeError, "at least one offset"),
            (lambda: offsets_to_lengths(empty), ShapeError, "at least one offset"),
            (lambda: positions(torch.zeros(1, 2), 0), ShapeError, "must have 1 dims"),
            (lambda: lengths_to_offsets(torch.zeros(1, 2)), ShapeError, "must have 1 dims"),
        ]
    )


@pytest.mark.gpu
def test_waits_for_no_gpu():
    offsets_O = torch.tensor([0, 2, 2, 5], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        places = positions(offsets_O, 5)
        offsets_to_lengths(offsets_O)
        lengths_to_offsets(offsets_O)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert places.tolist() == [0, 1, 0, 1, 2]

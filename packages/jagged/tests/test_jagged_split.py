import pytest
import torch

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_split import reference
from gem_jagged.kernels.jagged_split.cases import CASES
from gem_jagged.kernels.jagged_split.cost import jagged_split_cost
from gem_jagged.ops import jagged_split
from gem_opkit.errors import DeviceError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_interpreted_kernel,
    check_kernel_on_gpu,
    check_ragged_edges,
    check_reference_gradients,
    check_refuses,
    check_registration,
    take_sequences,
)

SMALL = [pair for pair in CASES if pair[0].device == "cpu" and pair[0].total_tokens < 100]


def inputs(left_lengths, right_lengths, *, width=3, offsets=torch.int64):
    total = sum(left_lengths) + sum(right_lengths)
    values = torch.randn(total, width, requires_grad=True)
    left = Layout.from_lengths(left_lengths)
    return values, left, Layout.from_lengths(right_lengths, dtype=offsets)


def oracle(values_TD, left_layout, right_layout):
    """One sequence after the other, in plain torch."""
    left_lengths, right_lengths = left_layout.lengths.tolist(), right_layout.lengths.tolist()
    both = [n for pair in zip(left_lengths, right_lengths, strict=True) for n in pair]
    parts = values_TD.split(both)
    nothing = values_TD[:0]
    return torch.cat([nothing, *parts[0::2]]), torch.cat([nothing, *parts[1::2]])


def test_reference_gradients():
    check_reference_gradients(jagged_split, inputs((3, 0, 2, 1), (1, 2, 0, 4)), reference=oracle)


def test_registration():
    values, left, right = inputs((3, 0, 2), (1, 2, 0))
    cost = jagged_split_cost(left_tokens=5, right_tokens=3, width=3, element_bytes=4)
    check_registration(
        torch.ops.gem_jagged.jagged_split,
        (values, left.offsets_O, right.offsets_O, 5, "reference"),
        cost=cost,
        backward_cost=cost,
    )
    check_registration(
        torch.ops.gem_jagged.jagged_split_backward,
        (torch.randn(5, 3), torch.randn(3, 3), left.offsets_O, right.offsets_O, "reference"),
        cost=cost,
    )


def test_compiles_whole():
    check_compiles_whole(
        jagged_split,
        [
            inputs((3, 0, 5), (2, 3, 0)),
            inputs((2, 7, 2), (1, 1, 4)),
            inputs((9, 4, 1, 1), (3, 3, 5, 6)),
        ],
    )


@pytest.mark.interpreter
def test_interpreted_kernel():
    check_interpreted_kernel(jagged_split, oracle, inputs((3, 0, 67, 1), (1, 2, 0, 30), width=24))


@pytest.mark.gpu
def test_kernel_on_gpu():
    check_kernel_on_gpu(jagged_split, oracle, inputs((3, 0, 670, 1), (130, 2, 0, 30), width=96))


@pytest.mark.parametrize("other", ["reversed", "none", "summary"])
def test_ragged_edges(other):
    def make(case):
        right = {
            "reversed": case.lengths[::-1],
            "none": (0,) * case.batch,
            "summary": (2,) * case.batch,
        }[other]
        return inputs(case.lengths, right, offsets=torch.int32)

    check_ragged_edges(jagged_split, oracle, make)


def test_alone_equals_in_batch():
    left_lengths, right_lengths = (3, 0, 2, 1), (1, 2, 0, 4)
    values, _, _ = inputs(left_lengths, right_lengths)
    lengths = [a + b for a, b in zip(left_lengths, right_lengths, strict=True)]

    def make(picked):
        return (
            take_sequences(values, lengths, picked),
            Layout.from_lengths([left_lengths[i] for i in picked]),
            Layout.from_lengths([right_lengths[i] for i in picked]),
        )

    def apart(result, _):
        counts = [left_lengths, right_lengths]
        if result[0].shape[0] != sum(left_lengths) or result[1].shape[0] != sum(right_lengths):
            return [result]  # one sequence alone
        parts = [side.split(list(count)) for side, count in zip(result, counts, strict=True)]
        return list(zip(*parts, strict=True))

    check_alone_equals_in_batch(
        jagged_split, make, lengths, leaves=[values], split=apart, bitwise=True
    )


def test_refuses():
    values, left, right = inputs((3, 0, 2), (1, 2, 0))
    check_refuses(
        [
            (
                lambda: jagged_split(values[:7], left, right),
                ShapeError,
                "7 tokens but left_layout has 5 and right_layout 3",
            ),
            (
                lambda: jagged_split(torch.zeros(9, 3), left, right),
                ShapeError,
                "9 tokens but left_layout has 5 and right_layout 3",
            ),
            (
                lambda: jagged_split(values, left, Layout.from_lengths([3, 0])),
                ShapeError,
                "B=2 .* B=3",
            ),
            (
                lambda: jagged_split(values, left, right.to("meta")),
                DeviceError,
                "right_layout.offsets_O must be on cpu",
            ),
            (
                lambda: jagged_split(values, left, right, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


@pytest.mark.parametrize("pair", SMALL, ids=lambda pair: pair[0].name)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_moves_any_dtype_unchanged(pair, dtype):
    left, right = (Layout.from_lengths(case.lengths) for case in pair)
    values = torch.randint(0, 2, (left.total_tokens + right.total_tokens, pair[0].width))
    values = values.to(dtype) if dtype == torch.bool else values * (2**62 + 1)
    for actual, expected in zip(
        jagged_split(values, left, right), oracle(values, left, right), strict=True
    ):
        assert actual.dtype == dtype
        assert torch.equal(actual, expected)


def test_takes_one_and_three_dims_and_any_strides():
    left, right = Layout.from_lengths([1, 2]), Layout.from_lengths([2, 0])
    a, b = jagged_split(torch.arange(10)[::2], left, right)
    assert (a.tolist(), b.tolist()) == ([0, 6, 8], [2, 4])
    heads = torch.randn(4, 5, 2).permute(1, 2, 0)
    a, b = jagged_split(heads, left, right)
    assert torch.equal(a, heads[[0, 3, 4]])
    assert torch.equal(b, heads[1:3])


def test_one_part_unused_gets_zero_gradient():
    values, left, right = inputs((3, 0, 2), (1, 2, 0))
    jagged_split(values, left, right)[1].sum().backward()
    assert values.grad[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]


def test_row_numbers_pass_int32(monkeypatch):
    # Two sides whose int32 offsets each fit, and whose sum does not. Only the ids of the 2^31
    # tokens on the right are left out; the arithmetic is that of the operator.
    big = 2**31 - 1
    ids = {2: torch.tensor([0, 1]), 0: torch.tensor([], dtype=torch.int64)}
    monkeypatch.setattr(reference, "sequence_ids", lambda offsets_O, total: ids[total])
    left = torch.tensor([0, 1, 2], dtype=torch.int32)
    right = torch.tensor([0, big, big], dtype=torch.int32)
    rows, _ = reference.split_rows(left, right, 2, 0)
    assert rows.tolist() == [0, big + 1]


@pytest.mark.gpu
def test_waits_for_no_gpu():
    values, left, right = inputs((3, 0, 2), (1, 2, 0))
    values = values.detach().cuda().requires_grad_()
    left, right = left.to("cuda"), right.to("cuda")
    upstream = torch.ones(3, 3, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        jagged_split(values, left, right)[1].backward(upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert values.grad[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]

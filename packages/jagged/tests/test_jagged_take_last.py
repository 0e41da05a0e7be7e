import pytest
import torch

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_take_last.cost import (
    jagged_take_last_backward_cost,
    jagged_take_last_cost,
)
from gem_jagged.ops import jagged_take_last, last_layout
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


def inputs(lengths, *, count=4, width=3, offsets=torch.int64):
    values = torch.randn(sum(lengths), width, requires_grad=True)
    layout = Layout.from_lengths(lengths, dtype=offsets)
    return values, layout, count, last_layout(layout, count)


def take(values_TD, layout, count, kept, **more):
    return jagged_take_last(values_TD, layout, count, kept=kept, **more)[0]


def oracle(values_TD, layout, count, kept):
    """One sequence after the other, in plain torch."""
    parts = values_TD.split(layout.lengths.tolist())
    return torch.cat([values_TD[:0], *(part[max(0, len(part) - count) :] for part in parts)])


@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_reference_gradients(count):
    check_reference_gradients(take, inputs((3, 0, 6, 1), count=count), reference=oracle)


def test_registration():
    values, layout, _, kept = inputs((3, 0, 6))
    cost = jagged_take_last_cost(kept_tokens=7, width=3, element_bytes=4)
    backward_cost = jagged_take_last_backward_cost(
        kept_tokens=7, total_tokens=9, width=3, element_bytes=4
    )
    check_registration(
        torch.ops.gem_jagged.jagged_take_last,
        (values, layout.offsets_O, kept.offsets_O, 7, "reference"),
        cost=cost,
        backward_cost=backward_cost,
    )
    check_registration(
        torch.ops.gem_jagged.jagged_take_last_backward,
        (torch.randn(7, 3), layout.offsets_O, kept.offsets_O, 9, "reference"),
        cost=backward_cost,
    )


def test_compiles_whole():
    check_compiles_whole(take, [inputs((3, 0, 5)), inputs((2, 7, 2)), inputs((9, 4, 1, 1))])


@pytest.mark.interpreter
def test_interpreted_kernel():
    check_interpreted_kernel(take, oracle, inputs((3, 0, 67, 1), count=5, width=24))


@pytest.mark.gpu
def test_kernel_on_gpu():
    check_kernel_on_gpu(take, oracle, inputs((3, 0, 670, 1, 130), count=100, width=96))


def test_ragged_edges():
    check_ragged_edges(
        take, oracle, lambda case: inputs(case.lengths, count=2, offsets=torch.int32)
    )


def test_alone_equals_in_batch():
    lengths = (3, 0, 6, 1)
    values, *_ = inputs(lengths)

    def make(picked):
        layout = Layout.from_lengths([lengths[i] for i in picked])
        return take_sequences(values, lengths, picked), layout, 4, last_layout(layout, 4)

    check_alone_equals_in_batch(take, make, (3, 0, 4, 1), leaves=[values], bitwise=True)


def test_refuses():
    values, layout, _, kept = inputs((3, 0, 6))
    check_refuses(
        [
            (lambda: jagged_take_last(values[:8], layout, 4), ShapeError, "8 tokens .* sum to 9"),
            (lambda: jagged_take_last(values, layout, -1), ShapeError, "count must .* got -1"),
            (lambda: last_layout(layout, -1), ShapeError, "count must .* got -1"),
            (
                lambda: jagged_take_last(values, layout, 5, kept=kept),
                ShapeError,
                "kept must hold the last 5 tokens of the 3 sequences; got 3 sequences of 7",
            ),
            (
                lambda: jagged_take_last(values, layout, 4, kept=kept.to("meta")),
                DeviceError,
                "kept.offsets_O must be on cpu",
            ),
            (
                lambda: jagged_take_last(values, layout, 4, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_moves_any_dtype_and_says_the_new_layout(dtype):
    layout = Layout.from_lengths([3, 0, 1], dtype=torch.int32)
    values, kept = jagged_take_last(torch.tensor([0, 1, 0, 1]).to(dtype), layout, 2)
    assert values.dtype == dtype
    assert values.double().tolist() == [1, 0, 1]
    kept.checked("values", 3)
    assert kept.offsets_O.dtype == torch.int32
    assert (kept.lengths.tolist(), kept.max_length, kept.total_tokens) == ([2, 0, 1], 2, 3)

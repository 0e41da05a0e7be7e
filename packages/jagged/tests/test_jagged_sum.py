import pytest
import torch

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_sum.cost import jagged_sum_backward_cost, jagged_sum_cost
from gem_jagged.ops import jagged_sum
from gem_opkit.errors import DeviceError, DtypeError, ShapeError, UnsupportedError
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


def inputs(lengths, *, width=3, dtype=torch.float32, offsets=torch.int64):
    values = torch.randn(sum(lengths), width, dtype=dtype, requires_grad=True)
    return values, Layout.from_lengths(lengths, dtype=offsets)


def oracle(values_TD, layout):
    """One sequence after the other, in plain torch."""
    rows = [part.sum(0) for part in values_TD.split(layout.lengths.tolist())]
    # The sum over nothing keeps an empty batch differentiable.
    nothing = values_TD.sum() * 0
    return torch.stack(rows) + nothing if rows else values_TD.new_empty((0, 3)) + nothing


def test_reference_gradients():
    check_reference_gradients(jagged_sum, inputs((3, 0, 6, 1)), reference=oracle)


def test_registration():
    values, layout = inputs((3, 0, 6))
    size = {"batch": 3, "total_tokens": 9, "width": 3, "element_bytes": 4}
    check_registration(
        torch.ops.gem_jagged.jagged_sum,
        (values, layout.offsets_O, "reference"),
        cost=jagged_sum_cost(**size),
        backward_cost=jagged_sum_backward_cost(**size),
    )
    check_registration(
        torch.ops.gem_jagged.jagged_sum_backward,
        (torch.randn(3, 3), layout.offsets_O, 9, "reference"),
        cost=jagged_sum_backward_cost(**size),
    )


def test_compiles_whole():
    check_compiles_whole(jagged_sum, [inputs((3, 0, 5)), inputs((2, 7, 2)), inputs((9, 4, 1, 1))])


@pytest.mark.interpreter
def test_interpreted_kernel():
    check_interpreted_kernel(jagged_sum, oracle, inputs((3, 0, 67, 1, 600), width=24))


@pytest.mark.gpu
def test_kernel_on_gpu():
    check_kernel_on_gpu(jagged_sum, oracle, inputs((3, 0, 6700, 1, 130), width=96))


def test_ragged_edges():
    check_ragged_edges(jagged_sum, oracle, lambda case: inputs(case.lengths, offsets=torch.int32))


def test_alone_equals_in_batch():
    lengths = (3, 0, 6, 1)
    values, _ = inputs(lengths)

    def make(picked):
        return (
            take_sequences(values, lengths, picked),
            Layout.from_lengths([lengths[i] for i in picked]),
        )

    check_alone_equals_in_batch(
        jagged_sum, make, lengths, leaves=[values], split="sequences", bitwise=True
    )


def test_refuses():
    values, layout = inputs((3, 0, 6))
    check_refuses(
        [
            (lambda: jagged_sum(values[:8], layout), ShapeError, "8 tokens .* sum to 9"),
            (
                lambda: jagged_sum(torch.zeros(9, 3, dtype=torch.int64), layout),
                DtypeError,
                "values_TD must be floating point; got torch.int64",
            ),
            (lambda: jagged_sum(torch.zeros(9, 3, 1, 1), layout), ShapeError, "1 to 3 dims"),
            (
                lambda: jagged_sum(values, layout.to("meta")),
                DeviceError,
                "offsets_O must be on cpu",
            ),
            (
                lambda: jagged_sum(values, layout, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_sequences_are_not_summed_in_half_precision(dtype):
    # A sum of ones in bfloat16 stands still at 256, one in float16 at 2048.
    values = torch.ones(3073, 2, dtype=dtype)
    assert jagged_sum(values, Layout.from_lengths([1, 3072])).tolist() == [[1, 1], [3072, 3072]]


def test_takes_one_and_three_dims_and_any_strides():
    layout = Layout.from_lengths([2, 0, 3])
    assert jagged_sum(torch.arange(10.0)[::2], layout).tolist() == [2.0, 0.0, 18.0]
    heads = torch.randn(4, 5, 2).permute(1, 2, 0)
    sums = jagged_sum(heads, layout)
    assert sums.shape == (3, 2, 4)
    torch.testing.assert_close(sums[2], heads[2:].sum(0))


def test_nan_stays_in_its_own_sequence():
    values = torch.ones(5, 2)
    values[1] = float("nan")
    sums = jagged_sum(values, Layout.from_lengths([2, 0, 3]))
    assert sums[0].isnan().all()
    assert sums[1:].tolist() == [[0.0, 0.0], [3.0, 3.0]]

import pytest
import torch

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_broadcast_add.cost import (
    jagged_broadcast_add_backward_cost,
    jagged_broadcast_add_cost,
)
from gem_jagged.ops import jagged_broadcast_add
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


def inputs(lengths, *, width=3, offsets=torch.int64):
    values = torch.randn(sum(lengths), width, requires_grad=True)
    dense = torch.randn(len(lengths), width, requires_grad=True)
    return values, Layout.from_lengths(lengths, dtype=offsets), dense


def oracle(values_TD, layout, dense_BD):
    """One sequence after the other, in plain torch."""
    parts = values_TD.split(layout.lengths.tolist())
    rows = [part + row for part, row in zip(parts, dense_BD, strict=True)]
    # The sum over nothing keeps an empty batch differentiable.
    return torch.cat([values_TD[:0], *rows]) + dense_BD.sum() * 0


def test_reference_gradients():
    check_reference_gradients(jagged_broadcast_add, inputs((3, 0, 6, 1)), reference=oracle)


def test_registration():
    values, layout, dense = inputs((3, 0, 6))
    size = {"batch": 3, "total_tokens": 9, "width": 3, "element_bytes": 4}
    check_registration(
        torch.ops.gem_jagged.jagged_broadcast_add,
        (values, layout.offsets_O, dense, "reference"),
        cost=jagged_broadcast_add_cost(**size),
        backward_cost=jagged_broadcast_add_backward_cost(**size),
    )
    check_registration(
        torch.ops.gem_jagged.jagged_broadcast_add_backward,
        (torch.randn(9, 3), layout.offsets_O, "reference"),
        cost=jagged_broadcast_add_backward_cost(**size),
    )


def test_compiles_whole():
    check_compiles_whole(
        jagged_broadcast_add, [inputs((3, 0, 5)), inputs((2, 7, 2)), inputs((9, 4, 1, 1))]
    )


@pytest.mark.interpreter
def test_interpreted_kernel():
    check_interpreted_kernel(jagged_broadcast_add, oracle, inputs((3, 0, 67, 1, 600), width=24))


@pytest.mark.gpu
def test_kernel_on_gpu():
    check_kernel_on_gpu(jagged_broadcast_add, oracle, inputs((3, 0, 6700, 1, 130), width=96))


def test_ragged_edges():
    check_ragged_edges(
        jagged_broadcast_add, oracle, lambda case: inputs(case.lengths, offsets=torch.int32)
    )


def test_alone_equals_in_batch():
    lengths = (3, 0, 6, 1)
    values, _, dense = inputs(lengths)

    def make(picked):
        return (
            take_sequences(values, lengths, picked),
            Layout.from_lengths([lengths[i] for i in picked]),
            dense[list(picked)],
        )

    check_alone_equals_in_batch(
        jagged_broadcast_add, make, lengths, leaves=[values, dense], bitwise=True
    )


def test_refuses():
    values, layout, dense = inputs((3, 0, 6))
    check_refuses(
        [
            (
                lambda: jagged_broadcast_add(values[:8], layout, dense),
                ShapeError,
                "8 tokens .* sum to 9",
            ),
            (lambda: jagged_broadcast_add(values, layout, dense[:2]), ShapeError, "B=2 .* B=3"),
            (
                lambda: jagged_broadcast_add(
                    values.reshape(9, 3, 1), layout, dense.reshape(3, 1, 3)
                ),
                ShapeError,
                r"dense_BD has rows of shape \(1, 3\)",
            ),
            (
                lambda: jagged_broadcast_add(values, layout, dense.double()),
                DtypeError,
                "dense_BD must be torch.float32 like values_TD; got torch.float64",
            ),
            (
                lambda: jagged_broadcast_add(values.long(), layout, dense.long()),
                DtypeError,
                "values_TD must be floating point",
            ),
            (
                lambda: jagged_broadcast_add(values, layout, dense.to("meta")),
                DeviceError,
                "dense_BD must be on cpu like values_TD; got meta",
            ),
            (
                lambda: jagged_broadcast_add(values, layout, dense, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


def test_takes_one_and_three_dims():
    layout = Layout.from_lengths([2, 0, 1])
    out = jagged_broadcast_add(torch.arange(3.0), layout, torch.tensor([10.0, 20.0, 30.0]))
    assert out.tolist() == [10, 11, 32]
    heads, rows = torch.randn(3, 2, 4), torch.randn(3, 4, 2).transpose(1, 2)
    assert torch.equal(jagged_broadcast_add(heads, layout, rows)[2], heads[2] + rows[2])

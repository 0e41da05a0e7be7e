import pytest
import torch

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_dense_bmm.cost import (
    jagged_dense_bmm_backward_cost,
    jagged_dense_bmm_cost,
)
from gem_jagged.ops import jagged_dense_bmm
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


def inputs(lengths, *, width=3, out_width=5, offsets=torch.int64):
    values = torch.randn(sum(lengths), width, requires_grad=True)
    dense = torch.randn(len(lengths), width, out_width, requires_grad=True)
    bias = torch.randn(len(lengths), out_width, requires_grad=True)
    return values, Layout.from_lengths(lengths, dtype=offsets), dense, bias


def product(values_TD, layout, dense_BDF, bias_BF=None, **more):
    return jagged_dense_bmm(values_TD, layout, dense_BDF, bias_BF=bias_BF, **more)


def oracle(values_TD, layout, dense_BDF, bias_BF=None):
    """One sequence after the other, in plain torch; half precision is summed in fp32."""
    dtype = values_TD.dtype
    inner = dtype if dtype == torch.float64 else torch.float32
    rows = []
    for b, part in enumerate(values_TD.split(layout.lengths.tolist())):
        row = part.to(inner) @ dense_BDF[b].to(inner)
        rows.append((row if bias_BF is None else row + bias_BF[b].to(inner)).to(dtype))
    # The sums over nothing keep an empty batch differentiable.
    nothing = dense_BDF.sum() * 0 + (0 if bias_BF is None else bias_BF.sum() * 0)
    empty = values_TD.new_empty((0, dense_BDF.shape[2])) + values_TD.sum() * 0
    return torch.cat([empty, *rows]) + nothing


@pytest.mark.parametrize("has_bias", [True, False])
def test_reference_gradients(has_bias):
    check_reference_gradients(
        product, inputs((3, 0, 6, 1))[: 4 if has_bias else 3], reference=oracle
    )


@pytest.mark.parametrize("has_bias", [True, False])
def test_registration(has_bias):
    values, layout, dense, bias = inputs((3, 0, 6))
    size = {"batch": 3, "total_tokens": 9, "width": 3, "out_width": 5, "element_bytes": 4}
    size["has_bias"] = has_bias
    check_registration(
        torch.ops.gem_jagged.jagged_dense_bmm,
        (values, layout.offsets_O, dense, bias if has_bias else None, 6, "reference"),
        cost=jagged_dense_bmm_cost(**size),
        backward_cost=jagged_dense_bmm_backward_cost(**size),
    )
    grad, values, dense = torch.randn(9, 5), values.detach(), dense.detach()
    check_registration(
        torch.ops.gem_jagged.jagged_dense_bmm_backward,
        (grad, values, layout.offsets_O, dense, 6, has_bias, "reference"),
        cost=jagged_dense_bmm_backward_cost(**size),
    )


def test_compiles_whole():
    check_compiles_whole(product, [inputs((3, 0, 5)), inputs((2, 7, 2)), inputs((9, 4, 2, 2))])


@pytest.mark.interpreter
def test_interpreted_kernel():
    check_interpreted_kernel(product, oracle, inputs((3, 0, 67, 600), width=24, out_width=40))


@pytest.mark.gpu
def test_kernel_on_gpu():
    for width, out_width in ((96, 72), (1, 128)):
        check_kernel_on_gpu(
            product, oracle, inputs((3, 0, 6700, 1, 130), width=width, out_width=out_width)
        )


def test_ragged_edges():
    check_ragged_edges(product, oracle, lambda case: inputs(case.lengths, offsets=torch.int32))


def test_alone_equals_in_batch():
    lengths = (3, 0, 6, 1)
    values, _, dense, bias = inputs(lengths)

    def make(picked):
        layout = Layout.from_lengths([lengths[i] for i in picked])
        taken = take_sequences(values, lengths, picked)
        return taken, layout, dense[list(picked)], bias[list(picked)]

    check_alone_equals_in_batch(product, make, lengths, leaves=[values, dense, bias])


def test_refuses():
    values, layout, dense, bias = inputs((3, 0, 6))
    check_refuses(
        [
            (lambda: product(values[:8], layout, dense), ShapeError, "8 tokens .* sum to 9"),
            (lambda: product(values, layout, dense[:, :2]), ShapeError, "D=2 .* D=3"),
            (lambda: product(values, layout, dense[:2]), ShapeError, "B=2 .* B=3"),
            (lambda: product(values, layout, dense, bias[:, :4]), ShapeError, "F=4 .* F=5"),
            (
                lambda: product(values, layout, dense.half()),
                DtypeError,
                "dense_BDF must be torch.float32 like values_TD",
            ),
            (
                lambda: product(values.long(), layout, dense.long()),
                DtypeError,
                "values_TD must be floating point",
            ),
            (
                lambda: product(values, layout, dense, bias.to("meta")),
                DeviceError,
                "bias_BF must be on cpu",
            ),
            (
                lambda: product(values.double(), layout, dense.double(), impl="triton"),
                UnsupportedError,
                'use impl="reference"',
            ),
            (
                lambda: product(values, layout, dense, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


def test_half_precision_is_summed_in_fp32():
    values = torch.ones(1, 4096, dtype=torch.bfloat16)
    dense = torch.ones(1, 4096, 1, dtype=torch.bfloat16)
    assert product(values, Layout.from_lengths([1]), dense).tolist() == [[4096]]

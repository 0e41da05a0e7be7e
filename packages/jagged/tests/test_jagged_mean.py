import pytest
import torch

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_mean.cases import CASES
from gem_jagged.kernels.jagged_mean.cost import jagged_mean_backward_cost, jagged_mean_cost
from gem_jagged.ops import jagged_mean
from gem_opkit.errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_budget,
    check_compiles_whole,
    check_interpreted_kernel,
    check_kernel_on_gpu,
    check_ragged_edges,
    check_reference_gradients,
    check_refuses,
    check_registration,
    take_sequences,
)

SMALL = [case for case in CASES if case.device == "cpu" and case.total_tokens < 100]


def inputs(lengths, *, width=3, dtype=torch.float32, offsets=torch.int64):
    values = torch.randn(sum(lengths), width, dtype=dtype, requires_grad=True)
    return values, Layout.from_lengths(lengths, dtype=offsets)


def oracle(values_TD, layout):
    """One sequence after the other, in plain torch."""
    rows = [
        part.sum(0) / max(part.shape[0], 1) for part in values_TD.split(layout.lengths.tolist())
    ]
    # The sum over nothing keeps an empty batch differentiable.
    nothing = values_TD.sum() * 0
    return torch.stack(rows) + nothing if rows else values_TD.new_empty((0, 3)) + nothing


def test_reference_gradients():
    check_reference_gradients(jagged_mean, inputs((3, 0, 6, 1)), reference=oracle)


def test_registration():
    values, layout = inputs((3, 0, 6))
    size = {"batch": 3, "total_tokens": 9, "width": 3, "element_bytes": 4}
    check_registration(
        torch.ops.gem_jagged.jagged_mean,
        (values, layout.offsets_O, "reference"),
        cost=jagged_mean_cost(**size),
        backward_cost=jagged_mean_backward_cost(**size),
    )
    check_registration(
        torch.ops.gem_jagged.jagged_mean_backward,
        (torch.randn(3, 3), layout.offsets_O, 9, "reference"),
        cost=jagged_mean_backward_cost(**size),
    )


def test_compiles_whole():
    check_compiles_whole(jagged_mean, [inputs((3, 0, 5)), inputs((2, 7, 2)), inputs((9, 4, 1, 1))])


@pytest.mark.interpreter
def test_interpreted_kernel():
    check_interpreted_kernel(jagged_mean, oracle, inputs((3, 0, 67, 1, 600), width=24))


@pytest.mark.gpu
def test_kernel_on_gpu():
    check_kernel_on_gpu(jagged_mean, oracle, inputs((3, 0, 6700, 1, 130), width=96))


def test_ragged_edges():
    check_ragged_edges(jagged_mean, oracle, lambda case: inputs(case.lengths, offsets=torch.int32))


def test_alone_equals_in_batch():
    lengths = (3, 0, 6, 1)
    values, _ = inputs(lengths)

    def make(picked):
        return (
            take_sequences(values, lengths, picked),
            Layout.from_lengths([lengths[i] for i in picked]),
        )

    check_alone_equals_in_batch(
        jagged_mean, make, lengths, leaves=[values], split="sequences", bitwise=True
    )


def test_refuses():
    values, layout = inputs((3, 0, 6))
    check_refuses(
        [
            (lambda: jagged_mean(values[:8], layout), ShapeError, "8 tokens .* sum to 9"),
            (
                lambda: jagged_mean(torch.zeros(9, 3, dtype=torch.int64), layout),
                DtypeError,
                "values_TD must be floating point; got torch.int64",
            ),
            (lambda: jagged_mean(torch.zeros(9, 3, 1, 1), layout), ShapeError, "1 to 3 dims"),
            (
                lambda: jagged_mean(values, layout.to("meta")),
                DeviceError,
                "offsets_O must be on cpu",
            ),
            (
                lambda: jagged_mean(values, layout, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_half_precision_is_within_the_error_budget(case):
    layout = Layout.from_lengths(case.lengths)
    values = torch.randn(case.total_tokens, case.width, dtype=torch.float64)
    half = values.to(torch.bfloat16)
    if layout.batch == 0:
        assert jagged_mean(half, layout).shape == (0, case.width)
        return
    parts = half.split(list(case.lengths))
    # The honest reference at the same precision: mean of each sequence in bf16.
    plain = [part.mean(0) if len(part) else part.new_zeros(case.width) for part in parts]
    exact = jagged_mean(half.double(), layout)
    check_budget(jagged_mean(half, layout), torch.stack(plain), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_sequences_are_not_summed_in_half_precision(dtype):
    # A sum of ones in bfloat16 stands still at 256, one of 100 in float16 overflows at 656.
    layout = Layout.from_lengths([1, 3000])
    for value in (1.0, 100.0):
        values = torch.full((3001, 2), value, dtype=dtype, requires_grad=True)
        mean = jagged_mean(values, layout)
        assert mean.tolist() == [[value] * 2] * 2
        (grad,) = torch.autograd.grad(mean, values, torch.full_like(mean, 3000.0))
        assert grad[1:].double().sub(1).abs().max() < 0.01


def test_takes_one_and_three_dims_and_any_strides():
    layout = Layout.from_lengths([2, 0, 3])
    assert jagged_mean(torch.arange(10.0)[::2], layout).tolist() == [1.0, 0.0, 6.0]
    heads = torch.randn(4, 5, 2).permute(1, 2, 0)
    means = jagged_mean(heads, layout)
    assert means.shape == (3, 2, 4)
    torch.testing.assert_close(means[2], heads[2:].mean(0))


def test_nan_stays_in_its_own_sequence():
    values = torch.ones(5, 2)
    values[1] = float("nan")
    means = jagged_mean(values, Layout.from_lengths([2, 0, 3]))
    assert means[0].isnan().all()
    assert means[1:].tolist() == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.gpu
def test_waits_for_no_gpu():
    values, layout = inputs((3, 0, 6))
    values, layout = values.detach().cuda().requires_grad_(), layout.to("cuda")
    upstream = torch.ones(3, 3, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        jagged_mean(values, layout).backward(upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(values.grad[0], torch.full((3,), 1 / 3, device="cuda"))

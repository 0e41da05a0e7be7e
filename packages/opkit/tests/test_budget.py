"""The error budget accepts honest rounding and nothing more."""

from dataclasses import dataclass

import pytest
import torch

from gem_opkit.testing import (
    CheckFailure,
    check_budget,
    check_equal_up_to_rounding,
    check_run_budget,
    check_runs_equal,
    fresh,
    rounding_band,
    run_with_gradients,
    tensors_in,
    upstream_like,
)

EPS = torch.finfo(torch.float32).eps


def bf16_matmul_in_three_precisions():
    a, b = torch.randn(24, 200), torch.randn(200, 16)
    a16, b16 = a.bfloat16(), b.bfloat16()
    exact = a16.double() @ b16.double()
    reference = (a16.float() @ b16.float()).bfloat16()
    return a16, b16, exact, reference


def test_sum_in_another_order_is_within_budget():
    a16, b16, exact, reference = bf16_matmul_in_three_precisions()
    parts = sum(a16[:, i : i + 8].float() @ b16[i : i + 8].float() for i in range(0, 200, 8))
    check_budget(parts.bfloat16(), reference, exact)


def test_accumulating_in_bf16_is_over_budget():
    a16, b16, exact, reference = bf16_matmul_in_three_precisions()
    total = torch.zeros_like(reference)
    for i in range(200):
        total = total + a16[:, i : i + 1] * b16[i : i + 1]
    with pytest.raises(CheckFailure, match="over the budget"):
        check_budget(total, reference, exact)


def test_one_wrong_value_among_many_is_over_budget():
    exact = torch.randn(1000, dtype=torch.float64)
    low = exact.float()
    kernel = low.clone()
    kernel[700] += 1e-4
    check_budget(low, low, exact)
    with pytest.raises(CheckFailure, match="largest error"):
        check_budget(kernel, low, exact)


def test_small_bias_of_every_value_is_over_budget():
    exact = torch.linspace(-1, 1, 1000, dtype=torch.float64)
    low = exact.float()
    with pytest.raises(CheckFailure, match="rms error"):
        check_budget((exact + 1.6 * EPS).float(), low, exact)


def test_lower_precision_inside_widens_the_band_by_that_precision():
    exact = torch.linspace(-1, 1, 100, dtype=torch.float64)
    low = exact.float()
    kernel = exact.bfloat16().float()
    check_budget(kernel, low, exact, band_dtype=torch.bfloat16)
    with pytest.raises(CheckFailure):
        check_budget(kernel, low, exact)


def test_noise_of_cancelled_terms_is_allowed_by_their_size():
    exact = torch.zeros(10, dtype=torch.float64)
    low = torch.zeros(10)
    kernel = low + 1e-7
    with pytest.raises(CheckFailure):
        check_budget(kernel, low, exact)
    check_budget(kernel, low, exact, noise_scale=2.0)
    with pytest.raises(CheckFailure):
        check_budget(low + 1e-5, low, exact, noise_scale=2.0)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("kernel", "exact", "right"),
    [
        ([1.0, -INF], [1.0, -INF], True),
        ([1.0, NAN], [1.0, NAN], True),
        ([1.0, INF], [1.0, -INF], False),
        ([1.0, NAN], [1.0, -INF], False),
        ([1.0, NAN], [1.0, 2.0], False),
        ([1.0, INF], [1.0, 2.0], False),
        ([1.0, 0.0], [1.0, -INF], False),
    ],
)
def test_values_are_finite_exactly_where_they_should_be(kernel, exact, right):
    kernel, exact = torch.tensor(kernel), torch.tensor(exact, dtype=torch.float64)
    low = exact.float()
    if right:
        check_budget(kernel, low, exact)
        check_equal_up_to_rounding(kernel, low)
        return
    with pytest.raises(CheckFailure, match=r"not finite|inf or nan"):
        check_budget(kernel, low, exact)
    with pytest.raises(CheckFailure, match=r"not finite|inf or nan"):
        check_equal_up_to_rounding(kernel, low)


def test_form_is_part_of_the_result():
    x = torch.ones(2, 3)
    for bad, message in ((x[:1], "shape"), (x.T, "shape"), (x.half(), "dtype")):
        with pytest.raises(CheckFailure, match=message):
            check_budget(bad, x, x.double())
        with pytest.raises(CheckFailure, match=message):
            check_equal_up_to_rounding(bad, x)


def test_integers_are_compared_exactly():
    ids = torch.tensor([1, 2**53 + 1])
    check_budget(ids, ids, ids)
    for check in (lambda bad: check_budget(bad, ids, ids), lambda bad: same(bad, ids)):
        with pytest.raises(CheckFailure, match="differ"):
            check(ids - torch.tensor([0, 1]))


same = check_equal_up_to_rounding


def test_nothing_equals_nothing():
    empty = torch.ones(0, 3)
    check_budget(empty, empty, empty.double())
    same(empty, empty)


def test_equality_up_to_rounding():
    terms = torch.randn(300, 8)
    forward, backward = terms.cumsum(0)[-1], terms.flip(0).cumsum(0)[-1]
    same(forward, backward)
    with pytest.raises(CheckFailure, match="differs by"):
        same(forward * (1 + 1e-5), backward)
    with pytest.raises(CheckFailure, match="differs by"):
        same(forward.bfloat16() * 1.03, forward.bfloat16())


def test_band_follows_the_dtype_and_the_largest_value():
    exact = torch.tensor([0.5, -4.0], dtype=torch.float64)
    assert rounding_band(torch.float32, exact) == pytest.approx(4 * EPS)
    assert rounding_band(torch.bfloat16, exact) == pytest.approx(4 * 2**-7)
    assert rounding_band(torch.float32, exact, noise_scale=1.0) == pytest.approx(5 * EPS)
    assert rounding_band(torch.float32, exact[:0]) == 0


def test_run_collects_outputs_gradients_and_parameters():
    @dataclass(frozen=True)
    class Pair:
        scores: torch.Tensor
        ids: torch.Tensor

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.full((3,), 2.0))
            self.unused = torch.nn.Parameter(torch.ones(1))

        def forward(self, x, factor):
            return {"pair": Pair(x * self.gain * factor, torch.arange(3)), "more": [x.sum()]}

    x = torch.ones(4, 3, requires_grad=True)
    run = run_with_gradients(Layer(), (x, 5.0))
    assert [tuple(out.shape) for out in run.outputs] == [(4, 3), (3,), ()]
    assert run.labels == ["gradient of input 0", "gradient of gain", "gradient of unused"]
    first, last = upstream_like(run.outputs[0], seed=0), upstream_like(run.outputs[2], seed=1)
    torch.testing.assert_close(run.gradients[0], first * 10 + last)
    torch.testing.assert_close(run.gradients[1], (first * 5).sum(0))
    assert run.gradients[2] is None


def test_run_without_a_gradient_is_a_failure():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(CheckFailure, match="no output carries one back"):
        run_with_gradients(lambda x: x.detach(), (x,))


def test_upstream_is_the_same_in_every_precision():
    shapes = [torch.ones(5, 3, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)]
    wide, narrow = (upstream_like(shape, seed=3) for shape in shapes)
    assert torch.equal(wide, narrow.double())


def test_gradient_that_only_one_run_has_is_a_failure():
    def both(x, y):
        return x * y

    def half(x, y):
        return x * y.detach()

    inputs = (torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True))
    good, bad = (run_with_gradients(fn, fresh(inputs)) for fn in (both, half))
    exact = run_with_gradients(both, fresh(inputs, dtype=torch.float64))
    check_run_budget(good, good, exact)
    check_runs_equal(good, good)
    with pytest.raises(CheckFailure, match="gradient of input 1: missing in some runs"):
        check_run_budget(bad, good, exact)
    with pytest.raises(CheckFailure, match="gradient of input 1: missing in some runs"):
        check_runs_equal(bad, good)


def test_another_number_of_outputs_is_a_failure():
    x = torch.ones(2)
    one, two = (run_with_gradients(fn, (x,)) for fn in (lambda x: x, lambda x: (x, x)))
    with pytest.raises(CheckFailure, match="numbers of"):
        check_runs_equal(one, two)


def test_fresh_inputs_are_independent_leaves():
    x = torch.ones(3, requires_grad=True)
    ids = torch.tensor([1, 2])
    y, same_ids, text = fresh((x, ids, "word"), dtype=torch.float64)
    assert y.dtype is torch.float64 and y.is_leaf and y.requires_grad
    assert same_ids.dtype is torch.int64 and same_ids is not ids
    assert text == "word"
    assert next(tensors_in(fresh((x,)))).data_ptr() != x.data_ptr()

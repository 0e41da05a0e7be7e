"""A projection beside its input: the gradients add up inside the product, rounded once."""

import pytest
import torch

import gem_precision.beside
from gem_opkit.budget import check_budget
from gem_opkit.errors import ShapeError
from gem_precision.beside import project_beside
from gem_precision.layers import Projection, RmsNorm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def inside(monkeypatch):
    """Let a CPU add inside of the product, too."""
    monkeypatch.setattr(gem_precision.beside, "_adds_inside", lambda projection, x_TD: True)


def gradients(call, device, dtype, *, used=(True, True)):
    """Gradients of a tensor and a weight, where the tensor is normalised besides."""
    torch.manual_seed(0)
    x = torch.randn(40, 24, dtype=torch.float64).bfloat16().to(device, dtype).requires_grad_()
    projection = Projection(24, 16)
    weight = projection.weight.detach().bfloat16().to(device, dtype)
    projection.weight = torch.nn.Parameter(weight)
    y, beside = call(projection, x * 1.0)
    loss = x.sum() * 0.0
    if used[0]:
        loss = loss + (y * y).sum()
    if used[1]:
        loss = loss + (RmsNorm(24)(beside) * torch.linspace(-3, 3, 24).to(beside)).sum()
    loss.backward()
    found = projection.weight.grad
    return y.detach(), x.grad, torch.zeros_like(projection.weight) if found is None else found


def plainly(projection, x):
    return projection(x), x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_gradients_are_within_the_budget(inside, device, used):
    exact = gradients(plainly, device, torch.float64, used=used)
    plain = gradients(plainly, device, torch.bfloat16, used=used)
    own = gradients(project_beside, device, torch.bfloat16, used=used)
    for name, got, reference, wanted in zip(
        ("y", "grad of x", "grad of weight"), own, plain, exact, strict=True
    ):
        check_budget(got, reference, wanted, what=name)


def test_the_sum_is_written_where_the_other_gradient_lies(inside):
    """What the product adds to is what the other use made; nothing else of that size is made."""
    places = []

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            own = grad.clone()
            places.append(own.data_ptr())
            return own

    x = torch.randn(8, 24, dtype=torch.bfloat16, requires_grad=True)
    projection = Projection(24, 16).bfloat16()
    y, beside = project_beside(projection, x)
    (y.sum() + (Other.apply(beside) * 2.0).sum()).backward()
    assert places == [x.grad.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_keeps_its_bits(dtype):
    own = gradients(project_beside, "cpu", dtype)
    plain = gradients(plainly, "cpu", dtype)
    assert all(torch.equal(a, b) for a, b in zip(own, plain, strict=True))


def test_a_frozen_weight_and_a_frozen_input_get_no_gradient(inside):
    x = torch.randn(8, 24, dtype=torch.bfloat16)
    projection = Projection(24, 16).bfloat16()
    project_beside(projection, x)[0].sum().backward()
    assert x.grad is None
    assert projection.weight.grad is not None
    projection.requires_grad_(requires_grad=False)
    y, _ = project_beside(projection, x.requires_grad_())
    y.sum().backward()
    assert x.grad is not None


def test_a_wrong_width_is_refused():
    with pytest.raises(ShapeError, match="must end in a dim of 24"):
        project_beside(Projection(24, 16), torch.randn(4, 20))

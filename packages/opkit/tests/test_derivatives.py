"""Tangents and transforms that a custom operator would drop are refused, and nothing else is."""

import pytest
import torch
from torch.autograd import forward_ad

from gem_opkit.derivatives import check_autograd
from gem_opkit.errors import UnsupportedError


def double(x):
    check_autograd("double", x=x, gain=None)
    return x * 2


def test_plain_tensors_pass():
    x = torch.ones(3, requires_grad=True)
    double(x).sum().backward()
    with forward_ad.dual_level():  # without a tangent of its own
        double(x)
    torch.func.vmap(double)(torch.ones(2, 3))


def test_a_tangent_is_refused():
    x = torch.ones(3)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=r"^double: x must carry"):
        double(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd", "hessian"])
def test_transforms_are_refused(transform):
    with pytest.raises(UnsupportedError, match=r"outside torch\.func\.grad"):
        getattr(torch.func, transform)(lambda x: double(x).sum())(torch.ones(3))


def test_a_graph_is_traced_whole():
    compiled = torch.compile(double, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))

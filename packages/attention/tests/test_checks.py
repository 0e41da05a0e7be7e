"""What all operators of attention refuse alike."""

import pytest
import torch
from torch.autograd import forward_ad

from gem_attention.ops import (
    block_attention,
    generalized_attention,
    jagged_flash_attention,
    pooled_attention,
)
from gem_jagged.batch import Layout
from gem_opkit.errors import ConfigError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import check_refuses

LAYOUT = Layout.from_lengths([3, 0, 5])


def calls_generalized(q, k, v, layout=LAYOUT, **options):
    return generalized_attention(q, k, v, layout, layout, **options)


def calls_block(q, k, v, layout=LAYOUT, **options):
    return block_attention(q, k, v, layout, block_tokens=2, **options)


def calls_flash(q, k, v, layout=LAYOUT, **options):
    return jagged_flash_attention(q, k, v, layout, **options)


def calls_pooled(q, k, v, layout=LAYOUT, **options):
    return pooled_attention(q[:2], k, v, layout, **options)


OPERATORS = [calls_flash, calls_generalized, calls_block, calls_pooled]


@pytest.fixture(params=OPERATORS, ids=lambda call: call.__name__.removeprefix("calls_"))
def attend(request):
    return request.param


def operands():
    return [torch.randn(8, 2, 4, requires_grad=True) for _ in range(3)]


def test_refuses(attend):
    q, k, v = operands()
    torn = Layout(torch.tensor([0, 3, 5, 8]), torch.tensor([3, 5]), 5)
    check_refuses(
        [
            (lambda: attend(q, k, v, torch.tensor([0, 8])), DtypeError, "must be a Layout; got Te"),
            (lambda: attend(q, k, v, torn), ShapeError, r"offsets_O must have the shape \(3,\)"),
            (lambda: attend(q, k, v[..., :0]), ShapeError, "V must be above 0"),
            (lambda: attend(q, k.detach().numpy(), v), DtypeError, "must be a tensor; got ndarray"),
            # A learned scale would lose its gradient, and on a GPU be waited for.
            (lambda: attend(q, k, v, scale=torch.ones(())), DtypeError, "scale must be a number"),
            (lambda: attend(q, k, v, scale="1"), DtypeError, "scale must be a number; got str"),
            (lambda: attend(q, k, v, scale=float("nan")), ConfigError, "scale must be finite"),
            (lambda: attend(q, k, v, scale=float("-inf")), ConfigError, "scale must be finite"),
        ]
    )


def test_derivatives_that_are_not_built_are_refused(attend):
    q, k, v = operands()

    def tangent():
        with forward_ad.dual_level():
            attend(q, forward_ad.make_dual(k.detach(), torch.ones_like(k)), v)

    def twice():
        (grad,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        grad.square().sum().backward()

    def of(transform):
        return lambda: transform(lambda x: attend(q, x, v).sum())(k.detach())

    plain = [x.detach() for x in (q, k, v)]
    check_refuses(
        [
            (tangent, UnsupportedError, "must carry no tangent"),
            (of(torch.func.grad), UnsupportedError, "outside torch.func.grad"),
            (of(torch.func.jacrev), UnsupportedError, "outside torch.func.grad"),
            (of(torch.func.jacfwd), UnsupportedError, "outside torch.func.grad"),
            (twice, UnsupportedError, "its gradient must be differentiated no further"),
        ]
    )
    with forward_ad.dual_level():  # nothing here carries a tangent
        assert torch.equal(attend(*plain), attend(*plain))

"""Joined tensors, and parts that are copied in wide elements, have every bit of torch's own."""

import pytest
import torch

from gem.model import joins
from gem.model.joins import join, wide_copy


def numbers(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize(
    ("take", "wide"),
    [
        (lambda x: x[:, ::2], True),
        (lambda x: x[:, :, 4:], True),
        (lambda x: x[:, :, 2:], False),  # rows begin amid eight bytes
        (lambda x: x[:, :, :6], False),
        (lambda x: x.transpose(1, 2), False),
        (lambda x: x[:, :0], True),
    ],
)
def test_parts_are_copied_bit_for_bit(take, wide):
    part = take(numbers(3, 6, 8))
    assert joins._is_wide(part) == wide
    out = torch.empty(part.shape, dtype=part.dtype)
    wide_copy(out, part)
    assert torch.equal(out, part)
    whole = numbers(3, 6, 8)
    kept, place = whole.clone(), take(whole)
    wide_copy(place, out)
    assert torch.equal(take(whole), part)
    take(whole).copy_(take(kept))
    assert torch.equal(whole, kept)  # nothing beside it was written


@pytest.mark.parametrize("dim", [1, -1])
def test_a_join_has_the_values_and_gradients_of_cat(dim):
    parts = [numbers(2, 4, 4).requires_grad_(), numbers(2, 4, 4), numbers(2, 4, 4).requires_grad_()]
    plain, own = torch.cat(parts, dim=dim), joins._Join.apply(dim, *parts)
    assert torch.equal(own, plain)
    upstream = numbers(*plain.shape)
    wanted = [parts[0], parts[2]]
    for got, expected in zip(
        torch.autograd.grad(own, wanted, upstream),
        torch.autograd.grad(plain, wanted, upstream),
        strict=True,
    ):
        assert torch.equal(got, expected)
        assert got.is_contiguous()


def test_on_a_cpu_a_join_is_cat():
    one, other = numbers(2, 3), numbers(2, 5, dtype=torch.float32)
    assert join([one], dim=1) is one
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(join([one, other], dim=1), torch.cat([one, other], dim=1))


@pytest.mark.gpu
def test_under_autocast_no_part_widens_the_others():
    parts = [numbers(4, 8).cuda().requires_grad_(), numbers(4, 0, dtype=torch.float32).cuda()]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        joined = join(parts, dim=1)
    assert joined.dtype == torch.bfloat16
    joined.backward(torch.ones_like(joined))
    assert torch.equal(parts[0].grad, torch.ones_like(parts[0]))

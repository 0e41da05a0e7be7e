"""Where the gradient of values is written: beside those of queries and keys, or copied there."""

import pytest
import torch

from gem_attention import rooms
from gem_attention.ops import jagged_flash_attention, pooled_attention, rotary_heads
from gem_jagged.batch import Layout

LENGTHS = (5, 0, 9, 3)
TOKENS = sum(LENGTHS)


@pytest.fixture
def founds(monkeypatch):
    """Record whether each gradient of a projection was found in its room."""
    seen = []
    found = rooms.Room.found

    def watched(self, grad_TGK):
        buffer = found(self, grad_TGK)
        seen.append(buffer is not None)
        return buffer

    monkeypatch.setattr(rooms.Room, "found", watched)
    return seen


def split(projected, layout, *, copied=False):
    """Split a projection of 2 query heads, 2 key heads and 2 value heads."""
    return rotary_heads(projected, layout, heads=2, key_heads=2, copies_values=copied)


def projection(tokens=TOKENS, width=8, **options):
    options = {"dtype": torch.float64} | options
    return torch.randn(tokens, 6, width, **options).requires_grad_()


def gradient(projected, layout, loss, *, copied):
    projected.grad = None
    loss(*split(projected, layout, copied=copied)).backward()
    return projected.grad


@pytest.mark.parametrize("kind", ["attention", "pooling", "two readers", "unread"])
def test_the_gradient_is_that_of_copied_values(kind, founds):
    layout = Layout.from_lengths(list(LENGTHS))
    seeds = torch.randn(3, 2, 8, dtype=torch.float64)

    def loss(q, k, v):
        if kind == "unread":
            return (q * q).sum() + k.sum()
        out = pooled_attention(seeds, k, v, layout)
        total = (out * out).sum()
        if kind != "pooling":
            out = jagged_flash_attention(q, k, v, layout)
            total = (out * out).sum() + (total if kind == "two readers" else 0 * q.sum())
        return total

    projected = projection()
    expected = gradient(projected, layout, loss, copied=True)
    assert founds == []
    torch.testing.assert_close(gradient(projected, layout, loss, copied=False), expected)
    # A sum of two gradients lies where autograd puts it.
    assert kind == "two readers" or founds == [kind != "unread"]


def test_a_gradient_that_came_from_outside_is_not_written_to(founds):
    layout = Layout.from_lengths(list(LENGTHS))
    projected = projection()
    upstream = torch.randn(TOKENS, 6, 8, dtype=torch.float64)
    given = upstream.clone()
    # Slices of the upstream gradient have the places and strides of a room.
    torch.cat(split(projected, layout), dim=1).backward(upstream)
    assert torch.equal(upstream, given)
    assert founds == [False]


def test_what_a_hook_has_seen_stays_as_it_was(founds):
    layout = Layout.from_lengths(list(LENGTHS))
    projected = projection()
    q, k, v = split(projected, layout)
    kept = []
    v.register_hook(lambda grad: kept.append((grad, grad.clone())))
    jagged_flash_attention(q, k, v, layout).sum().backward(retain_graph=True)
    first = projected.grad.clone()
    jagged_flash_attention(q, k, v, layout).sum().backward()
    torch.testing.assert_close(projected.grad, 2 * first)
    assert founds == [True, True]
    for grad, copy in kept:
        assert torch.equal(grad, copy)
    assert torch.equal(kept[0][0], first[:, 4:])


def test_a_graph_of_the_gradient_is_refused_as_without_a_room():
    layout = Layout.from_lengths(list(LENGTHS))
    projected = projection()
    out = jagged_flash_attention(*split(projected, layout), layout)
    (grad,) = torch.autograd.grad(out.sum(), projected, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_operators_that_write_into_a_room_are_registered():
    layout = Layout.from_lengths(list(LENGTHS))
    tokens, offsets, lengths = TOKENS, layout.offsets_O, layout.lengths
    q, k, v, grad_out = torch.randn(4, tokens, 2, 8)
    into = torch.empty(tokens, 6, 8)[:, 4:]
    out, lse = torch.ops.gem_attention.jagged_flash_attention(
        *(q, k, v, offsets, offsets, lengths, lengths, None, None, 0.3, True, False, 1),
        "reference",
    )
    seeds, grad_pooled = torch.randn(3, 2, 8), torch.randn(4, 3, 2, 8)
    ops = torch.ops.gem_attention
    calls = (
        (
            ops.jagged_flash_attention_backward_into,
            (into, grad_out, None, q, k, v, out, lse, offsets, offsets, lengths, lengths),
            (None, None, 0.3, False, 1, "reference"),
        ),
        (
            ops.pooled_attention_backward_into,
            (into, grad_pooled, seeds, k, v, grad_pooled, lse[:0], offsets, lengths),
            ("softmax", 0.3, False, tokens, "reference"),
        ),
        (
            ops.rotary_heads_backward_beside,
            (torch.randn(tokens, 6, 8), q, k, torch.randn(tokens, 6, 8), None, None),
            (torch.ones(2, 4), True, 1.0, 1e-6, "reference"),
        ),
    )
    for op, tensors, rest in calls:
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(op, (*tensors, *rest), test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["window", "full", "pooling"])
def test_kernels_write_the_gradient_into_the_room(kind, founds):
    lengths = [300, 0, 1, 129, 700] * 60
    layout = Layout.from_lengths(lengths, device="cuda")
    projected = projection(sum(lengths), 128, device="cuda", dtype=torch.bfloat16)
    seeds = torch.randn(256, 2, 128, device="cuda", dtype=torch.bfloat16)
    shape = (300, 256, 2, 128) if kind == "pooling" else (sum(lengths), 2, 128)
    upstream = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def loss(q, k, v):
        window = (128, 128) if kind == "window" else (None, None)
        if kind == "pooling":
            return (pooled_attention(seeds, k, v, layout) * upstream).sum() + 0 * q.sum()
        return (jagged_flash_attention(q, k, v, layout, window=window) * upstream).sum()

    expected = gradient(projected, layout, loss, copied=True)
    junk = torch.full((2**26,), torch.nan, device="cuda")
    del junk
    got = gradient(projected, layout, loss, copied=False)
    assert founds == [True]
    # The last bit of a sum over tiles of keys depends on their order; values are no such sum.
    assert torch.equal(got[:, 2:], expected[:, 2:])
    difference = (got.float() - expected.float()).norm() / expected.float().norm()
    assert difference <= (0 if kind == "window" else 2**-10)

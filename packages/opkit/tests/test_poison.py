"""Memory that was never written shows, in our packages and nowhere else."""

import sys
import types

import pytest
import torch

from gem_opkit.testing import fill_with_poison, poisoned_empty

SOURCE = """
import torch
def allocate(like):
    return (torch.empty(3), torch.empty_like(like), torch.empty_strided((2, 2), (1, 2)),
            like.new_empty(3), like.new_empty_strided((2, 2), (1, 2)))
def traced(x):
    out = torch.empty_like(x)
    out.copy_(x)
    return out * 2 + x.new_empty(x.shape[0]).fill_(1.0)
"""


def module(name):
    namespace = {"__name__": name}
    exec(SOURCE, namespace)
    return namespace


def holds_nan(tensors):
    return [bool(torch.isnan(tensor).all()) for tensor in tensors]


@pytest.mark.parametrize("name", ["gem", "gem.train.step", "gem_jagged.kernels.mean.kernel"])
def test_every_allocation_of_our_packages_is_nan(name):
    like = torch.ones(3)
    assert holds_nan(module(name)["allocate"](like)) == [True] * 5


@pytest.mark.parametrize("name", ["gemini", "other", "torch.nn", "test_gem"])
def test_allocations_of_others_are_left_alone(name, monkeypatch):
    calls = []
    monkeypatch.setattr("gem_opkit.poison.fill_with_poison", calls.append)
    module(name)["allocate"](torch.ones(3))
    assert not calls


def test_all_callers_but_the_libraries_can_be_poisoned():
    with poisoned_empty("all"):
        assert holds_nan(module("other")["allocate"](torch.ones(3))) == [True] * 5
        assert holds_nan([torch.empty(3)]) == [True]
    calls = holds_nan(module("gem_x")["allocate"](torch.ones(3)))
    assert calls == [True] * 5  # the fixture's own setting is back


FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", FLOATS)
def test_poison_is_nan_in_every_float(dtype):
    filled = fill_with_poison(torch.empty(4, 2, dtype=dtype))
    values = filled if dtype.is_complex else filled.float()
    assert bool(torch.isnan(values).all())


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int64, -(2**63)),
        (torch.int32, -(2**31)),
        (torch.int8, -128),
        (torch.uint8, 255),
        (torch.uint16, 2**16 - 1),
        (torch.bool, True),
    ],
)
def test_poison_of_integers_is_an_extreme(dtype, value):
    assert fill_with_poison(torch.empty(2, dtype=dtype)).tolist() == [value] * 2


def test_poison_keeps_requires_grad_and_views():
    leaf = torch.ones(2, 2, requires_grad=True)
    fill_with_poison(leaf)
    assert leaf.requires_grad and leaf.is_leaf
    base = torch.zeros(2, 4, dtype=torch.float8_e5m2)
    fill_with_poison(base[:, ::2])
    assert torch.isnan(base.float()).tolist() == [[True, False, True, False]] * 2


def test_fake_and_meta_tensors_are_left_alone():
    from torch._subclasses.fake_tensor import FakeTensorMode

    allocate = module("gem_x")["allocate"]
    assert all(tensor.is_meta for tensor in allocate(torch.ones(3, device="meta"))[1:2])
    with FakeTensorMode():
        assert type(allocate(torch.ones(3))[0]).__name__ == "FakeTensor"


def test_poisoned_code_still_compiles_into_one_graph(monkeypatch):
    gem_x = types.ModuleType("gem_x")  # Dynamo looks up the module of a function's globals
    monkeypatch.setitem(sys.modules, "gem_x", gem_x)
    exec(SOURCE, vars(gem_x))
    traced = gem_x.traced
    assert bool(torch.isnan(gem_x.allocate(torch.ones(3))[0]).all())
    whole = torch.compile(traced, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5):
        x = torch.randn(tokens)
        assert torch.equal(whole(x), traced(x))
        assert torch.equal(traced(x), 2 * x + 1)

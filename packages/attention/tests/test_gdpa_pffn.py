import copy
import logging

import pytest
import torch

import gem_opkit.impl
from gem_attention.contract import AttentionSpec
from gem_attention.layers import GdpaPffn
from gem_jagged.batch import Layout
from gem_opkit.errors import UnsupportedError
from gem_opkit.testing import check_run_budget, check_runs_equal, fresh, run_with_gradients

LENGTHS, COUNT = (70, 0, 33, 5), 9


def layer_of(heads, head_dim, *, impl, **fields):
    torch.manual_seed(0)
    spec = AttentionSpec(heads=heads, head_dim=head_dim, activation="gelu", **fields)
    return GdpaPffn(heads * head_dim, spec, 24, impl=impl)


def run_of(layer, x, context, *, impl, device="cpu", dtype=None):
    """Run a copy of a layer with an ``impl``, forward and with gradients of weights and inputs."""
    layer = copy.deepcopy(layer).to(device, dtype)
    layer.impl = impl
    layout = Layout.from_lengths(list(LENGTHS), device=device)
    x, context = fresh((x, context), device=device, dtype=dtype)

    def call(x, context, weight):
        return torch.func.functional_call(layer, {"kv.weight": weight}, (x, layout, context))

    weight = layer.kv.weight.detach().requires_grad_()
    return run_with_gradients(call, (x, context, weight))


def inputs(width):
    torch.manual_seed(1)
    x = (torch.randn(sum(LENGTHS), width) + 0.3).requires_grad_()
    return x, torch.randn(len(LENGTHS), COUNT, 24, requires_grad=True)


@pytest.mark.interpreter
@pytest.mark.parametrize(("heads", "head_dim", "kv_heads"), [(1, 24, None), (4, 12, 2)])
def test_one_operator_equals_one_after_the_other(heads, head_dim, kv_heads):
    layer = layer_of(heads, head_dim, impl="auto", kv_heads=kv_heads)
    given = inputs(heads * head_dim)
    joined, apart = (run_of(layer, *given, impl=impl) for impl in ("triton", "reference"))
    check_runs_equal(joined, apart)


def test_on_a_cpu_auto_keeps_its_bits():
    layer, given = layer_of(2, 8, impl="auto"), inputs(16)
    auto, apart = (run_of(layer, *given, impl=impl) for impl in ("auto", "reference"))
    for a, b in zip(auto.outputs + auto.gradients, apart.outputs + apart.gradients, strict=True):
        assert torch.equal(a, b)


def test_without_a_kernel_one_operator_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match=r"GdpaPffn: impl=.triton. on a CPU"):
        run_of(layer_of(2, 8, impl="auto"), *inputs(16), impl="triton")
    with pytest.raises(UnsupportedError, match="impl must be one of"):
        run_of(layer_of(2, 8, impl="auto"), *inputs(16), impl="fast")


@pytest.mark.interpreter
def test_the_choice_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(gem_opkit.impl, "_announced", set())
    with caplog.at_level(logging.INFO, logger="gem_opkit.impl"):
        run_of(layer_of(2, 8, impl="auto"), *inputs(16), impl="triton")
    assert any("GdpaPffn" in r.message and "triton" in r.message for r in caplog.records)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 128), (1, 128), (2, 40)])
def test_one_operator_is_within_the_budget_on_gpu(heads, head_dim):
    layer = layer_of(heads, head_dim, impl="auto")
    given = inputs(heads * head_dim)
    low = torch.bfloat16
    joined, apart = (
        run_of(layer, *given, impl=impl, device="cuda", dtype=low)
        for impl in ("triton", "reference")
    )
    # The weights that both have, rounded.
    exact = run_of(layer.to(low), *fresh(given, dtype=low), impl="reference", dtype=torch.float64)
    for run in (joined, apart):
        for tensors in (run.outputs, run.gradients):
            tensors[:] = [t.cpu() for t in tensors]
    check_run_budget(joined, apart, exact)


@pytest.mark.gpu
def test_tokens_in_float32_are_taken_one_operator_after_the_other_on_gpu():
    layer, given = layer_of(2, 64, impl="auto").cuda(), fresh(inputs(128), device="cuda")
    layout = Layout.from_lengths(list(LENGTHS), device="cuda")
    outs = []
    for impl in ("auto", "reference"):
        layer.impl = impl
        with torch.autocast("cuda", dtype=torch.bfloat16):
            outs.append(layer(given[0], layout, given[1]))
    assert torch.equal(*outs)
    layer.impl = "triton"
    refused = pytest.raises(UnsupportedError, match="tokens and keys of one dtype")
    with refused, torch.autocast("cuda", dtype=torch.bfloat16):
        layer(given[0], layout, given[1])

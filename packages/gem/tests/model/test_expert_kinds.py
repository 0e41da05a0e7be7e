"""Experts of other models: against their formulas in plain torch."""

import copy

import pytest
import torch

from gem.model.expert_kinds import EXPERTS
from gem.model.expert_spec import ExpertsSpec
from gem.model.interaction import ExpertMixture, WukongExpert
from gem.model.structure import pair_count

WIDTH = 4


def expert(kind, tokens, **changes):
    spec = ExpertsSpec(**{"fm_tokens": 2, "linear_tokens": 1, "mlp_widths": (5,), **changes})
    return EXPERTS[kind](tokens, WIDTH, spec, activation="relu", dropout=0.0), spec


def test_cross_network_multiplies_by_the_first_input():
    layer, _ = expert("cross", 3, cross_layers=2)
    x_BND = torch.randn(4, 3, WIDTH)
    first, second = (part.weight for part in layer.cross)
    for row, got in zip(x_BND, layer(x_BND), strict=True):
        x0 = row.flatten()
        x1 = x0 * (first @ x0) + x0
        x2 = x0 * (second @ x1) + x1
        want = layer.compress.weight @ x2.view(3, WIDTH)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_dot_products_are_those_of_every_pair(tokens):
    layer, _ = expert("dot", tokens)
    x_BND = torch.randn(4, tokens, WIDTH)
    first, second = (part.weight for part in layer.mlp.projections)
    for row, got in zip(x_BND, layer(x_BND), strict=True):
        pairs = [row[i] @ row[j] for i in range(tokens) for j in range(i + 1, tokens)]
        pairs = torch.stack(pairs or [row[0] @ row[0]])
        assert len(pairs) == pair_count(tokens)
        if len(pairs) > 1:
            pairs = torch.nn.functional.layer_norm(pairs, pairs.shape, eps=1e-6)
        want = second @ torch.relu(first @ pairs)
        torch.testing.assert_close(got.flatten(), want, rtol=1e-4, atol=1e-5)


def test_mlp_reads_all_tokens():
    layer, _ = expert("mlp", 3)
    x_BND = torch.randn(4, 3, WIDTH)
    first, second = (part.weight for part in layer.mlp.projections)
    want = torch.relu(x_BND.flatten(1) @ first.t()) @ second.t()
    torch.testing.assert_close(layer(x_BND).flatten(1), want, rtol=1e-4, atol=1e-5)


def test_attention_is_that_of_torch_between_the_tokens():
    layer, _ = expert("attention", 5, attention_heads=2)
    x_BND = torch.randn(4, 5, WIDTH)
    normed = x_BND * torch.rsqrt(x_BND.square().mean(-1, keepdim=True) + 1e-6)
    q, k, v = (
        (normed @ part.t()).view(4, 5, 2, WIDTH // 2).transpose(1, 2)
        for part in layer.qkv.weight.chunk(3)
    )
    read = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    want = torch.einsum("mn,bnd->bmd", layer.compress.weight, x_BND + read @ layer.out.weight.t())
    torch.testing.assert_close(layer(x_BND), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", EXPERTS)
def test_every_kind_takes_no_example_and_gives_the_layer_s_tokens(kind):
    layer, spec = expert(kind, 3)
    assert layer(torch.randn(0, 3, WIDTH)).shape == (0, spec.tokens, WIDTH)
    assert layer(torch.randn(2, 3, WIDTH)).shape == (2, spec.tokens, WIDTH)


def test_a_mixture_has_the_kinds_that_are_named():
    spec = ExpertsSpec(count=3, kinds=("dot", "wukong", "cross"), partition="all")
    layer = ExpertMixture(4, 2, width=WIDTH, spec=spec, activation="relu")
    kinds = [type(one) for one in layer.experts]
    assert kinds == [EXPERTS["dot"], WukongExpert, EXPERTS["cross"]]
    same = ExpertsSpec(count=2, kinds=("mlp",))
    layer = ExpertMixture(4, 2, width=WIDTH, spec=same, activation="relu")
    assert [type(one) for one in layer.experts] == [EXPERTS["mlp"]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", EXPERTS)
def test_every_kind_on_a_gpu_equals_the_cpu(kind):
    torch.manual_seed(0)
    layer, _ = expert(kind, 5)
    x = torch.randn(6, 5, WIDTH)
    runs = []
    for device in ("cpu", "cuda"):
        own, leaf = copy.deepcopy(layer).to(device), x.clone().to(device).requires_grad_()
        y = own(leaf)
        y.square().sum().backward()
        runs.append([y, leaf.grad, *(p.grad for p in own.parameters())])
    for on_cpu, on_gpu in zip(*runs, strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=2e-3, atol=2e-3)

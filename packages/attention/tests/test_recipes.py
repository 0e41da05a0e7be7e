"""A precision recipe gives attention layers the format of their products, and how it is rounded."""

import pytest
import torch
from torch import nn

from gem_attention.contract import AttentionSpec
from gem_attention.layers import CrossAttention, SelfAttention
from gem_attention.recipes import convert_attention
from gem_jagged.batch import Layout
from gem_precision.contract import PrecisionRecipe

CPU = torch.device("cpu")
LAYOUT = Layout.from_lengths(torch.tensor([5, 1, 7]))


def model_of(head_dim):
    torch.manual_seed(0)
    spec = AttentionSpec(heads=2, head_dim=head_dim)
    return nn.ModuleDict({"own": SelfAttention(16, spec), "other": CrossAttention(16, spec, 12)})


def converted(head_dim=32, **keys):
    model = model_of(head_dim)
    recipe = PrecisionRecipe(attention="mxfp8_rceil", **keys)
    convert_attention(model, recipe, device=CPU)
    return model


def gradient(model):
    torch.manual_seed(2)
    x_TD = torch.randn(13, 16)
    torch.manual_seed(3)
    out_TD = model["own"](x_TD, LAYOUT)
    return out_TD.detach(), torch.autograd.grad(out_TD.square().sum(), model["own"].qkv.weight)[0]


def test_gradients_of_attention_are_rounded_by_chance_where_the_recipe_says_so():
    nearest, by_chance = gradient(converted()), gradient(converted(stochastic_rounding=True))
    assert torch.equal(nearest[0], by_chance[0])
    assert not torch.equal(nearest[1], by_chance[1])
    assert float((nearest[1] - by_chance[1]).norm() / nearest[1].norm()) < 0.1


def test_queries_keys_and_values_are_rotated_where_the_recipe_says_so():
    plain, turned = gradient(converted()), gradient(converted(random_hadamard=True))
    wide = gradient(model_of(32))
    for near, other, right in zip(plain, turned, wide, strict=True):
        assert not torch.equal(near, other)
        assert float((other - right).norm() / right.norm()) < 0.1


@pytest.mark.parametrize("head_dim", [32, 48])
def test_heads_of_whole_blocks_alone_are_rotated_each_layer_by_signs_of_its_own(head_dim):
    model = converted(head_dim, random_hadamard=True)
    seeds = {layer.rounding.hadamard_seed for layer in model.values()}
    assert len(seeds - {None}) == (2 if head_dim == 32 else 0)
    gradient(model)

from pathlib import Path

import pytest
from pydantic import ValidationError

import gem_attention.contract
from gem_attention.contract import AttentionSpec
from gem_opkit.testing import check_contract_json, check_torch_free, run_without_triton


def test_contract_is_the_committed_one():
    check_contract_json(gem_attention.contract, Path(__file__).parent / "contract.json")


def test_contract_and_costs_need_no_torch():
    check_torch_free("gem_attention.contract", "gem_attention.costs", "gem_attention.workloads")


def test_cases_need_no_torch():
    operators = (
        "jagged_flash_attention",
        "generalized_attention",
        "pooled_attention",
        "block_attention",
        "normed_attention",
    )
    check_torch_free(*(f"gem_attention.kernels.{name}.cases" for name in operators))


def test_reference_path_needs_no_triton():
    printed = run_without_triton(
        "import torch\n"
        "from gem_attention.ops import (block_attention, generalized_attention,\n"
        "    jagged_flash_attention, pooled_attention)\n"
        "from gem_attention.contract import AttentionSpec\n"
        "from gem_attention.layers import SelfAttention\n"
        "from gem_jagged.batch import Layout\n"
        "layout = Layout.from_lengths([2, 0, 1])\n"
        "x = torch.ones(3, 2, 4, requires_grad=True)\n"
        "total = jagged_flash_attention(x, x, x, layout, causal=True).sum()\n"
        "total += generalized_attention(x, x, x, layout, layout).sum()\n"
        "total += block_attention(x, x, x, layout, impl='reference').sum()\n"
        "total += pooled_attention(x[:1], x, x, layout).sum()\n"
        "total.backward()\n"
        "SelfAttention(8, AttentionSpec(heads=2, head_dim=4))(x.detach().flatten(1), layout)\n"
        "print(bool(torch.isfinite(x.grad).all()))\n"
        "try:\n"
        "    import triton\n"
        "except ImportError:\n"
        "    print('blocked')\n"
    )
    assert printed.split() == ["True", "blocked"]


def test_spec_fills_in_its_defaults():
    spec = AttentionSpec(heads=4, head_dim=16)
    assert (spec.key_heads, spec.score_scale, spec.window) == (4, 0.25, (None, None))
    assert AttentionSpec(heads=4, kv_heads=2, head_dim=8, pattern="causal").window == (None, 0)
    near = AttentionSpec(heads=1, head_dim=8, pattern="window", window_tokens=3)
    assert near.window == (3, 3)
    by_length = AttentionSpec(heads=1, head_dim=8, scale="inverse_max_tokens", max_tokens=50)
    assert by_length.score_scale == 0.02


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pattern": "window"}, "window_tokens must be given with pattern 'window'"),
        ({"window_tokens": 3}, "window_tokens must be given with pattern 'window'"),
        ({"pattern": "window", "window_tokens": -1}, "window_tokens"),
        ({"scale": "inverse_max_tokens"}, "max_tokens must be given"),
        ({"max_tokens": 3}, "max_tokens must be given"),
        ({"kv_heads": 3}, "kv_heads must divide heads"),
        ({"activation": ("gelu",)}, "activation must name one activation a head"),
        ({"activation": "tanh"}, "activation"),
        ({"head_dim": 5, "rotary": "rote"}, "head_dim must be even"),
        ({"pattern": "dilated"}, "pattern"),
        ({"window": 3}, "window"),
    ],
)
def test_spec_refuses_what_does_not_fit(fields, message):
    with pytest.raises(ValidationError, match=message):
        AttentionSpec(**{"heads": 4, "head_dim": 8, **fields})

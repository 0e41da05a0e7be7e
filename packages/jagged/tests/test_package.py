from pathlib import Path

import pytest
from pydantic import ValidationError

import gem_jagged.contract
from gem_jagged.contract import LengthLimits, PackingSpec
from gem_jagged.workloads import uniform_lengths
from gem_opkit.errors import ConfigError
from gem_opkit.testing import (
    check_contract_json,
    check_refuses,
    check_torch_free,
    run_without_triton,
)


def test_contract_is_the_committed_one():
    check_contract_json(gem_jagged.contract, Path(__file__).parent / "contract.json")


def test_contract_and_costs_need_no_torch():
    check_torch_free("gem_jagged.contract", "gem_jagged.costs", "gem_jagged.workloads")


def test_reference_path_needs_no_triton():
    printed = run_without_triton(
        "import torch\n"
        "from gem_jagged.batch import Jagged\n"
        "from gem_jagged.ops import jagged_mean, jagged_to_padded\n"
        "batch = Jagged.from_list([torch.ones(2, 3), torch.zeros(0, 3)])\n"
        "padded = jagged_to_padded(batch.values.requires_grad_(), batch.layout)\n"
        "padded.sum().backward()\n"
        "print(jagged_mean(batch.values, batch.layout, impl='reference').tolist())\n"
        "try:\n"
        "    import triton\n"
        "except ImportError:\n"
        "    print('blocked')\n"
    )
    assert printed.split("\n")[:2] == ["[[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]", "blocked"]


def test_limits_are_in_order():
    limits = LengthLimits(max_length_tokens=100, max_sequences=8)
    assert limits.max_total_tokens == 800
    assert LengthLimits(max_length_tokens=1).max_total_tokens is None
    with pytest.raises(ValidationError, match="min_length_tokens must be at most max_length"):
        LengthLimits(max_length_tokens=3, min_length_tokens=4)
    with pytest.raises(ValidationError, match="max_length"):
        LengthLimits(max_length=3)


def test_narrow_offsets_need_a_bound():
    limits = LengthLimits(max_length_tokens=2**16, max_sequences=2**15)
    assert PackingSpec(limits=limits).offsets_bits == 64
    with pytest.raises(ValidationError, match=r"offsets_bits=32 needs .* got 2147483648; use 64"):
        PackingSpec(limits=limits, offsets_bits=32)
    with pytest.raises(ValidationError, match="got no limit; use 64"):
        PackingSpec(limits=LengthLimits(max_length_tokens=4), offsets_bits=32)


@pytest.mark.parametrize("fill", [0.25, 0.5, 0.9, 1.0])
def test_drawn_lengths_have_the_asked_fill(fill):
    lengths = uniform_lengths(4000, 1000, fill=fill)
    assert abs(sum(lengths) / 4000 / 1000 - fill) < 0.02
    assert max(lengths) <= 1000
    assert lengths == uniform_lengths(4000, 1000, fill=fill)


def test_refuses():
    check_refuses(
        [(lambda: uniform_lengths(1, 1, fill=0), ConfigError, r"fill must be in \(0, 1\]; got 0")]
    )

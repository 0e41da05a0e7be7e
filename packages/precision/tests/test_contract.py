"""The contract of gem_precision: its schema is committed, and it refuses what it does not know."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from gem_opkit.contract import contract_json
from gem_precision import contract
from gem_precision.contract import PrecisionRecipe


def test_schema_is_the_committed_one():
    committed = Path(__file__).with_name("contract.json").read_text(encoding="utf-8")
    assert contract_json(contract) == committed


def test_default_recipe_is_fp32():
    assert PrecisionRecipe().formats() == ("fp32",)


def test_formats_lists_each_once_with_the_default_first():
    recipe = PrecisionRecipe(
        default="bf16_autocast",
        layer_formats={"mlp": "mxfp8", "attention": "mxfp8", "head": "bf16_autocast"},
    )
    assert recipe.formats() == ("bf16_autocast", "mxfp8")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"default": "int8"}, "default"),
        ({"layer_formats": {"convolution": "fp32"}}, "layer_formats"),
        ({"escapes": ()}, "escapes"),
        ({"bf16_escapes": ("",)}, "bf16_escapes must hold prefixes"),
        ({"bf16_escapes": ("heads.",)}, "'heads.'"),
    ],
)
def test_refuses_and_names_the_field(fields, word):
    with pytest.raises(ValidationError, match=word):
        PrecisionRecipe(**fields)


def test_contract_imports_no_torch():
    code = "import sys, gem_precision.contract; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

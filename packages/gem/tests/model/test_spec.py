"""`ModelSpec`: what it accepts, what it refuses, and that it needs no torch."""

import subprocess
import sys
import typing

import pytest
from pydantic import TypeAdapter, ValidationError

from gem.model.spec import DinSpec, GemSpec, MlpActivation, ModelSpec, StreamSpec
from gem_precision.layers import MlpActivation as PrecisionActivation

READ = TypeAdapter(ModelSpec)


def test_kind_chooses_the_model():
    assert isinstance(READ.validate_python({"kind": "gem"}), GemSpec)
    assert isinstance(READ.validate_python({"kind": "din"}), DinSpec)
    with pytest.raises(ValidationError, match="kind"):
        READ.validate_python({"kind": "dcn"})


@pytest.mark.parametrize(
    "spec",
    [GemSpec(), DinSpec(), GemSpec(streams={"clicks": StreamSpec(heads=1, width=8)})],
    ids=["gem", "din", "gem-streams"],
)
def test_written_spec_reads_back_equal(spec):
    assert READ.validate_json(spec.model_dump_json()) == spec
    assert READ.validate_python(spec.model_dump()) == spec


def test_named_stream_inherits_what_it_does_not_name():
    spec = GemSpec.model_validate(
        {"stream": {"width": 48, "heads": 4}, "streams": {"clicks": {"width": 96}}}
    )
    assert spec.stream_spec("clicks") == StreamSpec(width=96, heads=4)
    assert spec.stream_spec("views") == StreamSpec(width=48, heads=4)


def test_shared_stream_may_be_a_contract_already():
    spec = GemSpec.model_validate(
        {"stream": StreamSpec(heads=4), "streams": {"clicks": {"width": 96}}}
    )
    assert spec.stream_spec("clicks") == StreamSpec(width=96, heads=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"widht": 3}, "widht"),
        ({"layers": []}, "layers"),
        ({"layers": ["interaction", "transformer"]}, "its last layer must be an interaction"),
        ({"stream": {"layers": [0, 7]}}, "must index the 3 layers"),
        ({"stream": {"layers": [0, 1]}}, "its last layer must be an interaction"),
        ({"stream": {"layers": [2, 0]}}, "layers must be rising indices"),
        ({"stream": {"full_layers": [0]}}, "full_layers must name transformer"),
        ({"stream": {"width": 10, "heads": 3}}, "heads must divide width"),
        ({"stream": {"width": 6, "heads": 2}}, "must be even under rotary"),
        ({"stream": {"gdpa_activation": ["gelu"] * 3}}, "one activation for each of 2 heads"),
        ({"stream": {"gdpa_activation": "softplus"}}, "gdpa_activation"),
        ({"stream": {"gap_buckets": 1}}, "gap_buckets must be 0 or at least 2"),
        ({"stream": {"summary_tokens": 0, "target_tokens": 0}}, "must be at least 1"),
        ({"stream": {"target_attention": "din", "target_tokens": 2}}, "must be at most 1 under"),
        ({"stream": {"pooling": "max"}}, "pooling"),
        ({"stream": {"ffn": "mlp"}}, "ffn"),
        ({"stream": {"recent_tokens": -1}}, "recent_tokens"),
        ({"layers": ["both", "transformer"]}, "its last layer must be an interaction"),
        ({"experts": {"count": 3, "kinds": ["dot", "mlp"]}}, "one for each of 3 experts; got 2"),
        ({"experts": {"kinds": []}}, "kinds"),
        ({"experts": {"kinds": ["fm"]}}, "kinds"),
        ({"width": 9, "experts": {"kinds": ["attention"]}}, "attention_heads must divide width"),
        ({"numbers": {"buckets": 1}}, "buckets must be 0 or at least 2"),
        ({"numbers": {"bucket_low": 1.0, "bucket_high": 1.0}}, "bucket_low must be below"),
        ({"heads": {"base_rates": {"click": 1.0}}}, "base_rates"),
        ({"streams": {"clicks": {"heads": 7}}}, "heads must divide width"),
        ({"streams": "clicks"}, "streams"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_refuses(given, message):
    with pytest.raises(ValidationError, match=message):
        GemSpec.model_validate(given)


def test_activations_are_those_of_the_mlp():
    assert set(typing.get_args(MlpActivation)) == set(typing.get_args(PrecisionActivation))


def test_specs_and_flops_need_no_torch():
    code = (
        "import sys, gem.model.spec, gem.model.structure, gem.model.flops; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""The contract base, its schema file, and the promise that no contract needs torch."""

import json
import types
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, TypeAdapter, ValidationError

import gem_opkit.contract
from gem_opkit.contract import (
    Bytes,
    Contract,
    Flops,
    Milliseconds,
    contract_schema,
    write_contract_json,
)
from gem_opkit.testing import CheckFailure, check_contract_json, check_torch_free

HERE = Path(__file__).parent


class StepPlan(Contract):
    """A plan for tests."""

    memory_bytes: Bytes = Field(description="per rank")
    work_flops: Flops = 0
    step_ms: Milliseconds = 1.0


def test_contract_is_frozen():
    plan = StepPlan(memory_bytes=1)
    with pytest.raises(ValidationError, match="frozen"):
        plan.memory_bytes = 2  # type: ignore[misc]


def test_unknown_key_is_an_error_that_names_it():
    with pytest.raises(ValidationError, match=r"memory_byte\n.*Extra inputs are not permitted"):
        StepPlan(memory_bytes=1, memory_byte=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("unit", "bad"),
    [
        (Bytes, -1),
        (Bytes, 1.5),
        (Flops, -1),
        (Milliseconds, -0.1),
        (Milliseconds, float("nan")),
        (Milliseconds, float("inf")),
    ],
)
def test_units_refuse_what_cannot_be(unit, bad):
    with pytest.raises(ValidationError):
        TypeAdapter(unit).validate_python(bad)


def test_numbers_of_a_contract_are_finite():
    class Rates(Contract):
        learning_rate: float

    with pytest.raises(ValidationError, match="finite"):
        Rates(learning_rate=float("nan"))


def test_default_is_held_to_its_own_rule():
    class Broken(Contract):
        heads: int = Field(default=0, ge=1)

    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Broken()


def module_of(**members):
    module = types.ModuleType("gem_toy.contract")
    for name, value in members.items():
        if isinstance(value, type):
            value.__module__ = module.__name__
        setattr(module, name, value)
    return module


def test_schema_holds_what_a_module_defines_and_not_what_it_imports():
    class ToySpec(Contract):
        heads: int

    toy = module_of(ToySpec=ToySpec, Form=Literal["a", "b"], _Hidden=Literal["c"])
    toy.Contract = Contract
    toy.Bytes = Bytes
    schema = contract_schema(toy)
    assert sorted(schema) == ["Form", "ToySpec"]
    assert schema["Form"]["enum"] == ["a", "b"]
    assert schema["ToySpec"]["required"] == ["heads"]
    assert schema["ToySpec"]["additionalProperties"] is False


def test_a_changed_contract_fails_until_its_file_is_written_anew(tmp_path):
    def toy(kind):
        class ToySpec(Contract):
            heads: kind

        return module_of(ToySpec=ToySpec)

    path = tmp_path / "contract.json"
    with pytest.raises(CheckFailure, match=r"differs from contract\.json"):
        check_contract_json(toy(int), path)
    write_contract_json(toy(int), path)
    check_contract_json(toy(int), path)
    with pytest.raises(CheckFailure, match=r'\+ .*"type": "number"'):
        check_contract_json(toy(float), path)


def test_contract_json_is_committed():
    check_contract_json(gem_opkit.contract, HERE / "contract.json")
    assert set(json.loads((HERE / "contract.json").read_text())) == {
        "Bytes",
        "Contract",
        "Flops",
        "Milliseconds",
    }


def test_torch_free_modules_import_where_torch_cannot():
    check_torch_free(
        "gem_opkit.contract",
        "gem_opkit.cost",
        "gem_opkit.impl",
        "gem_opkit.errors",
        "gem_opkit.dims",
        "gem_opkit.ceilings",
    )


def test_torch_free_catches_an_import_of_torch():
    with pytest.raises(CheckFailure, match="import of torch halted"):
        check_torch_free("gem_opkit.budget")

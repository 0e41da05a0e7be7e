"""The base of every contract: specs, plans and recipes that cross a package boundary.

Contracts are validated once, on the host, before any tensor exists, so this file imports
pydantic and the standard library and never torch. ``gem plan`` relies on that.

Left out: bundles of tensors, which are frozen dataclasses (a pydantic model cannot be built
inside a full graph of ``torch.compile``).
"""

import json
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Bytes = Annotated[int, Field(ge=0, description="bytes")]
Flops = Annotated[int, Field(ge=0, description="floating point operations; a multiply-add is 2")]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False, description="milliseconds")]


class Contract(BaseModel):
    """A frozen pydantic model in which an unknown key is an error.

    Derive specs (what a thing is), plans (a decision) and recipes (a policy) from it. Every
    number carries its unit in its name and a ``Field(description=...)``.
    """

    # validate_default: a default that breaks its own rule must fail in the first test, not
    # with the first user. Numbers have to be finite unless a field says otherwise.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
    )


def contract_schema(module: ModuleType) -> dict[str, Any]:
    """Collect the JSON schemas of everything public that a contract module defines.

    Args:
        module: an imported ``contract.py``.

    Returns:
        name -> JSON schema, sorted by name: ``Contract`` subclasses defined in the module, and
        its ``Annotated`` and ``Literal`` aliases. Names that start with an underscore, and unit
        types imported from this module, are left out.
    """
    schemas: dict[str, Any] = {}
    members: dict[str, Any] = vars(module)
    for name, value in sorted(members.items()):
        if name.startswith("_"):
            continue
        if get_origin(value) in (Annotated, Literal):
            if not _is_imported_unit(module, name):
                schemas[name] = TypeAdapter[Any](value).json_schema()
        elif (
            isinstance(value, type)
            and issubclass(value, Contract)
            and value.__module__ == module.__name__
        ):
            schemas[name] = value.model_json_schema()
    return schemas


def _is_imported_unit(module: ModuleType, name: str) -> bool:
    return module.__name__ != __name__ and name in ("Bytes", "Flops", "Milliseconds")


def contract_json(module: ModuleType) -> str:
    """Write ``contract_schema`` as the text that a package commits in ``tests/contract.json``.

    Args:
        module: an imported ``contract.py``.

    Returns:
        JSON, indented by 2, keys sorted, ending in a newline.
    """
    return json.dumps(contract_schema(module), indent=2, sort_keys=True) + "\n"


def write_contract_json(module: ModuleType, path: Path | str) -> None:
    """Write ``contract_json`` to a file. Run it by hand after a wanted change of an interface.

    Args:
        module: an imported ``contract.py``.
        path: where to write, by convention ``packages/<package>/tests/contract.json``.
    """
    Path(path).write_text(contract_json(module), encoding="utf-8")

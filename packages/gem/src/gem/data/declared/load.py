"""Declarations: those of public data sets that come with the package, and a user's own file."""

import hashlib
import tomllib
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from gem.contract_faults import explain, explain_size
from gem.data.declared.spec import Declaration
from gem_opkit.errors import ConfigError, refusal


def shipped_declarations() -> tuple[str, ...]:
    """Names of the public data sets that have a declaration here, sorted."""
    folder = resources.files("gem") / "data" / "declared" / "shipped"
    return tuple(
        sorted(
            entry.name.removesuffix(".toml")
            for entry in folder.iterdir()
            if entry.name.endswith(".toml")
        )
    )


def load_declaration(name: str) -> tuple[Declaration, str]:
    """Read a declaration and check it.

    Args:
        name: of a shipped one, or path of a TOML file.

    Returns:
        the declaration, and a short checksum of its content.

    Raises:
        ConfigError: no such file, not TOML, an unknown key or a wrong value; names the key.
    """
    if name in shipped_declarations():
        folder = resources.files("gem") / "data" / "declared" / "shipped"
        content = (folder / f"{name}.toml").read_bytes()
    else:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(
                refusal(
                    "gem data prepare",
                    "NAME",
                    must="be the path of a declaration, a TOML file",
                    got=repr(name),
                    fix="check the path",
                )
            )
        content = path.read_bytes()
    try:
        raw = tomllib.loads(content.decode("utf-8-sig"))
    # Broken TOML is a ValueError, as is a number of thousands of digits; arrays may nest too deep.
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{name}: file must be TOML in UTF-8; got {fault}; mend it") from None
    if large := explain_size(raw):
        raise ConfigError(f"{name}: {large}")
    try:
        declaration = Declaration.model_validate(raw)
    except ValidationError as fault:
        raise ConfigError(f"{name}: {explain(fault, raw, Declaration)}") from None
    text = declaration.model_dump_json(exclude_defaults=True)
    return declaration, hashlib.sha256(text.encode()).hexdigest()[:12]

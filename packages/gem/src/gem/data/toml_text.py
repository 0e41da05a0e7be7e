"""Contracts as TOML text. The standard library reads TOML but does not write it."""

import json
import re
from collections.abc import Mapping
from typing import Any

from gem_opkit.errors import DtypeError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")


def toml_text(document: Mapping[str, Any]) -> str:
    """Write a mapping as TOML, so that `tomllib.loads` gives it back.

    Args:
        document: text keys; values are texts, bools, ints, finite floats, None, mappings, and
            lists or tuples of these. None stands for a missing key and is left out; inside a list
            it is refused.

    Returns:
        TOML that ends in a newline (empty for an empty mapping). Scalars come before tables, as
        TOML demands; otherwise the order is kept.

    Raises:
        DtypeError: a value that TOML has no form for.
    """
    lines: list[str] = []
    _write_table(document, (), lines)
    text = "\n".join(lines).strip("\n")
    return text + "\n" if text else ""


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    later: list[tuple[str, Any]] = []
    for key, value in table.items():
        if value is None:
            continue
        if isinstance(value, Mapping) or _is_array_of_tables(value):
            later.append((key, value))
        else:
            lines.append(f"{_key(key)} = {_inline(value, (*path, key))}")
    for key, value in later:
        inner = (*path, key)
        dotted = ".".join(_key(part) for part in inner)
        if isinstance(value, Mapping):
            lines += ["", f"[{dotted}]"]
            _write_table(value, inner, lines)
        else:
            for element in value:
                lines += ["", f"[[{dotted}]]"]
                _write_table(element, inner, lines)


def _is_array_of_tables(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(element, Mapping) for element in value)
    )


def _key(key: str) -> str:
    return key if _BARE_KEY.match(key) else _text(key)


def _text(value: str) -> str:
    # JSON's escapes are TOML's, but TOML wants DEL escaped too, and JSON leaves it as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _inline(value: Any, path: tuple[str, ...]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = repr(value)
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_inline(element, path) for element in value) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(key)} = {_inline(inner, path)}" for key, inner in value.items())
        return "{" + ", ".join(pairs) + "}"
    raise DtypeError(
        f"toml_text: {'.'.join(path)} must be a text, number, bool, list or table; "
        f"got {type(value).__name__}; convert it first"
    )

"""Messages of a file that breaks its contract: recipes and `dataset.toml`. Imports no torch."""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


def explain(error: ValidationError, raw: Mapping[str, Any], contract: type[BaseModel]) -> str:
    """One line for the first fault of a file; unknown keys come first, as they cause others.

    Args:
        error: what pydantic found.
        raw: the keys of the file.
        contract: what they were checked against.

    Returns:
        the key with its full path, the rule, and what arrived; for an unknown key the nearest
        known one.
    """
    faults = sorted(
        error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden"
    )
    line = _explain_one(faults[0], raw, contract)
    more = len(faults) - 1
    return line if not more else f"{line} (and {more} more)"


# What tensors and arrays hold: int64 and float32.
_MOST_WHOLE, _MOST_REAL, _LEAST_REAL = 2**63 - 1, 3.4e38, 1.2e-38


def explain_size(raw: Mapping[str, Any]) -> str | None:
    """One line for the first number of a file that no tensor could hold.

    Args:
        raw: the keys of the file.

    Returns:
        the key with its full path, the rule, and what arrived; None where all are of usable size.
    """
    for path, value in _leaves(raw, ""):
        if isinstance(value, int) and abs(value) > _MOST_WHOLE:
            rule = "fit in 64 bits"
        elif isinstance(value, float) and not _is_usable(value):
            rule = f"be 0 or lie between {_LEAST_REAL} and {_MOST_REAL} in size, as in 32 bits"
        else:
            continue
        return f"key {path!r} must {rule}; got {_shown(value)}; correct the value"
    return None


def _is_usable(value: float) -> bool:
    # NaN and infinity are told with the contract's own words.
    return not math.isfinite(value) or value == 0 or _LEAST_REAL <= abs(value) <= _MOST_REAL


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        yield path, value
        return
    for key, part in parts:
        yield from _leaves(part, f"{path}.{key}" if path else str(key))


def _explain_one(fault: ErrorDetails, raw: Mapping[str, Any], contract: type[BaseModel]) -> str:
    path = _raw_path(fault["loc"], raw)
    key, kind = ".".join(str(part) for part in path), fault["type"]
    if kind == "extra_forbidden":
        hint = _nearest_key(path, raw, contract)
        return f"unknown key {key!r}" + (f"; did you mean {hint!r}?" if hint else "")
    if kind == "missing":
        return f"key {key!r} must be given; got nothing; add it"
    if kind.startswith("union_tag"):
        tags = fault.get("ctx", {}).get("expected_tags")
        expected = f" one of {tags}" if tags else " the name of a kind"
        got = fault["input"].get("kind") if isinstance(fault["input"], Mapping) else fault["input"]
        return f"key '{key}.kind' must be{expected}; got {got!r}; correct it"
    message = fault["msg"]
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        return message if not key or message.startswith(f"{key}:") else f"{key}: {message}"
    rule = _rule(kind, message, fault.get("ctx", {}))
    got = fault["input"]
    return f"key {key!r} must {rule}; got {_shown(got)} ({_toml_type(got)}); correct the value"


def _rule(kind: str, message: str, context: Mapping[str, Any]) -> str:
    """What a value must do, in the words of TOML."""
    match kind:
        case "model_type" | "model_attributes_type" | "dict_type":
            return "be a table"
        case "tuple_type" | "list_type":
            return "be an array"
        case "string_type":
            return "be a string"
        case "too_short":
            return f"have at least {context.get('min_length')} entries"
        case "string_pattern_mismatch":
            return f"match {context.get('pattern')}"
        case "string_too_long":
            return f"have at most {context.get('max_length')} characters"
    rule = message.removeprefix("Input should ")
    return rule if rule != message else f"be valid: {message}"


def _shown(value: object) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def _toml_type(value: object) -> str:
    names = {bool: "boolean", int: "integer", float: "float", str: "string", dict: "table"}
    return names.get(type(value), "array" if isinstance(value, tuple | list) else "value")


def _raw_path(loc: Sequence[str | int], raw: Mapping[str, Any]) -> list[str | int]:
    """The path as the recipe has it: pydantic also puts the chosen kind of a union into it."""
    path: list[str | int] = []
    here: Any = raw
    for part in loc:
        if isinstance(here, Mapping):
            if part not in here and here.get("kind") == part:
                continue
            here = here.get(part)
        elif isinstance(here, list | tuple) and isinstance(part, int) and part < len(here):
            here = here[part]
        else:
            here = None
        path.append(part)
    return path


def _nearest_key(
    path: Sequence[str | int], raw: Mapping[str, Any], contract: type[BaseModel]
) -> str | None:
    """The known key that an unknown one was most likely meant to be.

    First among the neighbours of the unknown key, then by its last word over the whole config.
    """
    *parents, last = (str(part) for part in path)
    types, here = [contract], raw
    for part in path[:-1]:
        below = [child for t in types for child in _children(t, part)]
        here = _step(here, part)
        types = [member for child in below for member in _members(child, here)]
    siblings = {name for t in types if _is_model(t) for name in t.model_fields}
    initials = "".join(word[:1] for word in last.split("_"))  # learning_rate for lr
    close = difflib.get_close_matches(last, sorted(siblings), n=1, cutoff=0.6)
    close = close or sorted(siblings & {initials})
    if close:
        return ".".join([*parents, close[0]])
    known = sorted(set(_known_paths(contract, "")))
    words = sorted({key.rpartition(".")[2] for key in known})
    close = difflib.get_close_matches(last, words, n=1, cutoff=0.75)
    if close:
        known = [key for key in known if key.rpartition(".")[2] == close[0]]
    elif parents and siblings:
        known = [".".join([*parents, name]) for name in sorted(siblings)]
    full = ".".join([*parents, last])
    # A key that another kind of the same table has is no help here.
    known = [key for key in known if key != full]
    closeness = {key: difflib.SequenceMatcher(None, key, full).ratio() for key in known}
    return max(known, key=lambda key: closeness[key], default=None)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _step(here: Any, part: str | int) -> Any:
    if isinstance(here, Mapping):
        return here.get(part)
    if isinstance(here, list | tuple) and isinstance(part, int) and part < len(here):
        return here[part]
    return None


def _children(annotation: Any, part: str | int) -> list[Any]:
    """What may stand under a key or index of a model, table or array."""
    if _is_model(annotation):
        field = annotation.model_fields.get(str(part))
        return [] if field is None else [field.annotation]
    arguments = [a for a in get_args(annotation) if a is not Ellipsis]
    return arguments[-1:] if get_origin(annotation) in (dict, tuple) else []


def _members(annotation: Any, value: Any) -> Iterator[Any]:
    """The models, tables and arrays in an annotation, only those of the value's kind."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0], value)
    elif origin in (Union, UnionType):
        for argument in get_args(annotation):
            yield from _members(argument, value)
    elif _is_model(annotation):
        kind, field = _step(value, "kind"), annotation.model_fields.get("kind")
        if field is None or kind is None or kind in get_args(field.annotation):
            yield annotation
    elif origin in (dict, tuple):
        yield annotation


def _known_paths(model: Any, prefix: str) -> Iterator[str]:
    """Every key that does not lie below a table or array of free names."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for member in _members(field.annotation, None):
            if _is_model(member):
                yield from _known_paths(member, f"{prefix}{name}.")

"""`RunConfig`: the packages' contracts put together, read from a TOML recipe and checked once.

This is the only place that checks combinations which span packages. An error names the key with
its full path, what was expected and what arrived; an unknown key also names the nearest known one.
Imports no torch.
"""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from gem.data.features import DataSpec
from gem.data.toml_text import toml_text
from gem.model.spec import GemSpec, ModelSpec
from gem.train.spec import TrainSpec
from gem_opkit.contract import Contract
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.contract import ParallelPlan
from gem_precision.contract import PrecisionRecipe


class RunConfig(Contract):
    """Everything that decides what a training run computes."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of the recipe, part of paths"
    )
    description: str = Field(default="", description="what the recipe is for, one sentence")
    seed: int = Field(
        default=1, ge=0, le=2**63 - 1, description="seed of the initial weights and of dropout"
    )
    data: DataSpec
    model: ModelSpec
    train: TrainSpec = TrainSpec()
    precision: PrecisionRecipe = PrecisionRecipe()
    parallel: ParallelPlan | None = Field(
        default=None, description="none: every rank holds a copy of everything (data parallel)"
    )

    @model_validator(mode="after")
    def _streams_fit(self) -> Self:
        """The model's settings of a stream must be for a stream that the recipe reads."""
        if not isinstance(self.model, GemSpec) or self.data.streams is None:
            return self
        for name, stream in self.model.streams.items():
            if name not in self.data.streams:
                raise ConfigError(
                    refusal(
                        "recipe",
                        f"model.streams.{name}",
                        must="be a stream that data.streams reads",
                        got=f"data.streams = {sorted(self.data.streams)}",
                        fix="rename or remove one of them",
                    )
                )
            read = self.data.streams[name].max_events
            if stream.max_events is not None and stream.max_events > read:
                raise ConfigError(
                    refusal(
                        "recipe",
                        f"model.streams.{name}.max_events",
                        must=f"be at most data.streams.{name}.max_events={read}",
                        got=stream.max_events,
                        fix="read more events or use fewer",
                    )
                )
        return self

    def to_toml(self) -> str:
        """The resolved config as TOML; `parse_recipe` reads it back to an equal config."""
        return toml_text(self.model_dump(mode="json", exclude_none=True))

    def differences(
        self, other: "RunConfig", *, ignored: frozenset[str] = frozenset()
    ) -> list[str]:
        """Where two configs differ.

        Args:
            other: the config to compare with.
            ignored: full paths that may differ.

        Returns:
            One text for each differing key: its path, this value and the other one.
        """
        mine, theirs = (
            _flatten(self.model_dump(mode="json")),
            _flatten(other.model_dump(mode="json")),
        )
        return [
            f"{key}: {mine.get(key, 'absent')!r} here, {theirs.get(key, 'absent')!r} there"
            for key in sorted({*mine, *theirs} - ignored)
            if mine.get(key, _ABSENT) != theirs.get(key, _ABSENT)
        ]


_ABSENT = object()
_MOST_BASES = 4


def shipped_recipes() -> dict[str, str]:
    """The recipes that come with the package.

    Returns:
        name -> text, sorted by name.
    """
    folder = resources.files("gem") / "recipes"
    found = {
        Path(entry.name).stem: entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }
    return dict(sorted(found.items()))


def load_recipe(
    recipe: str, overrides: Sequence[str] = (), *, seed: int | None = None
) -> RunConfig:
    """Read a recipe and check it.

    Args:
        recipe: name of a shipped recipe, or path of a TOML file. Its key ``base`` may name
            another recipe, whose keys it is laid over: tables are joined, all else is replaced,
            and so is a table of another ``kind``.
        overrides: texts ``a.b=value`` that replace single keys; the value is TOML, and a value
            that is not TOML is taken as a text, so that paths need no quotes.
        seed: replaces the recipe's seed.

    Returns:
        The resolved config.

    Raises:
        ConfigError: no such recipe, not TOML, an unknown key, a wrong type or value; the message
            names the key.
    """
    text, stem, origin = _find_recipe(recipe)
    return parse_recipe(text, name=stem, origin=origin, overrides=overrides, seed=seed)


def _find_recipe(recipe: str) -> tuple[str, str, str]:
    """Text, name and origin of a recipe."""
    shipped = shipped_recipes()
    if recipe in shipped:
        return shipped[recipe], recipe, f"recipe {recipe}"
    path = Path(recipe)
    if not path.is_file():
        raise ConfigError(
            refusal(
                "gem",
                "RECIPE",
                must=f"be a TOML file or one of {', '.join(shipped)}",
                got=repr(recipe),
                fix=_did_you_mean(recipe, shipped) or "check the path",
            )
        )
    return path.read_text(encoding="utf-8"), path.stem, str(path)


def parse_recipe(
    text: str,
    *,
    name: str,
    origin: str,
    overrides: Sequence[str] = (),
    seed: int | None = None,
) -> RunConfig:
    """Check the text of a recipe.

    Args:
        text: TOML.
        name: the recipe's name where it gives none.
        origin: where the text is from, for messages.
        overrides: as in `load_recipe`.
        seed: as in `load_recipe`.

    Returns:
        The resolved config.

    Raises:
        ConfigError: as in `load_recipe`.
    """
    raw = _raw_recipe(text, origin, depth=0)
    raw.setdefault("name", name)
    for override in overrides:
        _override(raw, override)
    if seed is not None:
        raw["seed"] = seed
    try:
        # Strict, so that "512" is no number; TOML arrays become tuples, as contracts hold them.
        return RunConfig.model_validate(_tuples(raw), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {_explain(error, raw)}") from None


def _raw_recipe(text: str, origin: str, *, depth: int) -> dict[str, Any]:
    """The keys of a recipe, laid over those of its base."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin}: the file must be TOML; {error}; mend that line") from None
    base = raw.pop("base", None)
    if base is None:
        return raw
    if not isinstance(base, str) or depth == _MOST_BASES:
        raise ConfigError(
            refusal(
                origin,
                "base",
                must=f"name a recipe, at most {_MOST_BASES} above one another",
                got=repr(base),
                fix="name a shipped recipe or a file, and no circle",
            )
        )
    below, _, place = _find_recipe(base)
    under = _raw_recipe(below, place, depth=depth + 1)
    under.pop("name", None)
    return _laid_over(under, raw)


def _laid_over(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Tables are joined key by key, unless they are of different kinds; all else is replaced."""
    joined = dict(under)
    for key, value in over.items():
        before = joined.get(key)
        joined[key] = value
        if isinstance(before, dict) and isinstance(value, dict):
            kind = before.get("kind")
            if value.get("kind", kind) == kind:
                joined[key] = _laid_over(before, value)
    return joined


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(part) for key, part in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(part) for part in value)
    return value


def _override(raw: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise ConfigError(
            refusal("gem", "--set", must="look like a.b=value", got=repr(text), fix="add the value")
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    here: Any = raw
    for depth, key in enumerate(keys[:-1]):
        if isinstance(here, list):
            here = here[_index(here, key, keys[:depth])]
        else:
            here = here.setdefault(key, {})
        if not isinstance(here, dict | list):
            raise ConfigError(
                refusal(
                    "gem",
                    f"--set {path}",
                    must=f"name a key of a table, and {'.'.join(keys[: depth + 1])} is none",
                    got=repr(here),
                    fix="shorten the path",
                )
            )
    if isinstance(here, list):
        here[_index(here, keys[-1], keys[:-1])] = parsed
    else:
        here[keys[-1]] = parsed


def _index(here: list[Any], key: str, path: Sequence[str]) -> int:
    if key.isdigit() and int(key) < len(here):
        return int(key)
    raise ConfigError(
        refusal(
            "gem",
            f"--set {'.'.join(path)}",
            must=f"be followed by an index of its {len(here)} entries",
            got=repr(key),
            fix=f"use 0 to {len(here) - 1}" if here else "the array is empty",
        )
    )


# ---------------------------------------------------------------- messages


def _explain(error: ValidationError, raw: Mapping[str, Any]) -> str:
    """One line for the first fault; unknown keys come first, as they cause others."""
    faults = sorted(
        error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden"
    )
    line = _explain_one(faults[0], raw)
    more = len(faults) - 1
    return line if not more else f"{line} (and {more} more)"


def _explain_one(fault: ErrorDetails, raw: Mapping[str, Any]) -> str:
    path = _raw_path(fault["loc"], raw)
    key, kind = ".".join(str(part) for part in path), fault["type"]
    if kind == "extra_forbidden":
        hint = _nearest_key(path, raw)
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
    rule = message.removeprefix("Input should be ").removeprefix("Input should ")
    if kind == "model_type":
        rule = "a table"
    got = fault["input"]
    return f"key {key!r} must be {rule}; got {_shown(got)} ({_toml_type(got)}); correct the value"


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


def _nearest_key(path: Sequence[str | int], raw: Mapping[str, Any]) -> str | None:
    """The known key that an unknown one was most likely meant to be.

    First among the neighbours of the unknown key, then by its last word over the whole config.
    """
    *parents, last = (str(part) for part in path)
    types, here = [RunConfig], raw
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
    known = sorted(set(_known_paths(RunConfig, "")))
    words = sorted({key.rpartition(".")[2] for key in known})
    close = difflib.get_close_matches(last, words, n=1, cutoff=0.75)
    if close:
        known = [key for key in known if key.rpartition(".")[2] == close[0]]
    elif parents and siblings:
        known = [".".join([*parents, name]) for name in sorted(siblings)]
    full = ".".join([*parents, last])
    return max(known, key=lambda key: difflib.SequenceMatcher(None, key, full).ratio())


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


def _did_you_mean(word: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Full path -> scalar; an empty table or array is a value of its own."""
    if isinstance(value, Mapping) and value:
        parts = value.items()
    elif isinstance(value, list) and value:
        parts = enumerate(value)
    else:
        return {prefix: value}
    dot = "." if prefix else ""
    return {k: v for key, part in parts for k, v in _flatten(part, f"{prefix}{dot}{key}").items()}

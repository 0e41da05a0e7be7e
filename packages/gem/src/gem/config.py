"""`RunConfig`: the packages' contracts put together, read from a TOML recipe and checked once.

This is the only place that checks combinations which span packages. An error names the key with
its full path, what was expected and what arrived; an unknown key also names the nearest known one.
Imports no torch.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from gem.contract_faults import explain, explain_size
from gem.data.features import DataSpec
from gem.data.toml_text import toml_text
from gem.model.model_presets import PRESET_KEY, preset_keys
from gem.model.spec import GemSpec, ModelSpec
from gem.train.parallel_spec import ParallelSpec
from gem.train.spec import MemorySpec, TrainSpec
from gem_opkit.contract import Contract
from gem_opkit.errors import ConfigError, UnsupportedError, refusal
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
    memory: MemorySpec = MemorySpec()
    parallel: ParallelSpec | None = Field(
        default=None, description="none: every rank holds a copy of everything (data parallel)"
    )

    @model_validator(mode="after")
    def _names_are_once(self) -> Self:
        """A name given twice would be read twice, or once, and nothing would show which."""
        for path, names in _name_lists(self.data.model_dump(), "data"):
            for place, name in enumerate(names):
                if name in names[:place]:
                    raise ConfigError(
                        f"{path} must name each thing once; got {name!r} twice; remove one of them"
                    )
        return self

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

    @model_validator(mode="after")
    def _rows_can_be_drawn_anywhere(self) -> Self:
        """A rank that holds a part of the tables cannot draw what lies before it."""
        plan, drawn = self.parallel, self.model.embeddings.initial_rows
        if plan is not None and not plan.tables_are_local and drawn != "by_place":
            raise ConfigError(
                refusal(
                    "recipe",
                    "model.embeddings.initial_rows",
                    must='be "by_place" where an engine holds the tables '
                    f"(parallel.table_shard={plan.table_shard}, "
                    f"parallel.table_replicate={plan.table_replicate})",
                    got=f'"{drawn}"',
                    fix="set it, or leave the tables whole on every rank; a run that is continued "
                    "keeps its rows",
                )
            )
        return self

    @model_validator(mode="after")
    def _newton_has_no_rate(self) -> Self:
        """A map that learns by Newton's method heeds no learning rate."""
        if not isinstance(self.model, GemSpec) or self.model.numbers.shortcut_rule != "newton":
            return self
        for prefix in self.train.dense.lr_factors:
            if prefix.partition(".")[0] == "shortcut":
                raise ConfigError(
                    refusal(
                        "recipe",
                        f"train.dense.lr_factors.{prefix}",
                        must='be left out with model.numbers.shortcut_rule = "newton", which has '
                        "no learning rate",
                        got=self.train.dense.lr_factors[prefix],
                        fix="remove it, or set model.numbers.shortcut_prior",
                    )
                )
        return self

    @model_validator(mode="after")
    def _products_read_what_is_gathered(self) -> Self:
        """Parameters that come as bf16 need products that read bf16."""
        formats = sorted(map(str, self.precision.formats()))
        gathered = "fp32" if self.parallel is None else self.parallel.gather_dtype
        if gathered == "bf16" and formats != ["bf16_autocast"]:
            raise ConfigError(
                refusal(
                    "recipe",
                    "parallel.gather_dtype",
                    must='be "fp32" unless precision is bf16_autocast throughout',
                    got=f"{gathered!r} with {', '.join(formats)}",
                    fix='leave it out, or set precision.default="bf16_autocast"',
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
            ignored: full paths that may differ; that of a table stands for all keys in it.

        Returns:
            One text for each differing key: its path, this value and the other one.
        """
        mine, theirs = (
            _flatten(self.model_dump(mode="json")),
            _flatten(other.model_dump(mode="json")),
        )
        return [
            f"{key}: {mine.get(key, 'absent')!r} here, {theirs.get(key, 'absent')!r} there"
            for key in sorted({*mine, *theirs})
            if mine.get(key, _ABSENT) != theirs.get(key, _ABSENT) and not _within(key, ignored)
        ]


def _within(key: str, paths: frozenset[str]) -> bool:
    """Whether a full path is one of some, or below one of them."""
    parts = key.split(".")
    return any(".".join(parts[:depth]) in paths for depth in range(1, len(parts) + 1))


def _name_lists(value: Any, path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every array of texts in a section, with its full path."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _name_lists(part, f"{path}.{key}")
    elif isinstance(value, tuple):
        if value and all(isinstance(part, str) for part in value):
            yield path, value
        for place, part in enumerate(value):
            yield from _name_lists(part, f"{path}.{place}")


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
            another recipe (a path begins at the file's folder), whose keys it is laid over:
            tables are joined, all else is replaced, and so is a table of another ``kind``. Its key
            ``model.preset`` names a published model, whose keys lie between those of the base and
            the recipe's own.
        overrides: texts ``a.b=value`` that replace single keys; the value is TOML, and a value
            that is not TOML is taken as a text, so that paths need no quotes. ``model.preset``
            is laid over the recipe, whatever its place; all other keys over that.
        seed: replaces the recipe's seed.

    Returns:
        The resolved config.

    Raises:
        ConfigError: no such recipe, not TOML, an unknown key, a wrong type or value; the message
            names the key.
    """
    text, stem, origin, beside = _find_recipe(recipe, Path())
    name = re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]+", "-", stem).strip("-") or "recipe"
    return parse_recipe(
        text, name=name, origin=origin, overrides=overrides, seed=seed, beside=beside
    )


def _find_recipe(
    recipe: str, beside: Path, asked: tuple[str, str] = ("gem", "RECIPE")
) -> tuple[str, str, str, Path]:
    """Text, name, origin and folder of a recipe; a relative path begins at `beside`.

    `asked` is who named it, and as what: a command, or a recipe as its base.
    """
    shipped = shipped_recipes()
    if recipe in shipped:
        return shipped[recipe], recipe, f"recipe {recipe}", Path()
    path = beside / recipe
    if not path.is_file():
        raise ConfigError(
            refusal(
                *asked,
                must=f"be a TOML file or one of {', '.join(shipped)}",
                got=repr(str(path)),
                fix=_did_you_mean(recipe, shipped) or "check the path",
            )
        )
    return recipe_text(path), path.stem, str(path), path.parent


def recipe_text(path: Path) -> str:
    """The text of a recipe's file.

    Args:
        path: the file.

    Raises:
        ConfigError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows put a mark first
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{path}: file must be TOML in UTF-8; got {fault}; save it so") from None


def parse_recipe(
    text: str,
    *,
    name: str,
    origin: str,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    beside: Path = Path(),
) -> RunConfig:
    """Check the text of a recipe.

    Args:
        text: TOML.
        name: the recipe's name where it gives none.
        origin: where the text is from, for messages.
        overrides: as in `load_recipe`.
        seed: as in `load_recipe`.
        beside: folder at which a relative path of a base begins.

    Returns:
        The resolved config.

    Raises:
        ConfigError: as in `load_recipe`.
    """
    raw = _raw_recipe(text, origin, beside, depth=0)
    raw.setdefault("name", name)
    presets = [text for text in overrides if _is_preset(text)]
    for override in presets:
        _override(raw, override)
        raw["model"] = _with_preset(raw["model"], "gem --set", over=True)
    for override in overrides:
        if override not in presets:
            _override(raw, override)
    if seed is not None:
        raw["seed"] = seed
    if fault := explain_size(raw):
        raise ConfigError(f"{origin}: {fault}")
    try:
        # Strict, so that "512" is no number; TOML arrays become tuples, as contracts hold them.
        return RunConfig.model_validate(_tuples(raw), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {explain(error, raw, RunConfig)}") from None


def check_built(plan: ParallelSpec) -> None:
    """Refuse what a plan asks for and the trainer has not built.

    Args:
        plan: the recipe's ``[parallel]`` section.

    Raises:
        UnsupportedError: names the key.
    """
    if plan.table_engine == "torchrec":
        raise UnsupportedError(
            refusal(
                "gem",
                "parallel.table_engine",
                must='be "torch", or "local" where every rank holds all tables',
                got='"torchrec", whose rows move before a step is judged',
                fix='take "torch"',
            )
        )


def _raw_recipe(text: str, origin: str, beside: Path, *, depth: int) -> dict[str, Any]:
    """The keys of a recipe, laid over those of its base."""
    try:
        raw = tomllib.loads(text)
    # Broken TOML is a ValueError, as is a number of thousands of digits; arrays may nest too deep.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: file must be TOML; got {error}; mend that line") from None
    if isinstance(raw.get("model"), dict):
        raw["model"] = _with_preset(raw["model"], origin, over=False)
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
    below, _, place, folder = _find_recipe(base, beside, (origin, "base"))
    under = _raw_recipe(below, place, folder, depth=depth + 1)
    under.pop("name", None)
    return _laid_over(under, raw)


def _is_preset(override: str) -> bool:
    return override.partition("=")[0].replace(" ", "") == f"model.{PRESET_KEY}"


def _with_preset(model: dict[str, Any], where: str, *, over: bool) -> dict[str, Any]:
    """The keys of a model and of the preset that it names, if any; the preset's over or under."""
    if PRESET_KEY not in model:
        return model
    own = {"model": {key: value for key, value in model.items() if key != PRESET_KEY}}
    preset = {"model": preset_keys(model[PRESET_KEY], where)}
    joined = _laid_over(own, preset) if over else _laid_over(preset, own)
    return joined["model"]


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
    except (ValueError, RecursionError):  # no TOML, thousands of digits, nested too deep
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
    # Not longer than any index: `int` refuses thousands of digits.
    if key.isascii() and key.isdigit() and len(key) < 10 and int(key) < len(here):
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

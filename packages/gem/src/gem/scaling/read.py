"""What `gem scaling` is asked for: a ladder file, a shipped ladder, or a recipe's own ladders."""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gem.config import RunConfig, load_recipe, shipped_recipes
from gem.contract_faults import explain
from gem.data.names import suggestion
from gem.model.spec import GemSpec
from gem.scaling.spec import LadderSpec, RungSpec, ScalingSpec
from gem_opkit.errors import ConfigError, UnsupportedError, refusal

# Parts of a recipe's sizes that its ladders try.
PARTS = {"quarter": 0.25, "half": 0.5, "whole": 1.0}


def shipped_ladders() -> dict[str, Path]:
    """Ladders that come with the package.

    Returns:
        name -> file.
    """
    files = sorted(_room().glob("*.toml"))
    return {file.stem: file for file in files if "ladders" in _table(file)}


def read_ladder(asked: str) -> ScalingSpec:
    """Read what to climb.

    Args:
        asked: path of a ladder file, name of a shipped one, or a recipe: name or path.

    Returns:
        the ladders; of a recipe, parts of its own sizes on its own data.

    Raises:
        ConfigError: a file that is not there or not right, a recipe that does not exist.
        UnsupportedError: a recipe of another model than the hybrid one.
    """
    ladders = shipped_ladders()
    path = ladders.get(asked, Path(asked))
    if path.suffix == ".toml" and path.is_file():
        raw = _table(path)
        if "ladders" in raw:
            return _spec(path, raw)
    elif asked not in (known := shipped_recipes()):
        raise ConfigError(
            refusal(
                "gem scaling",
                "RECIPE|LADDER",
                must=f"be a TOML file, the ladder {', '.join(ladders)}, or a recipe of "
                f"{', '.join(known)}",
                got=repr(asked) + suggestion(asked, [*ladders, *known]),
                fix="check the path",
            )
        )
    return ladders_of(asked)


def _spec(path: Path, raw: dict[str, Any]) -> ScalingSpec:
    try:
        spec = ScalingSpec.model_validate(raw)
    except ValidationError as fault:
        raise ConfigError(f"{path}: {explain(fault, raw, ScalingSpec)}") from fault
    for beside in (path.parent / spec.recipe, _room() / spec.recipe):
        if beside.is_file():
            return spec.model_copy(update={"recipe": str(beside)})
    return spec


def _room() -> Path:
    """Where the shipped ladders lie, and the recipes that they begin from."""
    return Path(str(resources.files("gem.scaling") / "ladders"))


def _table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as fault:
        raise ConfigError(
            refusal("gem scaling", "LADDER", must="be a TOML file in UTF-8", got=f"{path}: {fault}",
                    fix="mend it")
        ) from fault  # fmt: skip


def ladders_of(recipe: str) -> ScalingSpec:
    """Ladders of parts of a recipe's own sizes, on its own data.

    Args:
        recipe: name or path.

    Returns:
        one ladder for each of width, length, embedding, and all of them together; no law.

    Raises:
        ConfigError: no such recipe.
        UnsupportedError: another model than the hybrid one.
    """
    config = load_recipe(recipe)
    spec = config.model
    if not isinstance(spec, GemSpec):
        raise UnsupportedError(
            refusal(
                "gem scaling",
                "RECIPE",
                must='be of model.kind = "gem", whose sizes are known',
                got=repr(spec.kind),
                fix="write a ladder file that names what grows",
            )
        )
    directions = {
        "width": _widths(spec),
        "length": _lengths(config),
        "embedding": [("model.embeddings.embedding_dim", spec.embeddings.embedding_dim, 2)],
    }
    directions["together"] = [each for sizes in directions.values() for each in sizes]
    ladders = [
        LadderSpec(
            name=name,
            rungs=tuple(
                RungSpec(
                    name=word, set=tuple(_part(key, size, step, part) for key, size, step in sizes)
                )
                for word, part in PARTS.items()
            ),
        )
        for name, sizes in directions.items()
        if sizes
    ]
    return ScalingSpec(recipe=recipe, ladders=tuple(ladders), seeds=(config.seed,))


def _widths(spec: GemSpec) -> list[tuple[str, int, int]]:
    """Key, its value, and what the value has to be a multiple of."""
    found = [
        ("model.width", spec.width, 2),
        ("model.stream.width", spec.stream.width, 2 * spec.stream.heads),
    ]
    found += [
        (f"model.streams.{name}.width", own.width, 2 * own.heads)
        for name, own in spec.streams.items()
    ]
    return found


def _lengths(config: RunConfig) -> list[tuple[str, int, int]]:
    streams = config.data.streams or {}
    return [(f"data.streams.{name}.max_events", own.max_events, 1) for name, own in streams.items()]


def _part(key: str, size: int, step: int, part: float) -> str:
    return f"{key}={size if part == 1.0 else max(step, round(size * part / step) * step)}"

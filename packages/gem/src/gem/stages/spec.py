"""What `gem stages` is asked for: an upstream model of users, and rankers that read it.

Torch-free. A file is TOML, or the name of a shipped one.
"""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from gem.config import load_recipe, recipe_text
from gem.contract_faults import explain, explain_size
from gem.model.spec import GemSpec
from gem_opkit.contract import Contract
from gem_opkit.errors import ConfigError, refusal

_OP = "gem stages"


class UpstreamSpec(Contract):
    """The upstream stage."""

    recipe: str = Field(description="a shipped recipe or a file, with model.user_model")
    settings: tuple[str, ...] = Field(default=(), description="KEY=VALUE texts over the recipe")
    base_settings: tuple[str, ...] = Field(
        default=(),
        description="further ones that make it a smaller model, which gains are counted from; "
        "none: the mean rate, whose NE is 1, and a ranker without embeddings",
    )
    every_hours: float = Field(default=24.0, gt=0, description="between refreshes of embeddings")
    refresh_on: str | None = Field(
        default=None, description="events that refresh at once, STREAM.FIELD=ID,ID"
    )


class RankerSpec(Contract):
    """The downstream stage."""

    recipe: str = Field(description="a shipped recipe or a file; it reads no embeddings by itself")
    settings: tuple[str, ...] = Field(default=(), description="KEY=VALUE texts over the recipe")
    max_age_hours: float | None = Field(
        default=None, gt=0, description="an older embedding counts as none"
    )


class StagesSpec(Contract):
    """Two stages that are trained one behind the other."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="part of paths")
    description: str = ""
    seeds: tuple[int, ...] = Field(
        default=(1, 2, 3), min_length=1, description="each trains both stages"
    )
    upstream: UpstreamSpec
    rankers: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")], RankerSpec] = (
        Field(
            min_length=1, description="name -> a ranker, each trained without and with embeddings"
        )
    )

    @model_validator(mode="after")
    def _seeds_are_once(self) -> Self:
        if len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(
                f"seeds must be different whole numbers from 0; got {list(self.seeds)}; "
                f"remove the others"
            )
        return self


def shipped_stages() -> dict[str, Path]:
    """Files that come with the package.

    Returns:
        name -> file.
    """
    room = Path(str(resources.files("gem.stages") / "shipped"))
    return {file.stem: file for file in sorted(room.glob("*.toml"))}


def read_stages(asked: str) -> StagesSpec:
    """Read what to train.

    Args:
        asked: path of a file, or name of a shipped one.

    Returns:
        the stages; recipes that are files beside it are paths from here.

    Raises:
        ConfigError: a file that is not there or not right, or recipes that do not fit.
    """
    path = shipped_stages().get(asked, Path(asked))
    if not path.is_file():
        raise ConfigError(
            refusal(
                _OP,
                "STAGES",
                must=f"be a TOML file or one of {', '.join(shipped_stages())}",
                got=repr(asked),
                fix="check the path",
            )
        )
    try:
        raw: dict[str, Any] = tomllib.loads(recipe_text(path))
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{path}: file must be TOML; got {fault}; mend that line") from None
    if large := explain_size(raw):
        raise ConfigError(f"{path}: {large}")
    raw.setdefault("name", path.stem)
    try:
        spec = StagesSpec.model_validate(raw)
    except ValidationError as fault:
        raise ConfigError(f"{path}: {explain(fault, raw, StagesSpec)}") from None
    upstream = spec.upstream.model_copy(update={"recipe": _beside(path, spec.upstream.recipe)})
    rankers = {
        name: each.model_copy(update={"recipe": _beside(path, each.recipe)})
        for name, each in spec.rankers.items()
    }
    spec = spec.model_copy(update={"upstream": upstream, "rankers": rankers})
    _check_upstream(spec.upstream)
    for name, each in spec.rankers.items():
        _check_ranker(name, each, spec.upstream)
    return spec


def _beside(path: Path, recipe: str) -> str:
    beside = path.parent / recipe
    return str(beside) if beside.is_file() else recipe


def _check_upstream(own: UpstreamSpec) -> None:
    """Refuse a recipe before anything is trained."""
    upstream = load_recipe(own.recipe, own.settings)
    load_recipe(own.recipe, (*own.settings, *own.base_settings))
    model, train = upstream.model, upstream.train
    if not isinstance(model, GemSpec) or model.user_model is None:
        raise _refused("upstream.recipe", "have a section model.user_model", upstream.name)
    if train.passes > 1:
        raise _refused("upstream.recipe", "train in one pass", f"train.passes={train.passes}")
    if train.checkpoint_every_steps is None:
        got = f"train.checkpoint_every_steps unset in {upstream.name}"
        raise _refused("upstream.recipe", "write checkpoints all along the pass", got)


def _check_ranker(name: str, own: RankerSpec, upstream: UpstreamSpec) -> None:
    """Refuse a recipe that cannot read the embeddings."""
    ranker, key = load_recipe(own.recipe, own.settings), f"rankers.{name}.recipe"
    data = load_recipe(upstream.recipe, upstream.settings).data
    if ranker.data.dataset != data.dataset:
        must = f"read the data set of the upstream stage, {data.dataset!r}"
        raise _refused(key, must, repr(ranker.data.dataset))
    if not isinstance(ranker.model, GemSpec) or ranker.model.user_model is not None:
        raise _refused(key, "be a ranker of kind gem", f"{ranker.name}, which is none")
    if ranker.data.user_embeddings:
        names = ", ".join(ranker.data.user_embeddings)
        raise _refused(key, "read no embeddings by itself", f"data.user_embeddings.{names}")


def _refused(name: str, must: str, got: str) -> ConfigError:
    fix = "name another recipe, or change it by settings"
    return ConfigError(refusal(_OP, name, must=must, got=got, fix=fix))

"""What is to be measured of a recipe, and the recipe as it is measured."""

from dataclasses import dataclass
from typing import Literal

from gem.config import RunConfig, load_recipe
from gem_opkit.impl import Impl
from gem_parallel.launch import World

Where = Literal["host", "device"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be measured.

    Attributes:
        recipe: name or path.
        settings: keys of the recipe that are replaced.
        plan: texts ``axis=size``.
        examples: of a rank; None for the recipe's whole batch on each rank.
        steps: that are timed, above 0.
        warmup: steps before them, above 0.
        profiled: steps that are profiled afterwards; 0 for none.
        impl: what ``impl="auto"`` of every operator stands for.
        batches: where they lie.
    """

    recipe: str
    settings: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()
    examples: int | None = None
    steps: int = 20
    warmup: int = 4
    profiled: int = 3
    impl: Impl = "auto"
    batches: Where = "host"


def recipe_of(asked: Asked, world: World, *further: str) -> RunConfig:
    """Read the recipe as it is measured.

    Args:
        asked: recipe, settings, plan, and examples of a rank.
        world: the ranks.
        further: keys that are replaced on top.

    Returns:
        the config, its batch that of all ranks.
    """
    examples = asked.examples
    if examples is None:
        examples = load_recipe(asked.recipe, asked.settings).train.batch_examples
    # A rank that holds a part of the tables draws rows by their place, so all do.
    overrides = ["model.embeddings.initial_rows=by_place", *asked.settings]
    overrides += [f"train.batch_examples={examples * world.size}"]
    overrides += [f"parallel.{text}" for text in asked.plan]
    return load_recipe(asked.recipe, [*overrides, *further])

"""What a recipe's ``[parallel]`` chooses, as the forecast of a plan takes it."""

from collections.abc import Mapping

from gem.config import RunConfig
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.contract import ParallelPlan


def names_a_plan(config: RunConfig) -> bool:
    """Whether a recipe says how its ranks are split; one of a single rank only chooses formats.

    Args:
        config: the recipe.

    Returns:
        True where one of its axes is above 1.
    """
    return config.parallel is not None and config.parallel.world_size > 1


def plan_of_recipe(config: RunConfig) -> ParallelPlan:
    """The axes and formats that a recipe names.

    Args:
        config: the recipe.

    Returns:
        its plan, without what only the trainer reads; the default one where it names none.
    """
    own = config.parallel
    if own is None:
        return ParallelPlan()
    return ParallelPlan.model_validate({n: getattr(own, n) for n in ParallelPlan.model_fields})


def not_counted(config: RunConfig) -> tuple[str, ...]:
    """Keys of a recipe that change a step's time or memory, and that no forecast counts.

    Args:
        config: the recipe.

    Returns:
        qualified keys, of those that are not as they are by themselves.
    """
    own, precision = config.parallel, config.precision
    set_ = {
        "memory.budget_gib": config.memory.budget_gib is not None,
        "memory.kept": config.memory.kept != "as_is",
        "precision.recipe": precision.recipe not in (None, "bf16"),
        "precision.rules": bool(precision.rules),
        "precision.attention": precision.attention not in (None, "bf16"),
        "precision.gather_in_8_bits": precision.gather_in_8_bits,
        "train.compile": config.train.compile != "off",
        "parallel.gathers": own is not None and own.gathers != "nccl",
    }
    return tuple(key for key, differs in set_.items() if differs)


def with_whole_axes(
    config: RunConfig, fixed: Mapping[str, int | bool | str]
) -> dict[str, int | bool | str]:
    """Leave out the plans that the trainer refuses for another key of the recipe.

    Args:
        config: the recipe.
        fixed: axes that every plan must have.

    Returns:
        these, and 1 for each axis that a key of the recipe does not allow to be cut.

    Raises:
        ConfigError: an axis above 1 that such a key does not allow.
    """
    whole: dict[str, str] = {}
    if config.memory.budget_gib is not None or config.memory.kept != "as_is":
        whole["expert"] = "[memory]"
    if config.train.compile != "off":
        whole.update(shard="train.compile", expert="train.compile")
    if config.parallel is not None and config.parallel.overlap_sides:
        whole["shard"] = "parallel.overlap_sides"
    for axis, key in whole.items():
        if fixed.get(axis, 1) != 1:
            raise ConfigError(
                refusal(
                    "gem plan",
                    "--axis",
                    must=f"leave {axis} at 1 under the recipe's {key}",
                    got=f"{axis}={fixed[axis]}",
                    fix="leave one of the two out",
                )
            )
    return {**fixed, **dict.fromkeys(whole, 1)}

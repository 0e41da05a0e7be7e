"""What a recipe's ``[parallel]`` chooses, as the forecast of a plan takes it."""

from gem.config import RunConfig
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

"""The plan of a run on the ranks that there are."""

from gem.config import RunConfig
from gem.train.parallel_spec import ParallelSpec
from gem_parallel.launch import World


def plan_of(config: RunConfig, world: World) -> ParallelSpec:
    """The plan of a run on the ranks that there are.

    Args:
        config: the run; without a plan, every rank holds a copy of everything.
        world: the ranks.

    Returns:
        the plan. On one GPU, where it names no engine, an engine holds tables whose rows are drawn
        by their place: it looks up and moves the rows of all tables in one launch each, and lets no
        step wait for the device.

    Raises:
        ConfigError: the plan is for another number of ranks.
    """
    if config.parallel is None:
        plan = ParallelSpec(replicate=world.size)
    else:
        plan = config.parallel.on_ranks(world.size)
    alone = world.size == 1 and world.device.type == "cuda"
    by_place = config.model.embeddings.initial_rows == "by_place"
    if plan.table_engine is None and alone and by_place:
        return plan.model_copy(update={"table_engine": "torch"})
    return plan

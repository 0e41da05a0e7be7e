"""How many ranks share a weight under a plan: what decides whether it can travel in 8 bits."""

from collections.abc import Callable

from torch import nn

from gem.model.build import expert_mixtures
from gem.train.parallel_spec import ParallelSpec


def shares_of(plan: ParallelSpec, model: nn.Module) -> Callable[[str, int], int]:
    """How many ranks share a weight under a plan.

    Args:
        plan: of the run.
        model: from `build_model`.

    Returns:
        a function of a layer's qualified name and the elements of its weight; 1 where each rank
        holds it whole.
    """
    mixtures = tuple(f"{name}.experts." for name in expert_mixtures(model))

    def parts(name: str, elements: int) -> int:
        if elements < plan.replicate_below:
            return 1
        own = plan.expert > 1 and name.startswith(mixtures)
        return plan.shard if own else plan.shard * plan.expert

    return parts

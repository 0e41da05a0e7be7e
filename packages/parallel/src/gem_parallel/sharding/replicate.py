"""Copies of the dense parameters on every rank, and the scale of a rank's loss.

Torch's DistributedDataParallel does the work: it is well kept, and its buckets overlap the
all-reduce with the backward pass. Plans that shard are those of
`gem_parallel.dense.parallelise`.
"""

import inspect
from collections.abc import Collection

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gem_opkit.errors import ConfigError, UnsupportedError
from gem_parallel.collectives import all_reduce_sum, broadcast_tensors
from gem_parallel.contract import ParallelPlan
from gem_parallel.launch import World


def data_parallel(
    module: nn.Module, plan: ParallelPlan, world: World, *, ignored: Collection[nn.Parameter] = ()
) -> nn.Module:
    """Make the gradients of every rank's copy equal, averaged over ranks.

    All parameters, the ignored ones too, are first overwritten with those of rank 0. Scale each
    rank's mean loss by ``loss_scale`` so that the averaged gradient is that of the whole batch.

    Args:
        module: the model, on the world's device, with equal shapes on every rank.
        plan: must be a data-parallel plan of ``world.size`` ranks.
        world: the ranks.
        ignored: parameters whose gradients the caller merges (embedding tables: their gradients
            are sparse).

    Returns:
        The module to call in place of ``module``; ``module`` itself on one rank.

    Raises:
        ConfigError: the plan is for another number of ranks, or ignores a foreign parameter.
        UnsupportedError: the plan shards parameters or experts.
    """
    for axis in ("shard", "expert", "table_shard"):
        if getattr(plan, axis) > 1:
            raise UnsupportedError(
                f"data_parallel: {axis} must be 1; got {getattr(plan, axis)}; use "
                "parallelise for plans that shard, or replicate and table_replicate"
            )
    plan.check_world(world.size)
    if world.size == 1:
        return module
    return replicate(module, world, ignored=ignored)


def replicate(
    module: nn.Module, world: World, *, ignored: Collection[nn.Parameter] = ()
) -> DistributedDataParallel:
    """Wrap a module as `data_parallel` does, whatever the plan says of tables.

    Args:
        module: the model, on the world's device, with equal shapes on every rank.
        world: the ranks; several.
        ignored: parameters whose gradients the caller merges.

    Returns:
        The module to call in place of ``module``.

    Raises:
        ConfigError: ``ignored`` holds a parameter that is not the module's.
    """
    names = own_names(module, ignored)
    broadcast_tensors([*module.parameters(), *module.buffers()], world)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    # Buffers are equal by now and each rank keeps its own; torch 2.13 has a new word for that.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    if "forward_sync_buffers" in known:
        return DistributedDataParallel(
            module, gradient_as_bucket_view=True, forward_sync_buffers=False
        )
    return DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)


def own_names(module: nn.Module, ignored: Collection[nn.Parameter]) -> list[str]:
    """Look up the names of ignored parameters.

    Args:
        module: the model.
        ignored: some of its parameters.

    Returns:
        Their qualified names, in the order of ``ignored``.

    Raises:
        ConfigError: one of them is not the module's.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    foreign = [parameter for parameter in ignored if id(parameter) not in names]
    if foreign:
        raise ConfigError(
            f"data_parallel: ignored must hold parameters of the module; got {len(foreign)} "
            "that are not; pass the module's own parameters"
        )
    return [names[id(parameter)] for parameter in ignored]


def loss_scale(local_weight: float, world: World) -> float:
    """Factor for a rank's mean loss that makes the averaged gradient that of the whole batch.

    With mean losses l_r over weights w_r, the whole batch has loss Σ w_r l_r / Σ w_r, while
    averaging gives Σ l_r / W; hence the factor W w_r / Σ w_r. Right for unequal and empty parts.

    Args:
        local_weight: number (or weight) of what this rank's mean runs over, at least 0.
        world: the ranks.

    Returns:
        The factor; 1 on one rank, 0 on a rank without examples.
    """
    if world.size == 1:
        return 1.0
    total = torch.tensor([local_weight], dtype=torch.float64, device=world.device)
    whole = float(all_reduce_sum(total, world))
    return world.size * local_weight / whole if whole > 0 else 0.0

"""A plan as torch device meshes with named axes: one set of ranks, seen dense and sparse."""

from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gem_opkit.errors import ConfigError
from gem_parallel.contract import DENSE_AXES, SPARSE_AXES, ParallelPlan
from gem_parallel.launch import World


def plan_mesh(plan: ParallelPlan, world: World, view: Literal["dense", "sparse"]) -> DeviceMesh:
    """Build one of the two meshes of a plan.

    Args:
        plan: sizes of the axes; its product must be the world size.
        world: the ranks; a process group must exist when there is more than one.
        view: ``dense`` for (replicate, shard, expert), ``sparse`` for
            (table_shard, table_replicate). The last axis is innermost: its ranks are neighbours.

    Returns:
        A mesh with the axes' names.

    Raises:
        ConfigError: another number of ranks, or an unknown view, or one rank (which needs none).
    """
    if view not in ("dense", "sparse"):
        raise ConfigError(
            f"plan_mesh: view must be dense or sparse; got {view!r}; choose one of them"
        )
    plan.check_world(world.size)
    if world.size == 1:
        raise ConfigError(
            "plan_mesh: world must hold several ranks; got 1; a single rank needs no mesh"
        )
    axes = DENSE_AXES if view == "dense" else SPARSE_AXES
    sizes = tuple(getattr(plan, axis) for axis in axes)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=axes)

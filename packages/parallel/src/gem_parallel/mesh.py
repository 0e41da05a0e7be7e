"""A plan as torch device meshes with named axes: one set of ranks, seen dense and sparse."""

from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gem_opkit.errors import ConfigError
from gem_parallel.contract import DENSE_AXES, SPARSE_AXES, ParallelPlan, TableCopies
from gem_parallel.launch import World


def plan_mesh(plan: ParallelPlan, world: World, view: Literal["dense", "sparse"]) -> DeviceMesh:
    """Build one of the two meshes of a plan.

    Args:
        plan: sizes of the axes; its product must be the world size.
        world: the ranks; a process group must exist when there is more than one.
        view: ``dense`` for (replicate, shard, expert), ``sparse`` for
            (table_shard, table_replicate). The last axis is innermost: its ranks are neighbours,
            unless the plan has ``table_copies = "far"``.

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
    if not world.grouped:
        raise ConfigError(
            "plan_mesh: world must hold several ranks; got 1; a single rank needs no mesh"
        )
    axes = DENSE_AXES if view == "dense" else SPARSE_AXES
    if view == "sparse":
        return table_mesh(
            world.device.type, plan.table_shard, plan.table_replicate, plan.table_copies
        )
    sizes = tuple(getattr(plan, axis) for axis in axes)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=axes)


def table_mesh(
    kind: str, table_shard: int, table_replicate: int, copies: TableCopies
) -> DeviceMesh:
    """Build the mesh of tables, over all ranks. Every rank has to call it.

    Args:
        kind: type of the devices.
        table_shard: ranks of a sharding group.
        table_replicate: sharding groups.
        copies: where the copies of a part lie.

    Returns:
        a mesh (table_shard, table_replicate).
    """
    sizes = (table_shard, table_replicate)
    if copies == "near":
        return init_device_mesh(kind, sizes, mesh_dim_names=SPARSE_AXES)
    ranks = torch.arange(table_shard * table_replicate).view(table_replicate, table_shard)
    return DeviceMesh(kind, ranks.T.contiguous(), mesh_dim_names=SPARSE_AXES)


@dataclass(frozen=True, slots=True)
class DenseMeshes:
    """The sets of ranks that dense parameters and their gradients need.

    Attributes:
        common: mesh over which parameters outside experts are cut: (replicate, shard x expert), or
            (shard x expert) where there is one replica.
        experts: mesh over which parameters of experts are cut: (replicate, shard) or (shard).
        expert_group: ranks of this rank's expert axis; None where it is 1.
        expert_copies: ranks that hold this rank's experts, replicate x shard; None where it is 1.
        copies: all ranks. Like ``expert_copies`` a group that nothing else uses: gradients of
            copies are ready at other times than those of what is cut, and the two must not meet.
        inner: ranks of this rank's replica, shard x expert.
        shard_rank: of this rank along the shard axis.
    """

    common: DeviceMesh
    experts: DeviceMesh
    expert_group: dist.ProcessGroup | None
    expert_copies: dist.ProcessGroup | None
    copies: dist.ProcessGroup
    inner: dist.ProcessGroup
    shard_rank: int


def dense_meshes(plan: ParallelPlan, world: World) -> DenseMeshes:
    """Build what dense parameters need of a plan that shards or spreads experts.

    Args:
        plan: shard * expert is above 1, unless a single rank goes that way.
        world: the ranks.

    Returns:
        The meshes; every rank has to call this.

    Raises:
        ConfigError: another number of ranks.
    """
    plan.check_world(world.size)
    # The two inner axes as one, which torch's hybrid sharding asks for.
    axes = ("replicate", "shard_expert")
    sizes = (plan.replicate, plan.shard * plan.expert)
    common = init_device_mesh(world.device.type, sizes, mesh_dim_names=axes)
    common = common[axes] if plan.replicate > 1 else common[axes[1]]
    inner = common.get_group("shard_expert")
    copies = _group(list(range(world.size)), "world")
    if plan.expert == 1 and world.way != "expert":
        return DenseMeshes(common, common, None, None, copies, inner, inner.rank())
    dense = plan_mesh(plan, world, "dense")
    copies_axis = "replicate" if plan.shard == 1 else "replicate_shard"
    same_experts = dense.mesh[:, :, dense.get_local_rank("expert")].flatten().tolist()
    return DenseMeshes(
        common=common,
        experts=dense["replicate", "shard"] if plan.replicate > 1 else dense["shard"],
        expert_group=dense.get_group("expert"),
        expert_copies=_group(same_experts, copies_axis) if len(same_experts) > 1 else None,
        copies=copies,
        inner=inner,
        shard_rank=dense.get_local_rank("shard"),
    )


def _group(ranks: list[int], axis: str) -> dist.ProcessGroup:
    """Make a group that goes by the name of an axis, as torch calls the groups of a mesh."""
    made = dist.new_group(ranks, use_local_synchronization=True, group_desc=f"mesh_{axis}")
    return cast(dist.ProcessGroup, made)

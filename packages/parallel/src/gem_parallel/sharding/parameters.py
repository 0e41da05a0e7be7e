"""Cut dense parameters over ranks: torch's fully sharded data parallelism on the plan's meshes.

Which ranks hold what, for a plan of (replicate, shard, expert):

    kind of parameter           cut over            copies over         gradient summed over
    large                       shard x expert      replicate           all
    large, of an expert         shard               replicate           replicate x shard
    small                       -                   all                 all
    small, of an expert         -                   replicate x shard   replicate x shard

Parameters outside experts are cut over the expert axis too, rather than copied over it: a rank
then holds less, the two inner axes are neighbours so that the gather stays on fast links, and the
all-reduce over ``replicate`` carries less. Each sum is divided by the number of all ranks: an
expert's gradient is the sum over its axis already.

A unit's parameters are gathered while the unit before it runs, and let go after it. A unit within
another counts as the one behind it: its parameters are gathered while the outer one's others are in
use. In the backward pass, the units before are gathered together, since the outer one of them is
asked for first. With ``gather_dtype`` bf16 parameters are rounded before they travel, rather than
by each product that reads them; gradients are widened to fp32 before they are reduced, unless
``reduce_dtype`` says otherwise. With
``keep_gathered`` a unit is let go only after its backward pass, and whatever a forward pass without
one has left is let go before the next: shards may have changed in between.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    _common_utils,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from gem_parallel.contract import ParallelPlan
from gem_parallel.launch import World
from gem_parallel.mesh import DenseMeshes, dense_meshes
from gem_parallel.sharding.copies import CopiedGradients, StandIns
from gem_parallel.sharding.experts import spread_experts

# Torch 2.11 gathers a unit's parameters for the backward pass when a gradient reaches one of the
# tensors that the unit gave back bare or in a list, tuple or dict. Later versions look into
# dataclasses too, and then have this function.
_SEES_DATACLASSES = hasattr(_common_utils, "collect_grad_tensors")


@dataclass(frozen=True, slots=True)
class Sharding:
    """What has become of a model.

    Attributes:
        meshes: of the plan.
        copies: gradients of what is not cut.
        parameters: name -> what this rank trains.
        of_experts: names of those that belong to one expert.
        absent: name -> (shape, dtype, rank of the expert axis that keeps it) of those that this
            rank has not.
        order: names of all, as in the single-process model.
    """

    meshes: DenseMeshes
    copies: CopiedGradients
    parameters: dict[str, nn.Parameter]
    of_experts: frozenset[str]
    absent: dict[str, tuple[torch.Size, torch.dtype, int]]
    order: tuple[str, ...]


def shard(
    module: nn.Module,
    plan: ParallelPlan,
    world: World,
    *,
    units: Sequence[str],
    experts: Sequence[str],
    ignored: set[nn.Parameter],
    stand_ins: StandIns | None = None,
) -> Sharding:
    """Spread experts and cut parameters of a model, in place.

    Args:
        module: the model, equal on all ranks.
        plan: shards or spreads experts.
        world: the ranks.
        units: names of what is gathered together, in the order of running.
        experts: names of the mixtures.
        ignored: parameters that stay as they are.
        stand_ins: as for `gem_parallel.dense.parallelise`.

    Returns:
        What has become of it.
    """
    before = {n: p for n, p in module.named_parameters() if p not in ignored}
    meshes = dense_meshes(plan, world)
    if meshes.expert_group is not None:
        spread_experts(module, experts, meshes.expert_group)
    own = {n: p for n, p in module.named_parameters() if p not in ignored}
    spread = tuple(experts) if meshes.expert_group is not None else ()
    lists = tuple(f"{name}.experts." for name in spread)
    of_experts = frozenset(n for n in own if n.startswith(lists))
    # Where shard is 1 an expert is not cut, whatever its size.
    copied = {
        name: p
        for name, p in own.items()
        if p.numel() < plan.replicate_below or (name in of_experts and plan.shard == 1)
    }
    held = ignored | set(copied.values())
    local = [
        f"{name}.experts.{place}"
        for name in spread
        for place in range(len(cast(nn.ModuleList, module.get_submodule(f"{name}.experts"))))
    ]
    made: dict[str, FSDPModule] = {}
    shard_it = partial(_fully_shard, held=held, plan=plan)
    # Inner units first: an outer one takes what is left.
    for name in sorted(dict.fromkeys([*units, *local]), key=lambda name: -name.count(".")):
        if not name:
            continue
        unit = module.get_submodule(name)
        mesh = meshes.experts if name.startswith(lists) else meshes.common
        if _has_parameters(unit, held):
            made[name] = shard_it(unit, mesh)
            if mesh is not meshes.common:
                made[name].set_all_reduce_hook(_Divide(plan.expert))
    if _has_parameters(module, held) or made:
        root = shard_it(module, meshes.common)
        running = [name for name in _running_order(units, local) if name in made]
        _prefetch(root, running, made)
        if plan.keep_gathered:
            begin_anew = _Reshard([root, *made.values()])
            module.register_forward_pre_hook(begin_anew, prepend=True)
    common = {name: p for name, p in copied.items() if name not in of_experts}
    own_experts = {name: p for name, p in copied.items() if name in of_experts}
    copies = CopiedGradients(
        [(common, meshes.copies), (own_experts, meshes.expert_copies)],
        divisor=world.size,
        stand_ins={} if stand_ins is None else stand_ins(copied),
        narrow=plan.reduce_dtype == "bf16",
    )
    module.register_forward_pre_hook(copies.forget)
    parameters = {n: p for n, p in module.named_parameters() if p not in ignored}
    return Sharding(
        meshes=meshes,
        copies=copies,
        parameters=parameters,
        of_experts=of_experts,
        absent=_absent(before, parameters, experts, plan, module),
        order=tuple(before),
    )


def _absent(
    before: Mapping[str, nn.Parameter],
    after: Mapping[str, nn.Parameter],
    experts: Sequence[str],
    plan: ParallelPlan,
    module: nn.Module,
) -> dict[str, tuple[torch.Size, torch.dtype, int]]:
    """Tell what other ranks keep, and which of them."""
    found = {}
    for mixture in experts:
        prefix = f"{mixture}.experts."
        count = len(cast(nn.ModuleList, module.get_submodule(f"{mixture}.experts")))
        for name, parameter in before.items():
            if name.startswith(prefix) and name not in after:
                place = int(name.removeprefix(prefix).split(".")[0])
                owner = place // (count // plan.expert)
                found[name] = (parameter.shape, parameter.dtype, owner)
    return found


class _Divide:
    """Divides a reduced gradient: an expert's has been summed, not averaged, over its axis."""

    def __init__(self, divisor: int) -> None:
        self._divisor = divisor

    def __call__(self, gradient: Tensor) -> None:
        gradient.div_(self._divisor)


def _has_parameters(module: nn.Module, held: set[nn.Parameter]) -> bool:
    """Whether a module has parameters that are neither held back nor cut already."""
    return any(p not in held and not isinstance(p, DTensor) for p in module.parameters())


def _formats(plan: ParallelPlan) -> MixedPrecisionPolicy:
    """What parameters are gathered in; inputs and outputs of units stay what they are."""
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if plan.gather_dtype == plan.reduce_dtype == "fp32":
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=None if plan.gather_dtype == "fp32" else torch.bfloat16,
        reduce_dtype=formats[plan.reduce_dtype],
        cast_forward_inputs=False,
    )


class _Reshard:
    """Lets go of what is whole, before the hooks of torch look at what there is."""

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self._units = units

    def __call__(self, *_: object) -> None:
        for unit in self._units:
            unit.reshard()


def _fully_shard(
    module: nn.Module, mesh: DeviceMesh, *, held: set[nn.Parameter], plan: ParallelPlan
) -> FSDPModule:
    if not _SEES_DATACLASSES:
        module.register_forward_hook(_announce_fields)
    own = {p for p in module.parameters() if p in held}
    # Said for the outermost module: torch would keep what it gathers for a backward pass that may
    # never come, and use it again after the parameters have changed.
    return cast(
        FSDPModule,
        fully_shard(
            module,
            mesh=mesh,
            ignored_params=own,
            reshard_after_forward=not plan.keep_gathered,
            mp_policy=_formats(plan),
        ),
    )


def _announce_fields(module: nn.Module, _: object, output: object) -> None:
    """Gather for the backward pass also when a gradient comes through a dataclass's tensor."""
    if torch.is_grad_enabled():
        state = fully_shard.state(cast(Any, module))  # pyright: ignore[reportFunctionMemberAccess]
        for tensor in _in_dataclasses(output, inside=False):
            tensor.register_hook(state._pre_backward)


def _in_dataclasses(value: object, *, inside: bool) -> list[Tensor]:
    if torch.is_tensor(value):
        return [value] if inside and value.requires_grad else []
    if is_dataclass(value) and not isinstance(value, type):
        parts, inside = [getattr(value, field.name) for field in fields(value)], True
    elif isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        return []
    return [tensor for part in parts for tensor in _in_dataclasses(part, inside=inside)]


def _running_order(units: Sequence[str], local: Sequence[str]) -> list[str]:
    """Put own experts after the innermost unit that holds them."""
    order = list(dict.fromkeys(units))
    for name in reversed(local):
        if name in order:
            continue
        around = [unit for unit in order if name.startswith(f"{unit}.")]
        place = order.index(max(around, key=len)) + 1 if around else len(order)
        order.insert(place, name)
    return order


def _prefetch(root: FSDPModule, running: Sequence[str], made: Mapping[str, FSDPModule]) -> None:
    """Let each unit begin the gathering of the next, forward and backward.

    A backward pass asks for an outer unit and for those within at the same moment, so the innermost
    one begins what comes before all of them.
    """
    units = [root, *(made[name] for name in running)]
    for unit, after in pairwise(units):
        unit.set_modules_to_forward_prefetch([after])
    for before, behind in pairwise(_families(running)):
        made[behind[-1]].set_modules_to_backward_prefetch([made[name] for name in before])


def _families(running: Sequence[str]) -> list[list[str]]:
    """Put units that lie within one another together, in the order of running."""
    families: list[list[str]] = []
    for name in running:
        if families and name.startswith(f"{families[-1][0]}."):
            families[-1].append(name)
        else:
            families.append([name])
    return families

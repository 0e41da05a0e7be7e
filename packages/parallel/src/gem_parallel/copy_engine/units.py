"""Let the units of a sharded model gather their parameters by the copy engines."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gem_opkit.errors import UnsupportedError, refusal
from gem_parallel.copy_engine.buffers import BufferPool, SharedBuffer
from gem_parallel.copy_engine.choose import GatherChoice, GatherWay
from gem_parallel.copy_engine.gather import CopyEngineGather, UnitGather


def gather_by_copy_engines(
    module: nn.Module,
    device: torch.device,
    *,
    way: GatherWay,
    at_least_bytes: int | None = None,
    make: Callable[[dist.ProcessGroup, int], SharedBuffer] | None = None,
    named: tuple[str, str] = ("gather_by_copy_engines", "way"),
) -> dict[str, CopyEngineGather]:
    """Choose how the units of a sharded model gather. Every rank has to call it.

    What is gathered, and so every result, is the same in every way, to the bit.

    Args:
        module: sharded by `gem_parallel.dense.parallelise`, before its first forward pass.
        device: of this rank.
        way: ``nccl`` leaves all as it is; ``copy_engine`` copies whatever is large, and is refused
            where that cannot be; ``measured`` times both first and copies from the size on from
            which that is faster, or not at all, and says so in the log.
        at_least_bytes: of one rank, in place of what is large or of what is measured.
        make: makes a shared buffer of a number of bytes for a group; None for torch's symmetric
            memory, which only GPUs of one host have.
        named: what a refusal calls the operator and its argument: the caller's own words.

    Returns:
        name of a unit -> how its group gathers; of those that may use the copy engines.

    Raises:
        UnsupportedError: ``copy_engine`` where ranks cannot read each other's memory, or in a
            version of torch that lets nobody replace the gathering; the message says which.
    """
    if way == "nccl":
        return {}
    choice = GatherChoice(way, at_least_bytes, make, named)
    units = _units(module)
    groups: dict[dist.ProcessGroup, CopyEngineGather | None] = {}
    found: dict[str, CopyEngineGather] = {}
    for name, (unit, group) in units.items():
        if group not in groups:
            groups[group] = _of_group(group, device, choice)
        gathers = groups[group]
        if gathers is None:
            continue
        if not hasattr(unit, "set_custom_all_gather"):
            raise UnsupportedError(
                refusal(
                    *named,
                    must='be "nccl" with a torch that lets nobody replace the gathering',
                    got=f'"{way}" with torch {torch.__version__}',
                    fix="take torch 2.11 or newer",
                )
            )
        unit.set_custom_all_gather(UnitGather(name or "model", gathers))
        found[name] = gathers
    return found


def _of_group(
    group: dist.ProcessGroup, device: torch.device, choice: GatherChoice
) -> CopyEngineGather | None:
    at_least_bytes = choice.from_bytes(group, device)
    if at_least_bytes is None:
        return None
    pool = BufferPool(lambda bytes_: choice.buffer(group, bytes_, device))
    return CopyEngineGather(group, pool, at_least_bytes)


def _units(module: nn.Module) -> dict[str, tuple[FSDPModule, dist.ProcessGroup]]:
    """Every unit with parameters of its own, and the ranks over which these are cut."""
    names = {name: part for name, part in module.named_modules() if isinstance(part, FSDPModule)}
    found: dict[str, tuple[FSDPModule, dist.ProcessGroup]] = {}
    seen: set[nn.Parameter] = set()
    # Inner units first: an outer one has what is left.
    for name in sorted(names, key=lambda name: -len(name.split(".")) if name else 1):
        unit = names[name]
        own = [
            p
            for p in module.get_submodule(name).parameters()
            if isinstance(p, DTensor) and p not in seen
        ]
        seen.update(own)
        if own:
            mesh = own[0].device_mesh
            group = mesh.get_group(mesh.ndim - 1)
            if group.size() > 1:
                found[name] = unit, group
    return {name: found[name] for name in names if name in found}

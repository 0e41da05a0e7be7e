"""Let the units of a sharded model gather their parameters by the copy engines."""

import logging
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gem_opkit.errors import UnsupportedError, refusal
from gem_parallel.copy_engine.buffers import BufferPool, SharedBuffer, SymmetricBuffer
from gem_parallel.copy_engine.gather import CopyEngineGather, UnitGather
from gem_parallel.copy_engine.reach import break_even, measure, why_not

GatherWay = Literal["nccl", "copy_engine", "measured"]
# From which size ``copy_engine`` copies. Two H200 gather faster so from 2 MiB on, by the row of
# results/h200x2/copy_engine.jsonl; below, launches decide, and times move from run to run.
LARGE_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)


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
        at_least_bytes: of one rank, in place of `LARGE_BYTES` or of what is measured.
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
    units = _units(module)
    groups: dict[dist.ProcessGroup, CopyEngineGather | None] = {}
    found: dict[str, CopyEngineGather] = {}
    for name, (unit, group) in units.items():
        if group not in groups:
            groups[group] = _of_group(group, device, way, at_least_bytes, make, named)
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
    group: dist.ProcessGroup,
    device: torch.device,
    way: GatherWay,
    at_least_bytes: int | None,
    make: Callable[[dist.ProcessGroup, int], SharedBuffer] | None,
    named: tuple[str, str],
) -> CopyEngineGather | None:
    reason = why_not(group, device) if make is None else None
    if reason is not None:
        if way == "copy_engine":
            raise UnsupportedError(
                refusal(
                    *named,
                    must='be "nccl" or "measured" here',
                    got=f'"copy_engine"; {reason}',
                    fix='take "measured", which uses NCCL where it has to',
                )
            )
        _log.info("parameters are gathered by NCCL: %s", reason)
        return None
    if at_least_bytes is None and way == "measured":
        measured = measure(group, device)
        at_least_bytes = break_even(measured)
        rates = ", ".join(
            f"{m.part_bytes / 2**20:.0f} MiB: {m.nccl_ms:.3f} and {m.copy_ms:.3f} ms"
            for m in measured
        )
        said = "never" if at_least_bytes is None else f"from {at_least_bytes / 2**20:.0f} MiB on"
        _log.info("copy engines faster than NCCL %s (a rank, NCCL and copies: %s)", said, rates)
        if at_least_bytes is None:
            return None
    at_least_bytes = LARGE_BYTES if at_least_bytes is None else at_least_bytes

    def buffer(bytes_: int) -> SharedBuffer:
        return SymmetricBuffer(group, bytes_, device) if make is None else make(group, bytes_)

    return CopyEngineGather(group, BufferPool(buffer), at_least_bytes)


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

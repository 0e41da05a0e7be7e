"""Who may read whose memory, and from which size on that is faster than NCCL."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from gem_parallel.collectives import all_gather_single
from gem_parallel.copy_engine.buffers import BufferPool, SymmetricBuffer
from gem_parallel.copy_engine.gather import CopyEngineGather

_BOOT = Path("/proc/sys/kernel/random/boot_id")
# Of one rank. A unit of a large model gathers tens to hundreds of MiB.
SIZES = tuple(2**power for power in range(20, 29, 2))
_WARM_UP, _CALLS = 2, 5


def why_not(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Tell why ranks cannot fetch from each other's memory.

    Every rank of the group has to call it.

    Args:
        group: the ranks.
        device: of this rank.

    Returns:
        the reason, the same on every rank; None where they can.
    """
    if device.type != "cuda":
        return f"the ranks compute on {device.type}, which has no copy engines"
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    index = torch.cuda.current_device() if device.index is None else device.index
    told: list[tuple[str, int] | None] = [None] * group.size()
    dist.all_gather_object(told, (f"{socket.gethostname()} {boot}", index), group=group)
    places = [place for place in told if place is not None]
    if len({host for host, _ in places}) > 1:
        return "the ranks are on several hosts, whose memory only a network reaches"
    blind = [
        other
        for _, other in places
        if other != index and not torch.cuda.can_device_access_peer(index, other)
    ]
    any_blind: list[list[int] | None] = [None] * group.size()
    dist.all_gather_object(any_blind, blind, group=group)
    for (_, own), others in zip(places, any_blind, strict=True):
        if others:
            return f"GPU {own} has no access to the memory of GPU {others[0]}"
    return None


@dataclass(frozen=True, slots=True)
class Measured:
    """One size, gathered both ways.

    Attributes:
        part_bytes: of one rank.
        nccl_ms: of the slowest rank.
        copy_ms: of the slowest rank.
    """

    part_bytes: int
    nccl_ms: float
    copy_ms: float


def break_even(measured: Sequence[Measured]) -> int | None:
    """Find the size from which the copy engines are faster at every size.

    Args:
        measured: sizes in ascending order.

    Returns:
        bytes of one rank; None where they are not faster at the largest.
    """
    found = None
    for each in reversed(measured):
        if each.copy_ms >= each.nccl_ms:
            break
        found = each.part_bytes
    return found


def measure(
    group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int] = SIZES
) -> list[Measured]:
    """Time both ways of gathering with nothing beside them. Every rank of the group calls it.

    Args:
        group: ranks that may read each other's memory.
        device: of this rank, a GPU.
        sizes: bytes of one rank, multiples of 4.

    Returns:
        one entry a size, ascending, the same on every rank. Takes about 0.1 s for a group of two.
    """
    pool = BufferPool(lambda bytes_: SymmetricBuffer(group, bytes_, device))
    gathers = CopyEngineGather(group, pool, 0)
    ranks = group.size()
    pool.expect(max(sizes) * ranks)
    out = torch.empty(max(sizes) * ranks, dtype=torch.uint8, device=device)
    found = []
    for part_bytes in sorted(sizes):
        whole = out[: part_bytes * ranks]
        own = whole.narrow(0, group.rank() * part_bytes, part_bytes)
        lent = pool.lend(part_bytes * ranks, torch.uint8)
        times = [
            _time(lambda whole=whole, own=own: all_gather_single(whole, own, group=group)),
            _time(lambda lent=lent: gathers.fetch(lent)),
        ]
        del lent
        slowest = torch.tensor(times, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        found.append(Measured(part_bytes, *slowest.tolist()))
    return found


def _time(run: Callable[[], object]) -> float:
    """Median time of a call on the current stream, milliseconds."""
    took = []
    for call in range(_WARM_UP + _CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if call >= _WARM_UP:
            took.append(start.elapsed_time(end))
    return median(took)

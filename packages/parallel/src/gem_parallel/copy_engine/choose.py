"""From which size on the ranks of a group gather by copies: as asked for, or as measured."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from gem_opkit.errors import UnsupportedError, refusal
from gem_parallel.copy_engine.buffers import SharedBuffer, SymmetricBuffer
from gem_parallel.copy_engine.reach import break_even, measure, why_not

GatherWay = Literal["nccl", "copy_engine", "measured"]
# From which size ``copy_engine`` copies. Two H200 gather faster so from 2 MiB on, by the row of
# results/h200x2/copy_engine.jsonl; below, launches decide, and times move from run to run.
LARGE_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatherChoice:
    """How the ranks of a group are to gather.

    Attributes:
        way: ``nccl``; ``copy_engine`` copies whatever is large, and is refused where that cannot
            be; ``measured`` times both first and copies from the size on from which that is faster,
            or not at all, and says so in the log.
        at_least_bytes: of one rank, in place of `LARGE_BYTES` or of what is measured.
        make: makes a shared buffer of a number of bytes for a group; None for torch's symmetric
            memory, which only GPUs of one host have.
        named: what a refusal calls the operator and its argument: the caller's own words.
        what: is gathered, for the log.
    """

    way: GatherWay = "nccl"
    at_least_bytes: int | None = None
    make: Callable[[dist.ProcessGroup, int], SharedBuffer] | None = None
    named: tuple[str, str] = ("gather_by_copy_engines", "way")
    what: str = "parameters"

    def from_bytes(self, group: dist.ProcessGroup, device: torch.device) -> int | None:
        """Decide for a group. Every rank of it has to call this.

        Args:
            group: the ranks.
            device: of this rank.

        Returns:
            bytes of one rank from which copies are taken; None for never.

        Raises:
            UnsupportedError: ``copy_engine`` where ranks cannot read each other's memory.
        """
        if self.way == "nccl":
            return None
        reason = why_not(group, device) if self.make is None else None
        if reason is not None:
            if self.way == "copy_engine":
                raise UnsupportedError(
                    refusal(
                        *self.named,
                        must='be "nccl" or "measured" here',
                        got=f'"copy_engine"; {reason}',
                        fix='take "measured", which uses NCCL where it has to',
                    )
                )
            _log.info("%s are gathered by NCCL: %s", self.what, reason)
            return None
        if self.at_least_bytes is not None:
            return self.at_least_bytes
        if self.way == "copy_engine":
            return LARGE_BYTES
        measured = measure(group, device)
        found = break_even(measured)
        rates = ", ".join(
            f"{m.part_bytes / 2**20:.0f} MiB: {m.nccl_ms:.3f} and {m.copy_ms:.3f} ms"
            for m in measured
        )
        said = "never" if found is None else f"from {found / 2**20:.0f} MiB on"
        _log.info("copy engines faster than NCCL %s (a rank, NCCL and copies: %s)", said, rates)
        return found

    def buffer(self, group: dist.ProcessGroup, bytes_: int, device: torch.device) -> SharedBuffer:
        """Make a shared buffer. Every rank of the group has to call this.

        Args:
            group: the ranks.
            bytes_: size on every rank.
            device: of this rank.
        """
        if self.make is not None:
            return self.make(group, bytes_)
        return SymmetricBuffer(group, bytes_, device)
